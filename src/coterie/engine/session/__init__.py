"""A run, from settings to its end: spec, build, resume, execute."""

from coterie.engine.loop import Callbacks
from coterie.engine.session.build import bind, follow_data, prepare
from coterie.engine.session.execute import execute, make_loop, open_runtime
from coterie.engine.session.resume import check_unchanged, rebuild, recorded, resolved
from coterie.engine.session.spec import Factory, Objects, Session

__all__ = [
    "Callbacks", "Factory", "Objects", "Session", "bind", "check_unchanged", "execute", "follow_data", "make_loop",
    "open_runtime", "prepare", "rebuild", "recorded", "resolved",
]  # fmt: skip

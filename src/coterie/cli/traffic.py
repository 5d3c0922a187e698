"""Declared bytes of every method for one model, without running anything."""

from functools import cached_property
from pathlib import Path

from coterie.config import settings
from coterie.errors import CoterieError
from coterie.method import Method
from coterie.methods import find
from coterie.session import Session, prepare


class Traffic:
    """Binds methods to the same small federation and asks what they would send."""

    def __init__(self, model: str | None, data: str, data_dir: Path | None):
        self.data, self._model, self._dir = data, model, data_dir

    @cached_property
    def _session(self) -> Session:
        from coterie.config import Engine

        chosen = settings(method="fedavg", data=self.data, model=self._model, public=100, partition="iid", clients=20)
        return prepare(chosen, Engine(data_dir=self._dir))

    @property
    def model(self) -> str:
        n = sum(self._session.method.ctx.w0[k].numel() for k in self._session.method.ctx.net.trainable)
        return f"{self._model or 'the default model'} ({n:,} parameters)"

    def of(self, name: str) -> tuple[str, str]:
        """KB up and down in a late round for a client with all classes; a dash where the method does not fit."""
        method: Method = find(name)()
        method.ctx = self._session.method.ctx
        try:
            method.check()
            p = method.payload(method.ctx.classes, method.ctx.rounds)
        except (CoterieError, KeyError):
            return "-", "-"
        return f"{p.up / 1024:.1f}", f"{p.down / 1024:.1f}"


def traffic(model: str | None, data: str, data_dir: Path | None) -> Traffic:
    return Traffic(model, data, data_dir)

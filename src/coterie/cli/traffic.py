"""The declared bytes of methods for one model, without training."""

from functools import cached_property
from pathlib import Path

import torch

from coterie.config import Engine, settings
from coterie.core.context import State
from coterie.core.method import Method, Moment, Upload
from coterie.core.schema import Entry, Link, Schema
from coterie.core.tree import Tree
from coterie.engine.session import Session, prepare
from coterie.errors import CoterieError
from coterie.methods import find
from coterie.models.registry import WITH_NORM

_SENDERS = 8  # clients that answer once; more than any method's default number of groups or models


class Traffic:
    """Binds methods to the same small federation and computes the bytes that they would send."""

    def __init__(self, model: str | None, data: str, data_dir: Path | None):
        self.data, self._model, self._dir = data, model, data_dir

    @cached_property
    def _session(self) -> Session:
        return self._prepared(self._model)

    @cached_property
    def _normed(self) -> Session:
        return self._prepared(WITH_NORM)

    def _prepared(self, model: str | None) -> Session:
        chosen = settings(method="fedavg", data=self.data, model=model, public=100, partition="iid", clients=20)
        return prepare(chosen, Engine(data_dir=self._dir))

    @property
    def model(self) -> str:
        n = sum(self._session.method.ctx.w0[k].numel() for k in self._session.method.ctx.net.trainable)
        return f"{self._model or 'the default model'} ({n:,} parameters)"

    def bound(self, name: str) -> Method | None:
        """Return a method with its default settings and a context; None if it does not fit the model or the data."""
        method = find(name)()
        method.ctx = (self._normed if "bn" in method.needs and not self._model else self._session).method.ctx
        try:
            method.check()
            method.schema("up")
        except (CoterieError, KeyError):
            return None
        return method

    def of(self, name: str) -> tuple[str, str]:
        """Return the KB up and down of `declared`; a dash if the method does not fit the model or the data."""
        method = self.bound(name)
        if method is None:
            return "-", "-"
        up, down = declared(method)
        return f"{up / 1024:.1f}", f"{down / 1024:.1f}"


def declared(method: Method) -> tuple[int, int]:
    """Return the bytes up and down of a client with all classes in the last round.

    Where they depend on the server's state, it is the state after a few clients have answered once.
    """
    server = _answered_once(method)
    links: tuple[Link, Link] = ("up", "down")
    sizes = []
    for link in links:
        try:
            schema = method.schema(link, Moment(server, method.ctx.clients[0], method.ctx.planned_rounds))
        except (LookupError, TypeError):  # the server has no such state yet
            schema = method.schema(link)
        sizes.append(schema.nbytes())
    return sizes[0], sizes[1]


def _answered_once(method: Method) -> State:
    """Return the server's state after a few clients have sent zeros; its first state if the method cannot use them."""
    server = first = method.setup()
    try:
        for t in (0, 1) if method.opening() else (1,):
            payloads = {i: _zeros(method.schema("up", Moment(server, i, t))) for i in method.ctx.clients[:_SENDERS]}
            server = method.aggregate(server, [Upload(p, sender=i, samples=1) for i, p in payloads.items()], t)
    except Exception:  # some methods cannot aggregate zeros
        return first
    return server


def _zeros(schema: Schema) -> Tree:
    longest = {name: high for name, (_, high) in schema.lengths.items()}
    return {name: _zero(entry, longest) for name, entry in schema.entries.items()}


def _zero(entry: Entry, lengths: dict[str, int]) -> torch.Tensor:
    shape = [lengths[n] if isinstance(n, str) else n for n in entry.shape]
    if entry.distinct:
        return torch.arange(int(entry.low), int(entry.low) + shape[0], dtype=entry.dtype)
    return torch.tensor(max(0, int(entry.low)), dtype=entry.dtype).expand(shape)  # takes no memory

"""Different models for different clients: "0-9=mlp,10-19=lenet5", or a function from client to model."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import nn

from coterie.errors import CoterieError
from coterie.models.registry import ModelFactory, ModelSource

_PART = re.compile(r"(\d{1,9})(?:-(\d{1,9}))?=(.+)")


@dataclass(frozen=True)
class PerClient:
    """A function that returns the model of a client number: a name, a factory or an nn.Module."""

    pick: Callable[[int], ModelSource]


def is_assignment(model: str | None) -> bool:
    return model is not None and "=" in model


def parse_client_models(text: str) -> list[tuple[range, str]]:
    """Return the parts of an assignment: a range of clients, and the name of their model."""
    parts = []
    for part in text.split(","):
        match = _PART.fullmatch(part.strip())
        if match is None:
            raise CoterieError(f'model "{text[:80]}": "{part.strip()[:40]}" is not clients=name, such as 0-9=mlp')
        first, last, name = match.groups()
        parts.append((range(int(first), int(last or first) + 1), name.strip()))
    return parts


def assign_models(model: str | PerClient, clients: Sequence[int]) -> dict[int, str | nn.Module | ModelFactory]:
    """Return the model of every client; raise CoterieError if a client has none or two."""
    if isinstance(model, PerClient):
        return {i: model.pick(i) for i in clients}
    out: dict[int, str | nn.Module | ModelFactory] = {}
    for ids, name in parse_client_models(model):
        if ids and max(ids) >= len(clients):
            raise CoterieError(
                f'model "{model}" names client {max(ids)}, but clients are numbered 0 to {len(clients) - 1}'
            )
        if not ids:
            raise CoterieError(f'model "{model}": the range {ids.start}-{ids.stop - 1} is empty')
        if twice := [i for i in ids if i in out]:
            raise CoterieError(f'model "{model}" names two models for client {twice[0]}')
        out |= dict.fromkeys(ids, name)
    if missing := [i for i in clients if i not in out]:
        raise CoterieError(f'model "{model}" names no model for client {missing[0]}')
    return out

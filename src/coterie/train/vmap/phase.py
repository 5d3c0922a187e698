"""One phase of a stack of clients: gather batches, take steps, and remove clients that have finished."""

from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from coterie.core.context import ClientData, Extras
from coterie.core.method import Start, Trained
from coterie.core.tree import Tree
from coterie.train.trainer import Effort
from coterie.train.vmap.step import Extra, Recipe, Steps

SIZES = (1, 2, 4, 8, 12, 16, 24, 32)  # sizes of stacks: few shapes need few traces
LARGEST_STACK = SIZES[-1]  # clients in one stack
Draws = tuple[Tensor, list[int]]  # samples of each step [steps, width], and the number of real ones per step


@dataclass
class Member:
    """One client in a stack, before and after its training."""

    params: Tree
    extras: Extras
    data: ClientData
    share: float = 1.0
    memory: Tree | None = None  # state of its optimisers, if it outlives this training
    train: bool = True
    per_sample: Tensor | None = None
    noise: list[Tensor] = field(default_factory=list)  # states of the generators that the model's noise uses
    aux: list[Any] = field(default_factory=list)
    steps: int = 0
    samples: int = 0
    loss: Tensor | float = 0.0

    @classmethod
    def of(cls, start: Start, data: ClientData, share: float = 1.0, memory: Tree | None = None) -> "Member":
        """Return a member that has not trained yet."""
        return cls(start.params, start.extras, data, share, memory, start.train, start.per_sample)

    @property
    def start(self) -> Start:
        """The start of its training."""
        return Start(self.params, self.extras, self.train, self.per_sample)

    @property
    def trained(self) -> Trained:
        """The result of its training."""
        return Trained(self.params, self.extras, self.aux, self.steps)

    @property
    def columns(self) -> list[Tensor]:
        """The tensors that batches are taken from [samples, ...]: x, y, and a value per sample if there is one."""
        return [*self.data.train, *(() if self.per_sample is None else (self.per_sample,))]

    @property
    def effort(self) -> Effort:
        """The work of its training."""
        return Effort(self.steps, self.samples, float(self.loss / max(self.steps, 1)))


class Stack:
    """A stack of members, sorted by their number of steps, longest first; further rows repeat the last one."""

    def __init__(
        self,
        steps: Steps,
        key: Any,
        recipe: Recipe,
        members: list[Member],
        draws: list[Draws],
        lr: Tensor,
    ):
        self.steps, self.key, self.recipe, self.members, self.lr = steps, key, recipe, members, lr
        self.columns = [
            torch.cat(c) for c in zip(*(m.columns for m in members), strict=True)
        ]  # x, y, a value per sample
        self.lengths = [len(real) for _, real in draws]
        self.samples = [sum(real) for _, real in draws]
        rows = [*range(len(members))] + [len(members) - 1] * (_rows(len(members)) - len(members))

        device = members[0].data.train.y.device
        most, width = draws[0][0].shape
        self.drawn = torch.zeros(most, len(rows), width, dtype=torch.int64)  # rows of x
        for row, i in enumerate(rows):
            self.drawn[: self.lengths[i], row] = draws[i][0]
        offsets = list(accumulate((len(m.data.train) for m in members), initial=0))
        self.drawn += torch.tensor([offsets[i] for i in rows])[:, None]
        sizes = [draws[i][1] + [1] * (most - self.lengths[i]) for i in rows]
        self.real = torch.tensor(sizes).T  # [steps, rows], on the processor, which decides by it
        self.weight = (torch.arange(width) < self.real[:, :, None]).float().to(device)
        self.drawn = self.drawn.to(device)
        self.same_size = _rows_by_size(self.real[:, : len(members)], self.lengths, device) if not recipe.padded else {}

        names = [*recipe.trains, *recipe.moves, *recipe.rest]
        self.state = [torch.stack([members[i].params[k] for i in rows]) for k in names]  # [rows, ...]
        self.memory = recipe.memory(self.state[: len(recipe.trains)])
        extras = [Extra.of(m.extras).stacked(device) for m in members]
        self.extras = [torch.stack([extras[i][j] for i in rows]) for j in range(len(extras[0]))]
        self.loss = torch.zeros(most, len(rows), device=device)
        self.aux: list[Tensor] = []

    def run(self) -> None:
        active = len(self.members)
        for s in range(self.lengths[0]):
            while self.lengths[active - 1] <= s:
                active -= 1
                self._leave(active)
            rows = _rows(active)
            if rows < len(self.state[0]):
                for column in (self.state, self.memory, self.extras):
                    column[:] = [v[:rows] for v in column]
            self._step(s, active, rows)
        for i in range(active):
            self._leave(i)

    def _leave(self, i: int) -> None:
        """Give the member its row; steps make new tensors, so the row does not change afterwards."""
        m, n, recipe = self.members[i], self.lengths[i], self.recipe
        stacked = dict(zip([*recipe.trains, *recipe.moves, *recipe.rest], self.state, strict=True))
        m.params = {k: stacked[k][i].clone() for k in m.params}
        m.steps, m.samples = m.steps + n, m.samples + self.samples[i]
        m.loss = m.loss + self.loss[:n, i].sum()
        if self.aux:
            m.aux = [a[i] for a in self.aux[:n]]

    def _step(self, s: int, active: int, rows: int) -> None:
        if self.recipe.padded:
            self._advance(s, slice(rows), rows, self.drawn.shape[2])
            return
        for size, where in self.same_size[s]:
            if len(where) == active:
                self._advance(s, slice(rows), rows, size)
            else:
                self._advance(s, where, len(where), size)

    def _advance(self, s: int, where: slice | Tensor, rows: int, size: int) -> None:
        """Take step s of the rows `where`, whose batches have this size."""
        drawn = self.drawn[s, where, :size].reshape(-1)
        batch = [c.index_select(0, drawn).view(rows, size, *c.shape[1:]) for c in self.columns]
        columns = [*self.state, *self.memory, *self.extras]
        flat = columns if isinstance(where, slice) else [v[where] for v in columns]
        flat = [*flat, self.weight[s, where, :size], *batch, self.lr, torch.tensor(s + 1.0)]
        out = list(self.steps(self.key, self.recipe.stacked, flat))
        moving = len(self.recipe.trains) + len(self.recipe.moves)
        for column, new in ((self.state, out[:moving]), (self.memory, out[moving : moving + len(self.memory)])):
            for j, v in enumerate(new):
                column[j] = v if isinstance(where, slice) else column[j].index_copy(0, where, v)
        loss, *aux = out[moving + len(self.memory) :]
        self.loss[s, where] = loss
        for a in aux:
            if len(self.aux) == s:
                self.aux.append(a.new_zeros(len(self.state[0]), *a.shape[1:]))
            self.aux[s][where] = a


def _rows_by_size(real: Tensor, lengths: list[int], device: torch.device) -> dict[int, list[tuple[int, Tensor]]]:
    """Return the active rows by size of batch for each step; they are moved to the device together."""
    found: list[tuple[int, int, Tensor]] = []
    active = len(lengths)
    for s in range(lengths[0]):
        while lengths[active - 1] <= s:
            active -= 1
        for size in sorted(set(real[s, :active].tolist())):
            found.append((s, size, (real[s, :active] == size).nonzero()[:, 0]))
    moved = torch.split(torch.cat([where for _, _, where in found]).to(device), [len(where) for _, _, where in found])
    out: dict[int, list[tuple[int, Tensor]]] = {}
    for (s, size, _), where in zip(found, moved, strict=True):
        out.setdefault(s, []).append((size, where))
    return out


def _rows(members: int) -> int:
    return next(n for n in SIZES if n >= members)

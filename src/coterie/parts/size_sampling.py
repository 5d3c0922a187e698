"""Participants sampled in proportion to their numbers of samples."""

from collections.abc import Sequence

import torch

from coterie.core.context import ClientData, ClientId, State
from coterie.core.method import Download, Method, Model, Moment, Start, Trained, Upload
from coterie.core.schema import Link, Schema
from coterie.core.tree import Tree


class SampledBySize(Method):
    """A method whose participants are sampled in proportion to their samples if `draw = samples`.

    That costs an opening round without payloads and training, in which the server learns the numbers of samples.
    """

    def opening(self) -> bool:
        return bool(self.hp.draw == "samples")

    def schema(self, link: Link, now: Moment | None = None) -> Schema:
        """The model travels both ways, except in the opening round."""
        if not self.opening():
            return self.model_schema
        return self.model_schema.optional() if now is None else Schema({}) if now.round == 0 else self.model_schema

    def setup(self) -> State:
        return {**super().setup(), "samples": {}} if self.opening() else super().setup()

    def sample(self, server: State, round: int, rng: torch.Generator) -> list[ClientId]:
        if round == 0:
            return super().sample(server, round, rng)
        return sorted(self.drawn(server, self.ctx.participants(), rng))

    def drawn(self, server: State, count: int, rng: torch.Generator) -> list[ClientId]:
        """Draw clients without replacement; each draw is in proportion to the samples of the remaining clients."""
        counts = torch.tensor([server.get("samples", {}).get(i, 0) for i in self.ctx.clients], dtype=torch.float64)
        if bool(counts.any()):
            order = torch.multinomial(counts, min(count, int((counts > 0).sum())), generator=rng)
        else:
            order = torch.randperm(len(counts), generator=rng)[:count]
        return [self.ctx.clients[i] for i in order.tolist()]

    combines = "mean"

    def down(self, server: State, ids: Sequence[ClientId], round: int) -> Download:
        return Download() if round == 0 else super().down(server, ids, round)

    def begin(self, state: State, download: Tree, data: ClientData, round: int) -> Start:
        return super().begin(state, download, data, round) if round else Start({}, train=False)

    def end(self, state: State, trained: Trained, data: ClientData, round: int) -> tuple[State, Upload]:
        return super().end(state, trained, data, round) if round else (state, Upload({}))

    def aggregate(self, server: State, uploads: Sequence[Upload], round: int) -> State:
        if round == 0:
            return {**server, "samples": {u.sender: u.samples for u in uploads}}
        return super().aggregate(server, uploads, round)

    def personal(self, state: State, download: Tree, data: ClientData) -> Model:
        return super().personal(state, download or self.ctx.w0, data)  # the opening round sends nothing

"""Power-of-Choice. Cho, Wang, Joshi, arXiv 2010.01243, 2020 (AISTATS 2022).

FedAvg that selects clients by performance: of d candidates, sampled in proportion to their samples, those with the
highest loss take part. This is the paper's rpow-d, which costs no further message: a participant sends the mean loss
of its local steps, and the server uses the last value that it has; a client without one comes first. The mean over
participants is uniform. The server learns numbers of samples in an opening round (`draw = uniform`: no such round).
"""

import math
from collections.abc import Sequence
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from coterie.core.context import Batch, ClientData, ClientId, Extras, State
from coterie.core.method import Card, Moment, Settings, Trained, Upload
from coterie.core.schema import Entry, Link, Schema
from coterie.core.tree import Tree
from coterie.parts.size_sampling import SampledBySize

STEPS_LOSS = "x:loss"


class PowerOfChoiceSettings(Settings):
    candidates: int | None = Field(None, ge=1, description="d: candidates of a round; empty: twice the participants")
    draw: Literal["uniform", "samples"] = Field(
        "samples", description="sample candidates uniformly, or in proportion to their samples"
    )


class PowerOfChoice(SampledBySize):
    Settings = PowerOfChoiceSettings
    hp: PowerOfChoiceSettings
    card = Card("Power-of-Choice", "Cho et al., AISTATS 2022, arXiv 2010.01243", 2022, "G", certainty="P")
    weighting = "uniform"

    def schema(self, link: Link, now: Moment | None = None) -> Schema:
        """The model travels both ways; uploads add the mean loss of the local steps; the opening round is empty."""
        model = super().schema(link, now)
        if link == "down" or (now is not None and now.round == 0):
            return model
        loss = Entry((1,), kind="statistic", part="loss", optional=now is None and self.opening())
        return model | Schema({STEPS_LOSS: loss}, may_be_empty=True)

    def setup(self) -> State:
        return {**super().setup(), "losses": {}}

    def drawn(self, server: State, count: int, rng: torch.Generator) -> list[ClientId]:
        """Return the `count` candidates with the highest last loss; equal ones in the order in which they are drawn."""
        d = 2 * count if self.hp.candidates is None else self.hp.candidates
        found = super().drawn(server, max(d, count), rng)
        return sorted(found, key=lambda i: -server["losses"].get(i, math.inf))[:count]

    def loss(self, params: Tree, batch: Batch, extras: Extras) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        loss = super().loss(params, batch, extras)
        return loss, loss.detach()

    def end(self, state: State, trained: Trained, data: ClientData, round: int) -> tuple[State, Upload]:
        state, upload = super().end(state, trained, data, round)
        if round == 0:
            return state, upload
        mean = torch.stack(list(trained.aux)).mean() if trained.aux else torch.zeros(())
        return state, Upload({**upload.tree, STEPS_LOSS: mean[None]})

    def aggregate(self, server: State, uploads: Sequence[Upload], round: int) -> State:
        if round == 0:
            return super().aggregate(server, uploads, round)
        models = [Upload({k: u.tree[k] for k in server["w"]}, u.note, u.sender, u.samples) for u in uploads]
        losses = {u.sender: float(u.tree[STEPS_LOSS]) for u in uploads}
        return {**super().aggregate(server, models, round), "losses": {**server["losses"], **losses}}

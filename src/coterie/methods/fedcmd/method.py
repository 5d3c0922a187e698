"""FedCMD. Chen et al., IEEE Trans. Computers 2024 (DOI 10.1109/TC.2024.3514302).

The first share rho of the rounds is FedAvg, and every batch votes for the linear layer at which the output's distance
to the labels and its distance to the input change most alike; the layer elected most often becomes personal for good.
Then layers before it are averaged over the participants, those after it mixed over all clients by the cosines of the
updates of the personal layer. The paper's text is followed where the authors' code differs: candidates are all linear
layers, a tie goes to the deepest, sample weights belong to the participants, the similarity matrix is complete. A vote
is one byte in the upload.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal

import torch
from pydantic import Field
from torch import Tensor

from coterie.core import tree as T
from coterie.core.context import Batch, ClientData, Extras, State
from coterie.core.method import Card, Download, Method, Model, Moment, Phase, Settings, Start, Trained, Upload
from coterie.core.schema import Entry, Link, Schema
from coterie.core.tree import Tree
from coterie.errors import CoterieError
from coterie.methods.fedcmd.election import BALLOT, around, client_vote, most_voted, round_winner, voting_loss
from coterie.parts import model_bank as bank
from coterie.parts import pairwise_state as pairs
from coterie.parts.similarity import cosine_rows, softmax_rows


class FedCMDSettings(Settings):
    rho: float = Field(0.1, gt=0, le=1, description="fraction of the rounds in which the personal layer is elected")
    use_sigma: bool = Field(True, description="compare deviations too; the authors' code compares means only")
    score: Literal["own", "mixed"] = Field("own", description="model that is scored: last trained, or the next mixture")


class FedCMD(Method):
    Settings = FedCMDSettings
    hp: FedCMDSettings
    card = Card(
        "FedCMD",
        "Chen et al., IEEE Trans. Computers 2024, 10.1109/TC.2024.3514302",
        2024,
        "M,S",
        personal="an elected layer",
    )
    plans_ahead = True

    def check(self) -> None:
        if not 1 <= len(self._candidates()) <= 255:
            raise CoterieError("FedCMD needs a model with at least one linear layer (at most 255), from which to elect")

    def _election_rounds(self) -> int:
        """The number of election rounds."""
        return max(1, int(self.hp.rho * self.ctx.planned_rounds + 0.5))

    def _candidates(self) -> tuple[str, ...]:
        return self.ctx.net.layout.of_kind("fc")

    def schema(self, link: Link, now: Moment | None = None) -> Schema:
        """The model, with a vote in uploads of the election; later downloads lack the layer that the client holds."""
        if link == "up":
            candidates = len(self._candidates())  # also the vote of a client that abstains
            vote = Entry((1,), torch.uint8, "statistic", low=0, high=candidates, optional=now is None)
            voting = now is None or now.round <= self._election_rounds()
            return self.model_schema | Schema({BALLOT: vote} if voting else {})
        if now is None:
            layers = {k for layer in self._candidates() for k in self.ctx.group(f"layer:{layer}")}
            entries = self.model_schema.entries.items()
            return Schema({k: replace(e, optional=k in layers) for k, e in entries})
        if now.client not in now.server["answered"]:
            return self.model_schema
        own = self.ctx.group(f"layer:{now.server['layer']}")
        return Schema({k: e for k, e in self.model_schema.entries.items() if k not in own})

    def setup(self) -> State:
        return {**super().setup(), "votes": [0] * len(self._candidates()), "layer": None, "answered": []}

    def down(self, server: State, ids: Sequence[int], round: int) -> Download:
        w = server["w"]
        if server["layer"] is None:
            return Download(shared=w)
        before, own, after = (T.keep(w, names.__contains__) for names in around(self.ctx.net.layout, server["layer"]))
        known, V = bank.known(server["bank"], ids), server["bank"]["flat"]
        rows = softmax_rows(server["similarity"])[bank.rows(server["bank"], known)].to(V)
        mixed = dict(zip(known, bank.trees(rows @ V, w), strict=True)) if after else {}
        each: dict[int, Tree] = {}
        for i in ids:
            each[i] = {**after, **T.keep(mixed.get(i, {}), after.__contains__)}
            if i not in server["answered"]:  # it does not hold the elected layer yet
                each[i] |= own
        return Download(before, each)

    def init_client(self, data: ClientData) -> State:
        return {"w": T.clone(self.ctx.w0), "apart": False}

    def begin(self, state: State, download: Tree, data: ClientData, round: int) -> Start:
        return Start({**state["w"], **download})  # entries that are not sent are the client's own

    def phases(self, round: int) -> list[Phase]:
        return [Phase(self._vote)] if round <= self._election_rounds() else super().phases(round)

    def _vote(self, params: Tree, batch: Batch, extras: Extras) -> tuple[Tensor, Tensor]:
        return voting_loss(self.ctx, params, batch, self._candidates(), self.hp.use_sigma)

    def end(self, state: State, trained: Trained, data: ClientData, round: int) -> tuple[State, Upload]:
        voting = round <= self._election_rounds()
        vote = {BALLOT: client_vote(trained.aux, len(self._candidates()))} if voting else {}
        return {"w": trained.params, "apart": not voting}, Upload({**T.drop(trained.params, self.stays), **vote})

    def aggregate(self, server: State, uploads: Sequence[Upload], round: int) -> State:
        models = {u.sender: T.untagged(u.tree) for u in uploads}
        mean = T.mean(list(models.values()), self.weights(uploads))
        if round <= self._election_rounds():
            server = {**server, "w": mean, "votes": round_winner(uploads, server["votes"])}
            return {**server, **self._elected(server)} if round == self._election_rounds() else server
        if server["layer"] is None:  # no client answered in the last round of the election
            server = {**server, **self._elected(server)}
        unknown = {i: server["w"] for i in models if i not in server["bank"]["ids"]}
        start, _ = pairs.received(server, unknown)
        new, rows = pairs.received(start, models)
        weight = f"{server['layer']}.weight"
        steps = bank.trees(new["bank"]["flat"][rows] - start["bank"]["flat"][rows], server["w"])
        steps = [{weight: step[weight]} for step in steps]
        moved = bank.put(server["moved"], dict(zip(models, steps, strict=True)))
        similarity = cosine_rows(moved["flat"].reshape(len(moved["ids"]), len(mean[weight]), -1)).clamp(min=0)
        before, _, _ = around(self.ctx.net.layout, server["layer"])
        w = {**server["w"], **T.keep(mean, before.__contains__)}
        return {**new, "w": w, "moved": moved, "similarity": similarity}

    def _elected(self, server: State) -> State:
        """Return the state of the second phase: the layer, all clients' models at w, and their last layer updates."""
        layer, w = self._candidates()[most_voted(server["votes"])], server["w"]
        still = {f"{layer}.weight": torch.zeros_like(w[f"{layer}.weight"])}
        return {**pairs.opened(w, self.ctx.clients), "layer": layer, "moved": bank.fill(still, self.ctx.clients)}

    def global_model(self, server: State) -> Tree | None:
        return None if server["answered"] else super().global_model(server)

    def facts(self, server: State) -> dict[str, Any]:
        return {"layer": server["layer"], "votes": dict(zip(self._candidates(), server["votes"], strict=True))}

    def personal(self, state: State, download: Tree, data: ClientData) -> Model:
        return Model(state["w"] if self.hp.score == "own" and state["apart"] else {**state["w"], **download})

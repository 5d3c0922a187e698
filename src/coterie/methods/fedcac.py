"""FedCAC. Wu, Liu, Niu, Zhu, Tang, ICCV 2023 (arXiv 2309.11103).

Entries of the model whose change in local training had most effect are critical: they are averaged only over clients
whose critical entries lie in the same places; all other entries are averaged over all clients. The threshold for "same
places" rises with the rounds, until no two clients share critical entries. Masks and models of absent
clients are kept. A client merges both models itself, so it downloads two models; batch-norm statistics have
no mask and follow the global model.
"""

from collections.abc import Sequence
from typing import Any

import torch
from pydantic import Field
from torch import Tensor

from coterie.core import tree as T
from coterie.core.context import ClientData, ClientId, State
from coterie.core.method import Card, Download, Method, Model, Moment, Settings, Start, Trained, Upload
from coterie.core.schema import Entry, Link, Schema, like
from coterie.core.tree import Tree
from coterie.parts import model_bank as bank
from coterie.parts.masks import criticality, top_share, write_in


class FedCACSettings(Settings):
    tau: float = Field(0.5, ge=0, le=1, description="fraction of the entries of each tensor that are critical")
    beta: float = Field(100, gt=0, description="rounds until critical entries are no longer shared")


class FedCAC(Method):
    Settings = FedCACSettings
    hp: FedCACSettings
    card = Card("FedCAC", "Wu et al., ICCV 2023, arXiv 2309.11103", 2023, "M,S", personal="the critical entries")

    def _masked(self) -> Tree:
        """The initial values of the entries that can be critical."""
        return {k: v for k, v in self.ctx.w0.items() if k in self.ctx.net.trainable and not self.stays(k)}

    def schema(self, link: Link, now: Moment | None = None) -> Schema:
        """Uploads hold the model and its critical masks, downloads the global and the customised model."""
        masked = self._masked()
        if link == "up":
            masks = {f"mask:{k}": Entry(tuple(v.shape), torch.bool, "statistic") for k, v in masked.items()}
            return self.model_schema | Schema(masks)
        if now is not None and now.client not in now.server["bank"]["ids"]:
            return self.model_schema
        return self.model_schema | Schema(like(T.tag("c", masked), optional=now is None))

    def setup(self) -> State:
        stored = bank.fill(self._masked(), [])
        masks = torch.zeros(0, stored["flat"].shape[1], dtype=torch.bool)
        return {**super().setup(), "bank": stored, "masks": masks, "together": torch.zeros(0, 0, dtype=torch.bool)}

    def down(self, server: State, ids: Sequence[ClientId], round: int) -> Download:
        known, V = bank.known(server["bank"], ids), server["bank"]["flat"]
        rows = server["together"][bank.rows(server["bank"], known)].to(V)
        custom = bank.trees(rows / rows.sum(1, keepdim=True) @ V, self._masked())
        return Download(server["w"], {i: T.tag("c", tree) for i, tree in zip(known, custom, strict=True)})

    def begin(self, state: State, download: Tree, data: ClientData, round: int) -> Start:
        start = self.personal(state, download, data).params
        return Start(start, {"start": start})

    def end(self, state: State, trained: Trained, data: ClientData, round: int) -> tuple[State, Upload]:
        state, upload = super().end(state, trained, data, round)
        mask = top_share(
            criticality(trained.extras["start"], {k: trained.params[k] for k in self._masked()}), self.hp.tau
        )
        return {**state, "mask": mask}, Upload({**upload.tree, **T.tag("mask", mask)})

    def aggregate(self, server: State, uploads: Sequence[Upload], round: int) -> State:
        models = [T.untagged(u.tree) for u in uploads]
        own = {u.sender: {k: m[k] for k in self._masked()} for u, m in zip(uploads, models, strict=True)}
        stored = bank.put(server["bank"], own)
        masks = server["masks"].new_zeros(len(stored["ids"]), server["masks"].shape[1])
        masks[: len(server["masks"])] = server["masks"]
        for row, u in zip(bank.rows(stored, list(own)).tolist(), uploads, strict=True):
            masks[row] = T.flatten(u.tree, [f"mask:{k}" for k in self._masked()])
        together = collaborators(overlap(masks), round, self.hp.beta)
        return {"w": T.mean(models, self.weights(uploads)), "bank": stored, "masks": masks, "together": together}

    def facts(self, server: State) -> dict[str, Any]:
        n = len(server["together"])
        return {"collaborators": float(server["together"].sum()) / n - 1} if n else {}

    def personal(self, state: State, download: Tree, data: ClientData) -> Model:
        """Return the global model with the critical entries of the customised one."""
        w = {**T.untagged(download), **state.get("own", {})}
        custom = T.tagged("c", download)
        if "mask" not in state or not custom:
            return Model(w)
        return Model({**w, **write_in({k: w[k] for k in custom}, custom, state["mask"])})


def overlap(masks: Tensor) -> Tensor:
    """O_ij = 1 - |M_i - M_j|_1 / (2 |M_i|) of masks [n, p], float64 [n, n]; an empty mask has overlap 1."""
    m = masks.double()
    size = m.sum(1)
    differ = size[:, None] + size[None, :] - 2 * (m @ m.T)
    full = torch.where(size > 0, 2 * size, torch.ones_like(size))[:, None]
    return torch.where(size[:, None] > 0, 1 - differ / full, torch.ones_like(differ))


def collaborators(overlaps: Tensor, round: int, beta: float) -> Tensor:
    """Return the mask [n, n] of clients that share critical entries: each with itself, and pairs above a threshold.

    The threshold rises from the mean overlap of all pairs to above the largest overlap within beta rounds.
    """
    eye = torch.eye(len(overlaps), dtype=torch.bool, device=overlaps.device)
    pairs = overlaps[~eye].double()
    if not len(pairs):
        return eye
    bar = pairs.mean() + round / beta * (pairs.max() - pairs.mean())
    return (overlaps.double() >= bar - 1e-9) | eye  # equal overlaps must pass whatever the rounding of their mean

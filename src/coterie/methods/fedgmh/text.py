"""FedGMH, global multi-head. Sun, Ni, Telecommunications Science 2026 (DOI 10.11959/j.issn.1000-0801.2026005).

The server keeps one complete head per label and trains head s only on mean features of label s, so that labels do not
interfere. A client downloads the heads of its labels, mixes them by its label shares and writes the mix into those
entries of its own head that its last training found critical. Extractors stay private and are never averaged.

- All clients and all heads start from one random model, because the features of different extractors have no common
  coordinates. Algorithm 2 can be read as one draw for each (`init = independent`).
- A client has no mask before its first participation, which is therefore plain local training.
- Algorithm 2 broadcasts all heads; the text sends a client those of its labels, as here (`download = all`: all).
- The paper does not say how the server learns a client's labels: here round 0 sends them (4 bytes each, counted). A
  client that misses round 0 is sent no heads until its first upload names its labels.
- If data change during the run, clients are sent all heads, so that a new label has its head at once (section 2.3.5).
- `reading = code` is the published code, in which critical entries stay local, the others take the received value, and
  models are scored right after this overwrite.
"""

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from coterie.core import tree as T
from coterie.core.context import Batch, ClientData, Extras, State
from coterie.core.method import Model, Settings, Start, Trained, Upload
from coterie.core.tree import Tree
from coterie.methods.fedgmh.features import HEAD, FeatureSender, average_in, head_of
from coterie.methods.fedgmh.heads import critical_mask, label_shares, mix_heads, square_mask, train_label_heads
from coterie.methods.fedgmh.settings import FedGMHSettings
from coterie.parts.initial_models import initial_model
from coterie.parts.masks import write_in


class FedGMH(FeatureSender):
    """Heads per label, mixed by label shares, written into critical entries."""

    Settings: ClassVar[type[Settings]] = FedGMHSettings
    hp: FedGMHSettings
    controls = ("fedgmh-o", "fedgmh-a", "fedgmh-oa")

    # ---- server, down ------------------------------------------------------------------------------------------------
    def opening(self) -> bool:
        return super().opening() and self.hp.heads == "per_label" and self.hp.download == "own"

    @property
    def heads(self) -> int:
        return self.ctx.classes if self.hp.heads == "per_label" else 1

    def of_label(self, head: Tree) -> Tree:
        return head

    def setup(self) -> State:
        """Make the heads, equal or each from a random model of its own; Algorithm 2, line 1."""
        models = [initial_model(self.ctx, 0 if self.hp.init == "shared" else -1 - s) for s in range(self.heads)]
        return {"heads": T.stack([head_of(self.ctx, w) for w in models]), "labels": {}}

    # ---- client ------------------------------------------------------------------------------------------------------
    def begin(self, state: State, download: Tree, data: ClientData, round: int) -> Start:
        """Put the new head and the client's extractor together; Algorithm 2, line 5."""
        head = self.written(state, download, data)
        extras: Extras = {"before": head}
        if self.hp.decay_on == "participation":
            extras["pace"] = torch.tensor(self.ctx.lr_at(state.get("joined", 0) + 1) / self.ctx.lr_at(round))
        return Start({**state["own"], **head}, extras)

    def written(self, state: State, download: Tree, data: ClientData) -> Tree:
        """Return the client's head with the received one written in, equation (9); Algorithm 2, line 4."""
        hp, head = self.hp, head_of(self.ctx, state["own"])
        g = self.received(state, download, data)
        if g is None:
            return head
        if hp.write == "whole":
            return g
        if hp.write == "average":  # equations (10) and (11)
            return average_in(head, g, hp.received_share)
        if "mask" in state:
            return write_in(head, g, state["mask"]) if hp.written == "critical" else write_in(g, head, state["mask"])
        return g if hp.first_psi == "ones" else head

    def received(self, state: State, download: Tree, data: ClientData) -> Tree | None:
        """Return g, the received heads mixed by label shares, the sum in equation (9); None without heads or labels.

        Algorithm 2, line 3.
        """
        heads = T.tagged(HEAD, download)
        if not heads:
            return None
        if self.hp.heads == "one":
            return mix_heads(heads, torch.ones(1))
        held = data.label_counts[state["labels"].long()] if self.opening() else data.label_counts
        return mix_heads(heads, label_shares(held)) if held.any() else None

    def loss(self, params: Tree, batch: Batch, extras: Extras) -> Tensor:
        ce = self.ctx.ce(params, batch)
        if self.hp.decay_on == "round":
            return ce
        pace: Tensor = extras["pace"]  # scales the gradient alone, which for SGD is a scaled learning rate
        return pace * ce + (1 - pace) * ce.detach()

    def learned(self, state: State, trained: Trained, data: ClientData) -> State:
        """Return the mask psi of the head's entries that training found critical; Algorithm 2, line 7."""
        before, after = trained.extras["before"], head_of(self.ctx, trained.params)
        if self.hp.criticality == "square":
            mask = square_mask(before, after, self.hp.beta)
        else:
            mask = critical_mask(before, after, self.hp.beta, self.hp.mask_scope)
        return {"mask": mask, "joined": state.get("joined", 0) + 1}

    def personal(self, state: State, download: Tree, data: ClientData) -> Model:
        """Return the client's own model; Algorithm 2, line 14."""
        if self.hp.score == "own":
            return Model(state["own"])
        return Model({**state["own"], **self.written(state, download, data)})

    # ---- server, up --------------------------------------------------------------------------------------------------
    def step(self, heads: Tree, z: Tensor, y: Tensor, weight: Tensor, uploads: Sequence[Upload]) -> Tree:
        return train_label_heads(self.ctx.net.head_names, heads, z, y, weight, self.hp)

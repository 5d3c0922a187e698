"""PRR-FL, personalised retrogress-resilient federated learning. Chen, Zhu, Yang, Yuan, MICCAI 2021 (arXiv 2110.00394).

Only a deputy of the personal model travels. The server averages the low-frequency amplitudes of the deputies' weights
and leaves each its own phases and high frequencies, so that each client receives a deputy of its own. On the client,
deputy and personal model teach each other: the teacher is chosen per epoch by their macro-F1 on the training data.
Batch norm of both models stays on the client. Layers are recognised by type; entries other than convolution and linear
weights are plain means. Means are over the clients that answered (the authors divide by their 4 clients); others keep
the deputy they had. The window of low frequencies is half-open as the authors', so the inverse is complex and its real
part is taken. "At the start" is the first epoch of each local training, when the deputy has just been replaced.
"""

import math
from collections.abc import Sequence
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from coterie.core import tree as T
from coterie.core.context import Batch, ClientData, Extras, State
from coterie.core.method import Card, Client, Download, Method, Model, Phase, Settings, Start, Trained, Upload
from coterie.core.tree import Tree
from coterie.core.views import ModelView
from coterie.parts import model_bank as bank
from coterie.parts.distill import kl
from coterie.parts.fourier import Treatment, fourier_aggregate, prrfl_window

Stage = Literal["recover", "exchange", "sublimate"]
LISTENS: dict[str, tuple[bool, bool]] = {  # (personal, deputy)
    "recover": (False, True),
    "exchange": (True, True),
    "sublimate": (True, False),
}


class PRRFLSettings(Settings):
    r_first: float = Field(0.7, ge=0, le=1, description="relative size of the window of low frequencies at the start")
    r_last: float = Field(0.95, ge=0, le=1, description="and in the last round")
    alpha1: float = Field(0.7, ge=0, le=1, description="recover while the deputy's F1 is below this share")
    alpha2: float = Field(0.9, ge=0, le=1, description="exchange while it is below this share")


class PRRFL(Method):
    Settings = PRRFLSettings
    hp: PRRFLSettings
    card = Card(
        "PRR-FL",
        "Chen et al., MICCAI 2021, arXiv 2110.00394",
        2021,
        "S,R",
        personal="the whole model; the deputy's batch norm",
    )
    needs = ("classes", "epochs")
    weighting = "uniform"
    plans_ahead = True

    def private(self, name: str) -> bool:
        return name in self.ctx.group("bn")

    def setup(self) -> State:
        return {"bank": bank.fill(self._like(), self.ctx.clients)}

    def _like(self) -> Tree:
        return T.drop(self.ctx.w0, self.stays)

    def down(self, server: State, ids: Sequence[int], round: int) -> Download:
        known = bank.known(server["bank"], ids)
        flat = server["bank"]["flat"][bank.rows(server["bank"], known)]
        each = dict(zip(known, bank.trees(flat, self._like()), strict=True))
        mean = T.unflatten(server["bank"]["flat"].mean(0), self._like()) if len(known) < len(ids) else {}
        return Download(each={**dict.fromkeys(ids, mean), **each})  # the mean for clients without a deputy here

    def init_client(self, data: ClientData) -> State:
        return {"own": T.clone(T.keep(self.ctx.w0, self.stays)), "w": T.clone(self.ctx.w0)}

    def begin(self, state: State, download: Tree, data: ClientData, round: int) -> Start:
        deputy = {**self.ctx.w0, **download, **state["own"]}
        left = math.ceil(self.ctx.epochs) - 1
        extras = {"stage": "recover" if left else "exchange", "left": left}
        return Start({**T.tag("v", deputy), **T.tag("w", state["w"])}, extras)

    def phases(self, round: int) -> list[Phase]:
        return [Phase(self.loss, every_epoch=self.next_stage)]

    def loss(self, params: Tree, batch: Batch, extras: Extras) -> Tensor:
        """Return the sum of both models' losses; a teacher is detached, so neither moves the other."""
        v = self.ctx.forward(T.tagged("v", params), batch.x)
        w = self.ctx.forward(T.tagged("w", params), batch.x)
        return self.ctx.loss_of(w, batch) + self.ctx.loss_of(v, batch) + lessons(w, v, extras["stage"], batch.weight)

    def next_stage(self, params: Tree, extras: Extras, data: ClientData) -> tuple[Tree, Extras]:
        """Choose the teacher of the next epoch by both models' macro-F1 on the training data."""
        if extras["left"] <= 0:
            return params, extras
        # detached, so that batch norm is not updated
        trees = [{k: v.detach() for k, v in T.tagged(mark, params).items()} for mark in ("v", "w")]
        v, w = (macro_f1(self.ctx.outputs(tree, data.train.x, 512), data.train.y) for tree in trees)
        now = stage(v, w, self.hp.alpha1, self.hp.alpha2)
        return params, {**extras, "stage": now, "left": extras["left"] - 1}

    def end(self, state: State, trained: Trained, data: ClientData, round: int) -> tuple[State, Upload]:
        v, w = T.tagged("v", trained.params), T.tagged("w", trained.params)
        note = {name: float(trained.extras["stage"] == name) for name in LISTENS}
        return {"own": T.keep(v, self.stays), "w": w}, Upload(T.drop(v, self.stays), note)

    def aggregate(self, server: State, uploads: Sequence[Upload], round: int) -> State:
        r = prrfl_window(round, self.ctx.planned_rounds, self.hp.r_first, self.hp.r_last)
        stacked, shares = T.stack([u.tree for u in uploads]), self.weights(uploads)
        share = None if shares is None else torch.tensor(shares)
        new = fourier_aggregate(stacked, self._treatment, r / 2, "halfopen", "prrfl", share) if r > 0 else stacked
        return {"bank": bank.put(server["bank"], {u.sender: T.row(new, i) for i, u in enumerate(uploads)})}

    def _treatment(self, name: str) -> Treatment:
        layered = name in self.ctx.group("conv") | self.ctx.group("fc")
        return "fourier" if layered and self.ctx.w0[name].ndim > 1 else "mean"

    def personal(self, state: State, download: Tree, data: ClientData) -> Model:
        return Model(state["w"])

    def model(self, view: ModelView, client: Client) -> Model | None:
        if view == "newcomer":
            return Model({**client.state["w"], **client.download})  # the deputy
        if view == "received":
            return Model({**self.ctx.w0, **client.download, **client.state["own"]})  # the deputy
        return super().model(view, client)


def stage(deputy: float, personal: float, alpha1: float, alpha2: float) -> Stage:
    """Return the stage for both scores: a deputy that is far behind only learns, a good one only teaches."""
    if deputy < alpha1 * personal:
        return "recover"
    return "exchange" if deputy < alpha2 * personal else "sublimate"


def lessons(personal: Tensor, deputy: Tensor, now: Stage, weight: Tensor | None = None) -> Tensor:
    """Return the sum of KL(teacher || student) over the learning models; teachers are detached."""
    total = personal.new_zeros(())
    if LISTENS[now][0]:
        total = total + kl(deputy, personal, weight)
    return total + kl(personal, deputy, weight) if LISTENS[now][1] else total


def macro_f1(logits: Tensor, y: Tensor) -> float:
    """Return the mean F1 over the classes that occur or are predicted, as scikit-learn does (but faster)."""
    guess, classes = logits.argmax(1), logits.shape[1]
    hits = torch.bincount(y[guess == y], minlength=classes)
    both = torch.bincount(torch.cat([y, guess]), minlength=classes)
    return float((2 * hits[both > 0] / both[both > 0]).mean())

"""FedGKD. Yao, Pan, Dai, Wan, Ding, Yu, Jin, Xu, Sun, IEEE Transactions on Computers 73(1), 2024 (arXiv 2107.00051).

FedAvg whose clients also learn from a teacher: the mean of the last M global models. The loss is the task's plus
gamma/2 T^2 KL(teacher || client) over softmax outputs at temperature T, so that local models keep what earlier global
models knew. There is no teacher in the first round. With M = 1 the teacher is the received model and costs no bytes.
Departures: the teacher's batch norm uses its running statistics. FedGKD-VOTE, which weights the M models by their loss
on validation data of the server, is left out: the server has no labelled data here.
"""

from collections.abc import Sequence
from dataclasses import replace

from pydantic import Field
from torch import Tensor

from coterie.core import tree as T
from coterie.core.context import Batch, ClientData, Extras, State
from coterie.core.method import Card, Download, Method, Model, Moment, Settings, Start, Upload
from coterie.core.schema import Link, Schema, like
from coterie.core.tree import Tree
from coterie.parts.distill import kl

TEACHER = "teacher"


class FedGKDSettings(Settings):
    gamma: float = Field(0.2, ge=0, description="strength of the distillation; the loss has gamma/2 times it")
    models: int = Field(5, ge=1, description="M: last global models whose mean is the teacher")
    temperature: float = Field(1.0, gt=0, description="T: divides the outputs of teacher and client")


class FedGKD(Method):
    combines = "mean"
    Settings = FedGKDSettings
    hp: FedGKDSettings
    card = Card(
        "FedGKD",
        "Yao et al., IEEE Transactions on Computers 73(1), 2024, arXiv 2107.00051",
        2024,
        "G,R",
        certainty="A",
        compute="one further forward pass over the training part per round",
    )
    needs = ("classes",)

    def schema(self, link: Link, now: Moment | None = None) -> Schema:
        """The model travels both ways; downloads add the teacher once it differs from the model."""
        teacher = like(T.tag(TEACHER, T.drop(self.ctx.w0, self.stays)), part="teacher", optional=now is None)
        taught = link == "down" and self.hp.models > 1 and (now is None or len(now.server["past"]) > 1)
        return self.model_schema | Schema(teacher if taught else {})

    def setup(self) -> State:
        return {**super().setup(), "past": []}

    def down(self, server: State, ids: Sequence[int], round: int) -> Download:
        past = server["past"]
        teacher = T.tag(TEACHER, T.mean(past)) if len(past) > 1 else {}
        return Download({**server["w"], **teacher})

    def begin(self, state: State, download: Tree, data: ClientData, round: int) -> Start:
        start = super().begin(state, T.untagged(download), data, round)
        if round <= 1 or self.hp.gamma == 0:
            return start
        teacher = {**start.params, **T.tagged(TEACHER, download)}
        return replace(start, per_sample=self.ctx.outputs(teacher, data.train.x))

    def loss(self, params: Tree, batch: Batch, extras: Extras) -> Tensor:
        logits = self.ctx.forward(params, batch.x)
        loss = self.ctx.loss_of(logits, batch)
        if batch.per_sample is None:
            return loss
        t = self.hp.temperature
        return loss + self.hp.gamma / 2 * t**2 * kl(batch.per_sample / t, logits / t, batch.weight)

    def aggregate(self, server: State, uploads: Sequence[Upload], round: int) -> State:
        new = super().aggregate(server, uploads, round)
        return {**new, "past": [*server["past"], new["w"]][-self.hp.models :]}

    def personal(self, state: State, download: Tree, data: ClientData) -> Model:
        return super().personal(state, T.untagged(download), data)

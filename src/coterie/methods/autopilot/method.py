"""Autopilot: the federation trains one model, and each client chooses the model that it uses. Coterie's own, 2026.

Rounds are those of FedAvg. Every `own_every`-th time that a client takes part, it also trains a model of its own, from
the same start and on its data alone, until its validation loss stops falling. A client scores these candidates on its
validation part:

- global: the model received
- tuned: that model after the client's local training, all layers
- halfway: the mean of the weights of global and tuned
- head, long-head: a private head on the global body, fitted to the client's training samples, starting at the global
  head, with 10 or 30 steps of gradient descent on features that are computed once
- own: its own model
- neighbours: global, averaged with the labels of the nearest training samples by its features (as kNN-Per)
- head+neighbours, head+tuned, tuned+own, tuned+global: the mean of both predictions
- ensemble: the mean of the predictions of global, head, tuned and neighbours

Members of a mean are calibrated by a temperature first. A score is the log-likelihood (for other tasks minus the loss)
summed over the validation part, plus `strength` times its mean per sample in the federation, which the server learns
from the scores of all clients: with little validation data the federation decides, with much the client. If the best
candidate is behind `own` on the validation part by more than `margin` standard errors, the client takes `own`. A client
without a validation part takes the federation's best. A client scores and sends its scores after the `first`-th round
that it takes part in, and after twice as many each time; before use it chooses again in the same way, with the newest
global model. A client that has never trained chooses among the candidates that need no local training: global, heads
and neighbours.

A round sends FedAvg's model, the scores, the choice and the number of validation samples. Candidates that need a head
or classes are left out if the model or the task has none. "Head first, then all" (LP-FT) is not a candidate, because it
needs one more training per choice.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch
from pydantic import Field
from torch import Tensor

from coterie.core import tree as T
from coterie.core.context import PER_PASS, Batch, ClientData, ClientId, Extras, State
from coterie.core.method import Card, Client, Download, Method, Model, Moment, Phase, Settings, Start, Trained, Upload
from coterie.core.schema import Entry, Link, Schema
from coterie.core.tree import Tree
from coterie.core.views import ModelView
from coterie.errors import CoterieError, unknown
from coterie.methods.autopilot.candidates import CANDIDATES, HEADS, UNINFORMED, UNTRAINED
from coterie.methods.autopilot.heads import fitted
from coterie.parts.candidate_choice import choose_candidate, mixed, temperatures
from coterie.parts.neighbours import LEAST_PROBABILITY, votes

SHARED, PERSONAL = "g", "p"  # tags in the tree of a local training
SCORES, CHOICE, VALIDATED, PRIOR = "x:scores", "x:choice", "x:validated", "x:prior"
LARGEST_SCORE = 1e6  # largest absolute mean log-likelihood
KEYS = 1024  # training samples for fitted heads and for neighbours


class AutopilotSettings(Settings):
    own_every: int = Field(
        6, ge=0, description="a client trains its own model in every so many of its rounds; 0: it has none"
    )
    patience: int = Field(
        2, ge=1, description="scorings without a lower validation loss before the own model is no longer trained"
    )
    first: int = Field(3, ge=1, description="the round, of those it takes part in, after which a client scores first")
    strength: float = Field(20, ge=0, description="weight of the federation's scores, in validation samples")
    margin: float = Field(
        1.0, ge=0, description="standard errors by which a choice may be behind the own model on validation data"
    )
    k: int = Field(10, ge=1, description="neighbours that are asked")
    without: str = Field("", description="candidates that are left out, by commas")


class Autopilot(Method):
    Settings = AutopilotSettings
    hp: AutopilotSettings
    card = Card(
        "Autopilot",
        "none: Coterie's own",
        2026,
        "F,M",
        personal="what each client chooses: global, fine-tuned, private head, own, neighbours or a mean of these",
        certainty="O",
        compute="one more local training in every own_every-th round, and scoring on the validation part",
    )
    needs = ("some_val",)

    def check(self) -> None:
        for name in self._without:
            if name not in CANDIDATES:
                raise unknown("candidate", name, CANDIDATES)
        if not set(self.names) & set(UNTRAINED):
            raise CoterieError("without leaves out all that a client can use before it has trained; keep global")

    @cached_property
    def _without(self) -> list[str]:
        return [name.strip() for name in self.hp.without.split(",") if name.strip()]

    @cached_property
    def names(self) -> list[str]:
        """The candidates of this run."""
        lacks = {"own"} if self.hp.own_every == 0 else set()
        if self.ctx.net.layout.head is None:
            lacks |= {*HEADS, "near"}
        if not self.ctx.classes:
            lacks |= {"near"}
        return [name for name, of in CANDIDATES.items() if name not in self._without and not lacks & of.keys()]

    # ---- what crosses a link -------------------------------------------------------------------------------------
    def schema(self, link: Link, now: Moment | None = None) -> Schema:
        n = len(self.names)
        scores = Entry((n,), kind="statistic", part="choice", low=-LARGEST_SCORE, high=0)
        if link in ("down", "edge_down"):
            return self.model_schema | Schema({PRIOR: scores})
        choice = Entry((1,), torch.int32, "statistic", "choice", 0, n - 1)
        validated = Entry((1,), torch.int32, "statistic", "choice", 0, 2**31 - 1)
        return self.model_schema | Schema({SCORES: scores, CHOICE: choice, VALIDATED: validated})

    # ---- server ----------------------------------------------------------------------------------------------------
    def setup(self) -> State:
        return {**super().setup(), "scores": {}, "choice": {}, "validated": {}}

    def prior(self, server: State) -> Tensor:
        """Return the mean scores per validation sample over clients with scores [candidates]; 0 before the first."""
        rows = [(server["validated"][i], s) for i, s in server["scores"].items() if server["validated"][i]]
        total = sum(n for n, _ in rows)
        means = torch.zeros(len(self.names))
        for n, s in rows:
            means += s * (n / total)
        return means

    def down(self, server: State, ids: Sequence[ClientId], round: int) -> Download:
        return Download(shared={**server["w"], PRIOR: self.prior(server)})

    def aggregate(self, server: State, uploads: Sequence[Upload], round: int) -> State:
        models = [Upload(T.drop(u.tree, _is_told), u.note, u.sender, u.samples) for u in uploads]
        new = super().aggregate(server, models, round)
        for name, entry in (("scores", SCORES), ("choice", CHOICE), ("validated", VALIDATED)):
            reported = {u.sender: u.tree[entry] if name == "scores" else int(u.tree[entry]) for u in uploads}
            new[name] = dict(sorted({**server[name], **reported}.items()))
        return new

    def facts(self, server: State) -> dict[str, Any]:
        """Return the clients' choices, their leads over the own model, and the federation's score of each candidate."""
        names, scored = self.names, [i for i, s in server["scores"].items() if bool((s != 0).any())]
        if not scored:
            return {}
        facts: dict[str, Any] = {
            "chosen": {str(i): names[server["choice"][i]] for i in scored},
            "validated": {str(i): server["validated"][i] for i in scored},
            "expected": {k: round(float(v), 4) for k, v in zip(names, self.prior(server), strict=True)},
        }
        if "own" in names:
            own = names.index("own")
            ahead = {i: float(server["scores"][i][server["choice"][i]] - server["scores"][i][own]) for i in scored}
            facts["ahead_of_own"] = {str(i): round(v, 4) for i, v in ahead.items()}
        return facts

    # ---- client: a round -------------------------------------------------------------------------------------------
    def init_client(self, data: ClientData) -> State:
        own = {"alone": T.clone(self.ctx.w0)} if self.hp.own_every else {}
        untold = {"choice": 0, "scores": torch.zeros(len(self.names)), "validated": 0}
        return {**super().init_client(data), **own, "turns": 0, "waits": 0, **untold}

    def _global(self, state: State, download: Tree) -> Tree:
        return {**T.drop(download, _is_told), **state.get("own", {})}

    def _is_trained(self, state: State) -> bool:
        """True if the own model trains in this round."""
        return "alone" in state and state["turns"] % self.hp.own_every == 0 and bool(state["waits"] < self.hp.patience)

    def begin(self, state: State, download: Tree, data: ClientData, round: int) -> Start:
        w = self._global(state, download)
        own = T.tag(PERSONAL, state["alone"]) if self._is_trained(state) else {}
        return Start({**T.tag(SHARED, w), **own}, {"received": w, "prior": download[PRIOR]})

    def phases(self, round: int) -> list[Phase]:
        shared = Phase(self.loss, T.has_tag(SHARED))
        # a tree without an own model has nothing to train in the second, and takes no step
        return [shared, Phase(self.own_loss, T.has_tag(PERSONAL))] if self.hp.own_every else [shared]

    def loss(self, params: Tree, batch: Batch, extras: Extras) -> Tensor:
        return self.ctx.loss(T.tagged(SHARED, params), batch)

    def own_loss(self, params: Tree, batch: Batch, extras: Extras) -> Tensor:
        return self.ctx.loss(T.tagged(PERSONAL, params), batch)

    def end(self, state: State, trained: Trained, data: ClientData, round: int) -> tuple[State, Upload]:
        w, own = T.tagged(SHARED, trained.params), T.tagged(PERSONAL, trained.params)
        state, upload = super().end(state, replace(trained, params=w), data, round)
        new = {**state, "tuned": w, "turns": state["turns"] + 1, **({"alone": own} if own else {})}
        if self._scores_now(new["turns"]):
            new |= self._chosen(new, trained.extras["received"], trained.extras["prior"], data, self.names)[0]
        entries = {
            SCORES: new["scores"],
            CHOICE: torch.tensor([new["choice"]], dtype=torch.int32),
            VALIDATED: torch.tensor([new["validated"]], dtype=torch.int32),
        }
        return new, Upload({**upload.tree, **entries})

    def _scores_now(self, turns: int) -> bool:
        """True in the client's rounds first, 2 * first, 4 * first, ..., because models change less and less."""
        times, rest = divmod(turns, self.hp.first)
        return rest == 0 and times & (times - 1) == 0

    # ---- client: the choice ----------------------------------------------------------------------------------------
    @torch.no_grad()
    def stored(self, w: Tree, data: ClientData, names: Sequence[str]) -> Extras:
        """Return the global model's features of the training samples and their targets, if a candidate needs them."""
        needed = any({"near", *HEADS} & CANDIDATES[name].keys() for name in names)
        if not needed or not len(data.train):
            return {}
        x, y = data.train.x[:KEYS], data.train.y[:KEYS]
        return {"keys": self.ctx.outputs(w, x, through=self.ctx.features), "labels": y}

    def members(self, state: State, w: Tree, names: Sequence[str], store: Extras) -> dict[str, Tree]:
        """Return the models that these candidates consist of, as far as they exist, with w as the global one."""
        wanted = {m for name in names for m in CANDIDATES[name]}
        models = {"global": w} if "global" in wanted else {}
        if store and wanted & HEADS.keys():
            models |= {m: {**w, **head} for m, head in fitted(self.ctx, w, store).items() if m in wanted}
        if "tuned" in state:
            models |= {"tuned": state["tuned"]} if "tuned" in wanted else {}
            models |= {"halfway": T.mean([w, state["tuned"]])} if "halfway" in wanted else {}
            models |= {"own": state["alone"]} if "own" in wanted else {}
        return models

    @torch.no_grad()
    def outputs(self, members: Mapping[str, Tree], near: Extras, x: Tensor) -> dict[str, Tensor]:
        """Return the outputs [batch, outputs] of each member, and probabilities by neighbours if `near` has samples."""
        parts = [self._each(members, near, part) for part in torch.split(x, PER_PASS)]
        return {m: torch.cat([p[m] for p in parts]) for m in parts[0]}

    def _each(self, members: Mapping[str, Tree], near: Extras, x: Tensor) -> dict[str, Tensor]:
        """Return the outputs of each member; the body that heads share is computed once."""
        out: dict[str, Tensor] = {}
        shared = next((m for m in ("global", *HEADS) if m in members), None)
        several = len(members.keys() & {"global", *HEADS}) > 1
        if shared is not None and (near or several):
            out[shared], z = self.ctx.net.both(members[shared], x)
            out |= {m: self.ctx.logits(members[m], z) for m in HEADS if m in members and m != shared}
        out |= {m: self.ctx.forward(params, x) for m, params in members.items() if m not in out}
        if near:
            out["near"] = votes(z, near["keys"], near["labels"], self.hp.k, 1.0, self.ctx.classes)
        return out

    def combined(self, outputs: Sequence[Tensor], shares: Tensor, temperatures: Tensor, near: bool) -> Tensor:
        """Return the outputs of a mean of members: logarithms of mean calibrated probabilities, or mean outputs.

        With `near`, the last member already consists of probabilities.
        """
        if not self.ctx.classes:
            return mixed(list(outputs), shares)
        last = len(outputs) - 1
        probabilities = [v if near and i == last else (v / temperatures[i]).softmax(1) for i, v in enumerate(outputs)]
        return mixed(probabilities, shares).clamp(min=LEAST_PROBABILITY).log()

    def _temperatures(self, outputs: Mapping[str, Tensor], y: Tensor) -> dict[str, float]:
        if not self.ctx.classes:
            return dict.fromkeys(outputs, 1.0)
        models = [m for m in outputs if m != "near"]
        values = temperatures([outputs[m] for m in models], y)
        return {**dict(zip(models, values, strict=True)), **({"near": 1.0} if "near" in outputs else {})}

    def candidate(self, name: str, outputs: Mapping[str, Tensor], temperatures: Mapping[str, float]) -> Tensor:
        """Return the outputs [batch, outputs] of a candidate from those of its members."""
        of = CANDIDATES[name]
        if len(of) == 1:
            return self._alone(outputs[name], temperatures[name])
        members = sorted(of, key=lambda m: m == "near")
        shares, warm = (torch.tensor([x[m] for m in members]) for x in (of, temperatures))
        return self.combined([outputs[m] for m in members], shares, warm, "near" in of)

    def _alone(self, outputs: Tensor, temperature: float) -> Tensor:
        return outputs / temperature if self.ctx.classes else outputs

    def _chosen(
        self, state: State, w: Tree, prior: Tensor, data: ClientData, names: Sequence[str]
    ) -> tuple[State, dict[str, Tree], Extras]:
        """Return the choice among these candidates with its scores, the members, and the samples stored for them."""
        task, y = self.ctx.task, data.val.y
        if not len(y):
            at = [self.names.index(n) for n in names]
            first = next(self.names.index(n) for n in (*UNINFORMED, *names) if n in names)
            best = at[int(prior[at].argmax())] if bool((prior != 0).any()) else first
            names = [self.names[best]]
            store = self.stored(w, data, names)
            new: State = {"choice": best, "scores": torch.zeros(len(self.names)), "validated": 0, "temperatures": {}}
            return new, self.members(state, w, names, store), store
        store = self.stored(w, data, names)
        members = self.members(state, w, names, store)
        near = store if any("near" in CANDIDATES[n] for n in names) else {}
        outputs = self.outputs(members, near, data.val.x)
        names = [n for n in names if CANDIDATES[n].keys() <= outputs.keys()]
        warm = self._temperatures(outputs, y)
        candidates = [self.candidate(n, outputs, warm) for n in names]
        sums = torch.stack([-task.total(out, y) for out in candidates]).float()
        sums = sums.nan_to_num(-LARGEST_SCORE, 0.0, -LARGEST_SCORE)
        errors = torch.stack([self._errors(out, y) for out in candidates])
        at = [self.names.index(n) for n in names]
        own = names.index("own") if "own" in names else None
        best, _ = choose_candidate(sums, prior[at], self.hp.strength, errors, own, self.hp.margin)
        each = (sums / len(y)).clamp(-LARGEST_SCORE, 0)
        scores = each.new_full((len(self.names),), float(each.min()))  # the lowest score for missing candidates
        scores[at] = each
        new = {"choice": at[best], "scores": scores, "validated": len(y), "temperatures": warm}
        if own is not None:
            lowest, loss = state.get("lowest"), -float(sums[own]) / len(y)
            better = lowest is None or loss < lowest
            new |= {"lowest": loss if better else lowest, "waits": 0 if better else state["waits"] + 1}
        return new, members, store

    def _errors(self, outputs: Tensor, y: Tensor) -> Tensor:
        """Return the errors [samples]: 0 or 1 for classes, else the loss."""
        return (outputs.argmax(1) != y).float() if self.ctx.classes else self.ctx.task.each(outputs, y)

    # ---- client: use -----------------------------------------------------------------------------------------------
    def personal(self, state: State, download: Tree, data: ClientData) -> Model:
        """Choose again with the newest global model, because that changes from round to round."""
        return self._used(state, download, data, self.names if "tuned" in state else self._untrained)

    @property
    def _untrained(self) -> list[str]:
        """Return the candidates of a client that has never trained."""
        return [n for n in self.names if n in UNTRAINED]

    def model(self, view: ModelView, client: Client) -> Model | None:
        if view == "newcomer":
            return self._used(client.state, client.download, client.data, self._untrained)
        if view in ("watched", "received"):  # a choice in every round would cost more than it shows
            return Model(self._global(client.state, client.download))
        return Model(client.state["tuned"]) if view == "trained" else super().model(view, client)

    def _used(self, state: State, download: Tree, data: ClientData, names: Sequence[str]) -> Model:
        """Return the candidate of the client's choice: one network, or all its members in one tree."""
        w = self._global(state, download)
        new, members, store = self._chosen(state, w, download[PRIOR], data, names)
        return self.made(self.names[new["choice"]], members, store, new["temperatures"], w)

    def made(
        self, name: str, members: Mapping[str, Tree], store: Extras, temperatures: Mapping[str, float], w: Tree
    ) -> Model:
        """Return a candidate as the tree and extras that `predict` takes."""
        of = CANDIDATES[name]
        near = store if "near" in of else {}
        parts = {m: members[m] for m in members if m in of}
        if not of.keys() <= {*parts, *(("near",) if near else ())}:
            return Model(w)  # a client without training samples has neither heads nor neighbours
        if len(of) == 1:
            return Model(parts[name])
        marked = {k: v for m, tree in parts.items() for k, v in T.tag(m, tree).items()}
        order = [*parts, *(("near",) if near else ())]
        warm = torch.tensor([temperatures.get(m, 1.0) for m in order])
        return Model(marked, {"shares": torch.tensor([of[m] for m in order]), "temperatures": warm, **near})

    def predict(self, params: Tree, x: Tensor, extras: Extras) -> Tensor:
        if "shares" not in extras:
            return self.ctx.forward(params, x)
        models = {m: T.tagged(m, params) for m in dict.fromkeys(k.partition(":")[0] for k in params)}
        found = self._each(models, {k: extras[k] for k in ("keys", "labels") if k in extras}, x)
        outputs = [found[m] for m in [*models, *(("near",) if "near" in found else ())]]
        return self.combined(outputs, extras["shares"], extras["temperatures"], "near" in found)


def _is_told(name: str) -> bool:
    """True if a payload entry does not belong to the model."""
    return name.startswith("x:")

"""Decides which answers count: checks of their form, bounds on their size, and the senders of refused answers."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import cast

from coterie.core.context import ClientId, EdgeId
from coterie.core.method import Method
from coterie.core.tree import Tree
from coterie.engine.codec import Value
from coterie.engine.edge_steps import announces
from coterie.engine.messages import MergeAnswer, SendAnswer, TrainAnswer
from coterie.engine.round import RoundPlan, RoundResult
from coterie.errors import CoterieError, sentence
from coterie.federation.cloud.liveness import Liveness
from coterie.federation.cloud.membership import Membership
from coterie.federation.cloud.round_trip import Collected, RoundTrip
from coterie.federation.cloud.upload_bounds import judge_answers, judge_uploads
from coterie.federation.edge_stage import EdgeStage
from coterie.federation.policy.quarantine import Quarantine
from coterie.federation.protocol.messages import Answer, EdgeAnswer, EdgeJob, Request
from coterie.federation.validation import SamplesError, check_answer, check_merged

KnownSamples = Callable[[ClientId, int], int]  # training samples of a client in a round, by the partition


@dataclass(frozen=True)
class AdmissionRules:
    """The limits for answers and their senders."""

    norm_bound: float = 50.0  # largest upload, as a multiple of the usual size; 0: no bound
    quarantine_after: int = 3  # refused answers of one sender; 0: never


class Admission:
    """Checks answers, and counts the refused ones against their senders."""

    def __init__(
        self,
        method: Method,
        rules: AdmissionRules,
        membership: Membership,
        quarantine: Quarantine,
        liveness: Liveness,
        known_samples: KnownSamples | None = None,
    ):
        self.known_samples = known_samples
        self.method, self.rules, self.membership = method, rules, membership
        self.quarantine, self.liveness = quarantine, liveness

    # ---- the form of answers -----------------------------------------------------------------------------------------
    def take_edge(
        self, collected: Collected, node: str, requests: Sequence[Request], job: EdgeJob, reply: EdgeAnswer
    ) -> None:
        """Add an edge's answers for its devices; raises CoterieError if it answers for other clients."""
        asked = {r.client: r for r in requests}
        answers: dict[ClientId, Answer] = {}
        missing = {i: sentence(why) for i, why in reply.missing.items() if i in asked}
        refused = {i: sentence(why) for i, why in reply.refused.items() if i in asked and i not in missing}
        for answer in reply.answers:
            i = answer.client
            if i not in asked or i in answers or i in missing or i in refused:
                raise CoterieError(f"it answers for client {i}, which was not asked, or answers twice")
            try:
                answers[i] = self.check(answer, asked[i])
            except CoterieError as e:
                refused[i] = str(e)
        merged, not_merged = self._check_merges(node, job, reply, answers)
        missing |= {i: "it gave no answer" for i in asked if i not in {*answers, *missing, *refused}}
        excluded = {*missing, *refused, *not_merged}
        name = self.membership.name
        collected.merged |= merged
        collected.answers |= {i: a for i, a in answers.items() if i not in excluded}
        collected.refused |= {i: f"{name(i)}: {why}" for i, why in refused.items()} | not_merged
        collected.refused_node |= not_merged.keys()
        collected.missing |= {i: f"{name(i)}: {why}" for i, why in missing.items()}
        collected.absent |= missing.keys()

    def check(self, answer: Value, request: Request) -> Answer:
        """Return the answer of a device; raise CoterieError if it is not an answer to the request."""
        entry = self.membership.roster.entries[request.client]
        if self.known_samples is not None and request.client in self.method.ctx.clients:
            claimed = entry.hello.samples_in(request.data_round)
            if claimed != (known := self.known_samples(request.client, request.data_round)):
                raise CoterieError(f"it reports {claimed} samples, the partition gives client {request.client} {known}")
        try:
            return check_answer(answer, request, entry.hello.samples_in(request.data_round), self.method.ctx.task)
        except SamplesError:
            self.membership.greet_again(entry.name)
            raise

    def _check_merges(
        self, node: str, job: EdgeJob, reply: EdgeAnswer, answers: Mapping[ClientId, Answer]
    ) -> tuple[dict[EdgeId, MergeAnswer], dict[ClientId, str]]:
        """Return the clusters that an edge merged as asked, and the clients of the others with the reason."""
        merged: dict[EdgeId, MergeAnswer] = {}
        not_merged: dict[ClientId, str] = {}
        replies = {m.edge: m for m in reply.merged}
        for task in job.merges:
            e = task.edge.id
            trained = {r.client: answers[r.client] for r in task.requests if r.client in answers}
            try:
                if e not in replies:
                    raise CoterieError("it was not merged")
                checked = check_merged(self.method, replies[e], task, cast(dict[ClientId, TrainAnswer], trained))
                merged[e] = replace(checked, refused={i: sentence(why) for i, why in checked.refused.items()})
            except CoterieError as error:
                not_merged |= dict.fromkeys(trained, f"{node}: edge {e}: {error}")
        return merged, not_merged

    # ---- the size of uploads -----------------------------------------------------------------------------------------
    def close(
        self,
        plan: RoundPlan,
        stage: EdgeStage,  # edges that are merged in the cloud
        collected: Collected,
        asked: Collection[ClientId],
        absent: Collection[ClientId],  # clients of edges that are not connected
        ask: Callable[[Sequence[ClientId]], Collected],  # asks clients for the rest of their uploads
    ) -> RoundTrip:
        """Judge the uploads of a round, and merge the edges that the cloud merges itself."""
        trained = cast(dict[ClientId, TrainAnswer], collected.answers)
        requests = [r for r in (*plan.direct, *stage.requests) if r.client in trained and trained[r.client].upload]
        bound, usual = self.rules.norm_bound, self.quarantine
        sizes = judge_answers(requests, trained, bound, usual.memory)
        trained = {i: a for i, a in trained.items() if i not in sizes.refused}
        downloads = {r.client: r.download for r in (*plan.direct, *stage.requests)}

        def send(clients: Sequence[ClientId]) -> dict[ClientId, Tree]:
            nonlocal sizes
            more = ask(clients)
            collected.add_failures(more)
            rest = {i: a.upload for i, a in more.answers.items() if isinstance(a, SendAnswer)}
            judged = judge_uploads({i: downloads[i] for i in rest}, rest, bound, usual.memory)
            sizes |= judged
            return {i: tree for i, tree in rest.items() if i not in judged.refused}

        if announces(self.method) and (direct := [r.client for r in plan.direct if r.client in trained]):
            rest = send(direct)  # no edge chooses among them
            trained |= {i: replace(trained[i], upload={**tree, **trained[i].upload}) for i, tree in rest.items()}
        merged = {**collected.merged, **stage.merge(trained, send)}
        refused = {**collected.refused, **sizes.refused}
        sent = {task.edge.id: task.edge.received[0] for task in plan.edges}
        merged_sizes = judge_uploads(sent, {e: answer.upload for e, answer in merged.items()}, bound, usual.merged)
        for e in merged_sizes.refused.keys() & collected.merged.keys():  # the cloud trusts its own merging
            for client in merged.pop(e).senders:
                via = self.membership.roster.entries[client].via
                refused[client] = f"{via}: edge {e}: {merged_sizes.refused[e]}"
        missing = {i: self.membership.why_absent(i) for i in absent} | collected.missing | stage.missing
        named = self.membership.named
        return RoundTrip(
            trained={i: a for i, a in trained.items() if i not in missing and i not in refused},
            merged=merged,
            missing={i: named(i, why) for i, why in missing.items()},
            refused={i: named(i, why) for i, why in refused.items()},
            asked=frozenset(asked),
            absent=frozenset(collected.absent).union(absent),
            refused_node=frozenset(collected.refused_node),
            merged_remotely=frozenset(i for answer in collected.merged.values() for i in answer.senders),
            sizes=sizes,
            merged_sizes=merged_sizes,
        )

    # ---- refusals ----------------------------------------------------------------------------------------------------
    def count_refusals(self, round: int, trip: RoundTrip, result: RoundResult) -> None:
        """Count refused answers against their senders, unless it is uncertain whose upload is at fault."""
        for client, reason in sorted(result.refused.items()):
            name = self._sender(client, trip)
            if client in result.doubtful or client in trip.merged_remotely or name is None:
                continue
            if self.quarantine.refuse(name, round, reason):
                times = self.quarantine.offenders[name].refusals
                self.liveness.problem(
                    f"round {round}: {name}: in quarantine after {times} refusals, until `coterie release`"
                )

    def _sender(self, client: ClientId, trip: RoundTrip) -> str | None:
        """Return the name of the sender of a refused answer: the device, or the edge whose reply was refused."""
        entry = self.membership.roster.entries.get(client)
        if entry is None:
            return None
        return entry.edge if entry.edge is not None and client in trip.refused_node else entry.name

"""The runtime of the cloud: sends requests to devices, directly or through edges, and decides which answers count."""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import cast

from coterie.core.context import ClientId
from coterie.core.method import Method
from coterie.engine.messages import (
    MergeRequest,
    ScoreAnswer,
    ScoreRequest,
    SendRequest,
    TrainAnswer,
    TrainRequest,
    check_message,
)
from coterie.engine.round import RoundAnswers, RoundPlan, RoundResult
from coterie.errors import CoterieError, sentence
from coterie.federation.cloud.admission import Admission, AdmissionRules, KnownSamples
from coterie.federation.cloud.dispatch import Dispatcher, excluded_line
from coterie.federation.cloud.divergence import DivergenceWatch
from coterie.federation.cloud.liveness import Liveness
from coterie.federation.cloud.membership import Membership
from coterie.federation.cloud.round_trip import Collected, RoundTrip, make_jobs
from coterie.federation.cloud.secure_sum import SumExchange, new_session
from coterie.federation.cloud.state_versions import StateVersions
from coterie.federation.cloud.waiting import Waiting, WaitingRules
from coterie.federation.edge_stage import EdgeStage
from coterie.federation.identity.roles import NodeRole
from coterie.federation.identity.seats import Roster
from coterie.federation.policy.audit import AUDIT_FILE, AuditLog
from coterie.federation.policy.quarantine import Quarantine
from coterie.federation.protocol.messages import EdgeAnswer, EdgeJob, JobKind, Request
from coterie.federation.protocol.plan import FederationPlan
from coterie.federation.transport import Cause, NodeLink
from coterie.federation.validation import check_wire
from coterie.federation.wire_bytes import WireBytesLog
from coterie.privacy.secure_sum.setting import SecureSum
from coterie.runtimes.base import Conclusion, Replies, Runtime
from coterie.storage.client_states import Index

log = logging.getLogger("coterie.cloud")
_WORK = {"train": "training", "send": "receiving uploads", "sum": "adding up uploads"}


class FederationRuntime(Runtime):
    """Computes clients on devices, which keep their states; the cloud knows which version of each state counts."""

    def __init__(
        self,
        method: Method,
        link: NodeLink,
        plan: FederationPlan,
        roles: Callable[[], Mapping[str, NodeRole]],  # reads the roles of all registered nodes
        folder: Path,  # for roster.json, quarantine.json, wire.jsonl and the audit log
        waiting: WaitingRules,
        admission: AdmissionRules | None = None,
        liveness: Liveness | None = None,
        known_samples: KnownSamples | None = None,  # None: devices have data of their own
        secure: SecureSum | None = None,
        ca: Path | None = None,  # certificates of the authority of the devices
    ):
        self.secure, self.ca = secure, ca
        rules = admission or AdmissionRules()
        self.method, self.plan, self.liveness = method, plan, liveness or Liveness()
        self.wire, self.audit = WireBytesLog(folder / "wire.jsonl"), AuditLog(folder / AUDIT_FILE)
        self.quarantine = Quarantine(folder, rules.quarantine_after)
        roster = Roster(folder / "roster.json", len(method.ctx.clients))
        self.divergence = DivergenceWatch()
        self.versions = StateVersions(plan.places, roster)
        self.dispatcher = Dispatcher(link, plan.model_dump_json(), plan.run, method, self.audit)
        self.membership = Membership(self.dispatcher, roster, roles, self.versions, self.quarantine, self.liveness)
        self.admission = Admission(method, rules, self.membership, self.quarantine, self.liveness, known_samples)
        self.waiting = Waiting(waiting, self.membership, self.liveness)

    # ---- a round -----------------------------------------------------------------------------------------------------
    def run(self, plan: RoundPlan) -> RoundTrip:
        """Run a round. An edge whose clients are all behind one node is relayed and merged there, others here."""
        self.waiting.for_quorum()
        connected, roster = self.membership.connected, self.membership.roster
        of_edges = {r.client for task in plan.edges for r in task.requests}
        asked, absent = ({r.client for r in plan.direct} | of_edges) & connected, of_edges - connected
        stage, remote = EdgeStage(self.method), list[tuple[str, MergeRequest]]()
        for whole in plan.edges:
            task = replace(whole, requests=tuple(r for r in whole.requests if r.client not in absent))
            nodes = {roster.entries[r.client].edge for r in task.requests}
            if len(nodes) == 1 and (node := nodes.pop()) is not None:
                remote.append((node, task))
            else:
                stage.relay(task)
        collected = self._exchange("train", [*plan.direct, *stage.requests], remote)
        trip = self.admission.close(plan, stage, collected, asked, absent, lambda ids: self._call(ids, plan.round))
        return trip if self.secure is None or plan.round == 0 else self._summed(self.secure, plan, trip)

    def _summed(self, secure: SecureSum, plan: RoundPlan, trip: RoundTrip) -> RoundTrip:
        """Return the answers with the sum of the uploads, which the devices have held back."""
        exchange = SumExchange(
            secure.terms(new_session(self.plan.run, plan.round)),
            secure.words(self.method).count,
            plan.round,
            len(self.method.ctx.clients),
            lambda requests: self._exchange("sum", requests),
            self.membership.name,
            self.ca,
        )
        outcome = exchange.run(trip.trained)
        for i in outcome.summed.liars if outcome.summed else ():
            reason = "it revealed wrong shares in a secure sum"
            self.liveness.problem(f"round {plan.round}: {self.named(i, reason)}")
            self.quarantine.refuse(self.membership.name(i), plan.round, reason)
        counted = set(outcome.summed.clients) if outcome.summed else set()
        return replace(
            trip,
            trained={i: replace(a, upload={}) for i, a in trip.trained.items() if i in counted},
            missing={**trip.missing, **outcome.missing},
            refused={**trip.refused, **outcome.refused},
            absent=trip.absent | outcome.absent,
            summed=outcome.summed,
            sum_bytes=outcome.bytes,
            spent=outcome.spent,
        )

    def _call(self, clients: Sequence[ClientId], round: int) -> Collected:
        """Ask clients for the rest of the uploads that they announced in this round."""
        return self._exchange("send", [SendRequest(i, round) for i in clients])

    def conclude(self, plan: RoundPlan, answers: RoundAnswers, result: RoundResult) -> Conclusion:
        """Count refused answers, and accept the round if enough of the asked clients count.

        If most answers share a fault, the model is to blame: no refusal counts, and the server goes back.
        Uploads with NaN count as answers: their senders would give the same answer again.
        """
        assert isinstance(answers, RoundTrip)
        t, excluded = plan.round, result.left_out
        if fault := self.divergence.fault(answers, result, self.membership.name):
            self.waiting.accept()
            self.liveness.problem(
                f"round {t}: {fault}: the model goes back to an earlier state, and no sender is blamed; "
                "a lying sender can cause this (--robust)"
            )
            for client, reason in excluded.items():
                self._note_excluded(t, "train", client, reason, client in answers.absent)
            return Conclusion.SET_BACK
        self.admission.count_refusals(t, answers, result)
        count = len(result.accepted) + len(result.nonfinite)
        needed = min(self.waiting.rules.min_clients, len(answers.asked))
        for client, reason in excluded.items():
            self.liveness.problem(f"round {t}: {self.named(client, reason)}")
        if count < needed and not answers.spent:
            self.waiting.repeat(f"round {t} is repeated: {count} of at least {needed} clients count")
            return Conclusion.REPEAT
        self.waiting.accept()
        accepted = set(result.accepted)
        entries = [self.membership.roster.entries[i] for i in accepted if i in self.membership.roster.entries]
        self.quarantine.accept({name for entry in entries for name in (entry.name, entry.via)})
        edges = [edge for edge, answer in answers.merged.items() if set(answer.senders) <= accepted]
        self.quarantine.remember(t, answers.sizes.usual(result.accepted), answers.merged_sizes.usual(edges))
        for client, reason in excluded.items():
            absent, name = client in answers.absent, self.membership.name(client)
            self._note_excluded(t, "train", client, reason, absent)
            if not absent and not self.quarantine.holds(name):
                self.liveness.refused(name, t, reason)
        return Conclusion.ACCEPT

    def train(self, requests: Sequence[TrainRequest]) -> Replies[TrainAnswer]:
        """Have devices train, outside of a round with edges."""
        self.waiting.for_quorum()
        collected = self._exchange("train", requests)
        return cast(dict[ClientId, TrainAnswer], collected.answers), collected.excluded

    def score(self, requests: Sequence[ScoreRequest]) -> Replies[ScoreAnswer]:
        """Have devices score models on their own data."""
        collected, closed = self._exchange("score", requests), self.versions.closed
        for client, reason in collected.excluded.items():
            self.liveness.problem(f"after round {closed}: {self.named(client, reason)}")
            self._note_excluded(closed + 1, "score", client, reason, client in collected.absent)
        return cast(dict[ClientId, ScoreAnswer], collected.answers), collected.excluded

    def _exchange(
        self, kind: JobKind, requests: Sequence[Request], merges: Sequence[tuple[str, MergeRequest]] = ()
    ) -> Collected:
        """Send all requests at once and check the replies; `merges` are tasks for edges, with the edge's name."""
        deadline, bound = self.waiting.rules.deadline, self.admission.rules.norm_bound
        jobs = make_jobs(self.membership, self.plan.run, deadline, bound, requests, merges)
        collected = Collected(missing={i: self.membership.why_absent(i) for i in jobs.absent}, absent={*jobs.absent})
        self.liveness.work(
            f"after round {self.versions.closed}: scoring" if kind == "score" else f"round {jobs.round}: {_WORK[kind]}",
            jobs.by_node,
        )
        largest = jobs.largest_reply(self.method)
        replies = self.dispatcher.send_jobs(jobs.by_node, kind, jobs.round, deadline, largest)
        for node, job in jobs.by_node.items():
            asked = jobs.requests[node]
            if node in replies.traffic:
                self.wire.count("edge-cloud" if isinstance(job, EdgeJob) else "device-cloud", replies.traffic[node])
            failure = replies.failures.get(node)
            if failure is not None and failure.cause is Cause.LATE:
                self.membership.missed_deadline(node)
            else:
                self.membership.answered(node)
            if failure is not None:
                collected.fail([r.client for r in asked], failure)
                continue
            try:
                if isinstance(job, EdgeJob):
                    reply = check_message(replies.values[node], EdgeAnswer)
                    self.wire.count("device-edge", check_wire(reply.wire))
                    self.admission.take_edge(collected, node, asked, job, reply)
                else:
                    collected.answers[asked[0].client] = self.admission.check(replies.values[node], asked[0])
            except CoterieError as e:
                collected.refuse_node([r.client for r in asked], f"{node}: {e}")
        self.liveness.work("")
        return collected

    def _note_excluded(self, round: int, message: str, client: ClientId, reason: str, absent: bool) -> None:
        name = self.membership.name(client)
        why = sentence(reason.removeprefix(f"{name}: "))
        self.audit.write(excluded_line(self.plan.run, round, message, name, why, absent))

    def named(self, client: ClientId, reason: str) -> str:
        """Return the reason with the name of the client's node in front."""
        return self.membership.named(client, reason)

    def newcomers(self) -> Sequence[ClientId]:
        """Return the devices that came when all seats were taken."""
        return self.membership.roster.newcomers

    # ---- states and checkpoints --------------------------------------------------------------------------------------
    def keep(self, round: int, clients: Sequence[ClientId]) -> None:
        """Let the states count that these clients have made in this round."""
        self.versions.keep(round, clients)
        for client in clients:
            self.liveness.uploaded(self.membership.name(client), round)

    def save(self) -> Index:
        """Return the versions that count; devices have stored their states before they answered."""
        self.wire.close_round(self.versions.closed)
        self.liveness.changed()
        return self.versions.index()

    def restore(self, index: Index | None, older: Sequence[Index] = ()) -> None:
        """Go back to the versions of a checkpoint."""
        self.versions.restore(index)
        self.quarantine.go_back(int(self.versions.rounds.max()))

    def forget(self, oldest_kept: int) -> None:
        """Do nothing: devices decide themselves how many versions of their states they keep."""

    # ---- the end -----------------------------------------------------------------------------------------------------
    def over(self) -> None:
        """Tell the connected nodes of the run that it has ended."""
        members = {name.partition("/")[0] for name in self.membership.roster.numbers}
        try:
            nodes = members & set(self.dispatcher.link.nodes())
            untold = self.dispatcher.send_over(nodes, self.versions.closed)
        except CoterieError as e:
            log.warning("devices were not told that the run has ended: %s", e)
            return
        for name, failure in sorted(untold.items()):
            log.info("%s was not told that the run has ended: %s", name, failure.why)

    def close(self) -> None:
        """Publish the last state of the nodes."""
        self.liveness.changed()

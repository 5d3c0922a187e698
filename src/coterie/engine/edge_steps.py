"""The steps of a round between the cloud and its clients, at the cloud or at an edge."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from coterie.core import tree as T
from coterie.core.context import ClientId, State
from coterie.core.edges import EdgeMethod, is_announced
from coterie.core.method import Download, Method, Upload
from coterie.core.tree import Tree
from coterie.engine.ledger import summed
from coterie.engine.messages import Bytes, MergeAnswer, MergeRequest, TrainAnswer, TrainRequest
from coterie.engine.round import Edges, attach, receive


def downloads(
    method: Method, server: State, edges: Edges, sent: Download, ids: Sequence[ClientId], round: int
) -> dict[ClientId, tuple[Tree, Tree]]:
    """Return what each client receives of `sent`, directly or through its edge: the shared part, and its own."""
    received = {i: (sent.shared, sent.each.get(i, {})) for i in ids}
    for edge, members in attach(method, server, edges, sent, ids):
        assert isinstance(method, EdgeMethod)
        relayed = method.relay(edge, members, round)
        received |= {i: (relayed.shared, relayed.each.get(i, {})) for i in members}
    return received


def preview(
    method: Method, server: State, edges: Edges, ids: Sequence[ClientId], round: int
) -> dict[ClientId, tuple[Tree, Tree]]:
    """Return each client's download for scoring before this round."""
    return downloads(method, server, edges, method.deliver(server, ids, round), ids, round)


def relay(method: EdgeMethod, task: MergeRequest) -> tuple[list[TrainRequest], Bytes]:
    """Return the requests of an edge's clients with their downloads, and the bytes sent to all sampled clients."""
    handed = method.relay(task.edge, task.clients, task.round)
    requests = [replace(r, shared=handed.shared, own=handed.each.get(r.client, {})) for r in task.requests]
    schema = method.schema("down")
    return requests, summed(schema.parts(handed.to(i)) for i in task.clients)


def announces(method: Method) -> bool:
    """True if clients send an announcement, and the rest of their uploads when they are called."""
    return any(map(is_announced, method.schema("up").entries))


class Merging:
    """The merge of one edge, of complete uploads or, if the method announces, of uploads in two steps."""

    def __init__(self, method: EdgeMethod, task: MergeRequest, answers: Sequence[TrainAnswer], down: Bytes):
        """Check the uploads in these answers: announcements if the method announces."""
        self.method, self.task, self.down = method, task, down
        self.in_two_steps = announces(method)
        schemas = {i: s.keep(is_announced) for i, s in task.schemas.items()} if self.in_two_steps else task.schemas
        self._got = receive(schemas, sorted(answers, key=lambda a: a.client), task.weight_cap)
        self._answers = {a.client: a for a in answers}
        self._sizes = list(self._got.bytes.values())
        self._whole: dict[ClientId, Upload] = {}  # complete uploads of clients that were called

    @property
    def answered(self) -> list[ClientId]:
        """The clients that answered, whether or not their uploads count."""
        return sorted(self._answers)

    @property
    def senders(self) -> list[ClientId]:
        """The clients whose uploads count."""
        return [u.sender for u in self._got.uploads]

    def wanted(self, excluded: Collection[ClientId] = ()) -> list[ClientId]:
        """Return the clients that are called and have not sent the rest of their uploads yet."""
        return sorted(self._called(excluded) - self._whole.keys())

    def take(self, rest: Mapping[ClientId, Tree]) -> None:
        """Complete the uploads of called clients."""
        said = [self._answers[i] for i in sorted(rest)]
        got = receive(self.task.schemas, [replace(a, upload={**rest[a.client], **a.upload}) for a in said])
        counted = {u.sender: u.samples for u in self._got.uploads}
        self._sizes += [
            {"refused": T.nbytes(tree)} if i in got.refused else self.task.schemas[i].parts(tree)
            for i, tree in rest.items()
        ]
        self._whole |= {u.sender: replace(u, samples=counted.get(u.sender, u.samples)) for u in got.uploads}
        self.exclude(got.refused, refused=True)
        self._got.nonfinite += got.nonfinite
        self.exclude(dict.fromkeys(got.nonfinite, ""))

    def exclude(self, clients: Mapping[ClientId, str], refused: bool = False) -> None:
        """Leave out clients, as if they had not answered, or as refused for these reasons."""
        self._got.uploads = [u for u in self._got.uploads if u.sender not in clients]
        self._got.refused |= clients if refused else {}

    def merged(self, excluded: Collection[ClientId] = ()) -> MergeAnswer:
        """Merge the uploads; clients that are not called count with their announcement."""
        called = self._called(excluded)
        uploads = [
            self._whole.get(u.sender, u) if u.sender in called else u
            for u in self._got.uploads
            if u.sender not in excluded
        ]
        state, upload = (
            self.method.merge(self.task.edge, uploads, self.task.round)
            if uploads
            else (self.task.edge.state, Upload({}))
        )
        return MergeAnswer(
            edge=self.task.edge.id,
            state=state,
            upload=upload.tree,
            note=dict(upload.note),
            senders=tuple(u.sender for u in uploads),
            samples=sum(u.samples for u in uploads),
            down=self.down,
            up=summed(self._sizes),
            refused=dict(self._got.refused),
            nonfinite=tuple(self._got.nonfinite),
        )

    def _called(self, excluded: Collection[ClientId]) -> set[ClientId]:
        ahead = [u for u in self._got.uploads if u.sender not in excluded]
        if not self.in_two_steps or not ahead:
            return set()
        everybody = {u.sender for u in ahead}
        called = self.method.calls(self.task.edge, ahead, self.task.round)
        return everybody if called is None else everybody & set(called)


def merge(method: EdgeMethod, task: MergeRequest, answers: Sequence[TrainAnswer], down: Bytes) -> MergeAnswer:
    """Merge the complete uploads of an edge's clients; only the entries that are called for are used."""
    if not announces(method):
        return Merging(method, task, answers, down).merged()
    got = receive(task.schemas, sorted(answers, key=lambda a: a.client))
    sound = {u.sender: u.tree for u in got.uploads}
    ahead = [replace(a, upload=T.keep(a.upload, is_announced)) for a in answers if a.client in sound]
    merging = Merging(method, task, ahead, down)
    while wanted := merging.wanted():
        merging.take({i: T.drop(sound[i], is_announced) for i in wanted})
    answer = merging.merged()
    sizes = [size for i, size in got.bytes.items() if i not in sound]
    return replace(answer, up=summed([answer.up, *sizes]), refused=got.refused, nonfinite=tuple(got.nonfinite))

"""What a stranger, a device, an edge or a cloud sends cannot end a run, forge a log or speak for others."""

import json
import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("grpc", reason="a federation needs the extra federation")

import torch

from coterie.engine import codec
from coterie.engine.messages import Score, TrainAnswer, TrainRequest, check_message
from coterie.errors import CoterieError, sentence
from coterie.federation.cloud import status as st
from coterie.federation.cloud.dispatch import HELLO_LINES, NAMES_SHOWN, Dispatcher
from coterie.federation.cloud.program import reopen
from coterie.federation.identity import admin as nodes
from coterie.federation.identity.roles import NodeRole
from coterie.federation.identity.seats import MAX_DEVICES_OF_EDGE, MAX_NAMED_STRANGERS, Roster, read_attached
from coterie.federation.line_log import OneLine
from coterie.federation.policy.audit import AuditLog
from coterie.federation.policy.quarantine import Quarantine
from coterie.federation.protocol.messages import Attached, EdgeAnswer, EdgeJob, Hello
from coterie.federation.transport import NodeReplies
from coterie.federation.transport.event_loop import event_loop, log_loop_error
from coterie.methods import find
from coterie.testing import events
from support.in_process_link import federation

FORGED = "no\n2026-01-01 00:00:00,000 INFO alice is client 7\x1b[2J\x1b]0;title\x07"
HUGE = 10**400  # an integer that no float can hold
BAD = 1


# ---- the log of the event loop ---------------------------------------------------------------------------------------
def test_only_what_means_nothing_is_left_out_of_the_log(caplog: pytest.LogCaptureFixture) -> None:
    for told in (
        {"exception": OSError(9, "Bad file descriptor")},
        {"message": "Task was destroyed but it is pending!"},
    ):
        log_loop_error(event_loop(), {"message": "Exception in callback", **told})
    assert not caplog.records
    log_loop_error(event_loop(), {"message": "Exception in callback", "exception": OSError(5, "Input/output error")})
    assert "Input/output error" in caplog.text


# ---- what is shown to people -----------------------------------------------------------------------------------------
def test_words_of_other_hosts_are_one_printable_line() -> None:
    assert sentence(FORGED) == "no 2026-01-01 00:00:00,000 INFO alice is client 7?[2J?]0;title?"
    assert len(sentence("x" * 1000)) == 300


def test_a_log_message_is_one_line() -> None:
    record = logging.LogRecord("coterie", logging.INFO, "", 0, "%s", (FORGED,), None)
    shown = OneLine("%(levelname)s %(message)s").format(record)
    assert shown.startswith("INFO no?2026") and shown.isprintable()


def test_a_traceback_has_lines_and_no_control_characters() -> None:
    try:
        raise ValueError(FORGED)
    except ValueError as e:
        shown = OneLine().formatException((type(e), e, e.__traceback__))
    assert len(shown.split("\n")) > 2 and all(line.isprintable() for line in shown.split("\n"))


# ---- files that somebody has changed ---------------------------------------------------------------------------------
STATUS = {"state": "ended", "time": 1.0, "round": 1, "rounds": 2, "clients": {}, "nodes": {}}


def test_a_changed_status_cannot_forge_lines(tmp_path: Path) -> None:
    forged = {**STATUS, "reason": FORGED, "text": FORGED, "quarantine": {"a": FORGED}}
    (tmp_path / "status.json").write_text(json.dumps(forged))
    shown = st.status_lines(st.read_status(tmp_path))
    assert len(shown) == 3 and all(line.isprintable() for line in shown)


@pytest.mark.parametrize("change", [{"clients": [1]}, {"clients": {"0": 1}}, {"quarantine": [1]}, {"round": ...}])
def test_a_damaged_status_is_a_sentence(tmp_path: Path, change: dict[str, Any]) -> None:
    found = {k: v for k, v in {**STATUS, **change}.items() if v is not ...}
    (tmp_path / "status.json").write_text(json.dumps(found))
    with pytest.raises(CoterieError, match=r"status\.json is damaged"):
        st.status_lines(st.read_status(tmp_path))


@pytest.mark.parametrize("text", ["[" * 100_000, "[]", "{}", '{"nodes": [1]}', '{"nodes": {"a": 1}}'])
def test_a_status_that_is_none_is_a_sentence_and_tells_no_list_of_nodes_anything(tmp_path: Path, text: str) -> None:
    (tmp_path / "status.json").write_text(text)
    with pytest.raises(CoterieError, match="cannot be read"):
        st.read_status(tmp_path)
    assert nodes._status(tmp_path) == {}


@pytest.mark.parametrize("text", ["[1]", '{"a": [', '{"a": "x"}', '{"senders": {"a": {"b": 1}}}', '{"usual": "x"}'])
def test_damaged_files_of_a_run_are_named(tmp_path: Path, text: str) -> None:
    for name in ("roster.json", "quarantine.json", "cloud.json", "settings.json"):
        (tmp_path / name).write_text(text)
    with pytest.raises(CoterieError, match=r"cloud\.json or settings\.json is missing or damaged"):
        reopen(tmp_path)
    with pytest.raises(CoterieError, match=r"roster\.json is damaged"):
        Roster(tmp_path / "roster.json", 2)
    if "senders" in text or "usual" in text:
        with pytest.raises(CoterieError, match=r"quarantine\.json is damaged"):
            Quarantine(tmp_path)


def test_a_damaged_list_of_freed_seats_is_named(tmp_path: Path) -> None:
    (tmp_path / "freed.json").write_text('{"alice": 3}')
    with pytest.raises(CoterieError, match=r"freed\.json is damaged"):
        Roster(tmp_path / "roster.json", 2)


# ---- hellos ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "said",
    [
        Attached(1, 1),  # type: ignore[arg-type]
        Attached({"bob": Hello(torch.zeros(3), 1)}, {}),  # type: ignore[arg-type]
        Hello(torch.zeros(3), 1),  # type: ignore[arg-type]
        Hello({"a": torch.zeros(3)}, HUGE),  # type: ignore[arg-type]
        Score({"x": torch.zeros(3)}, 0.0),
        [torch.zeros(3)],
        None,
    ],
)
def test_a_hello_that_is_none_is_its_senders_error(tmp_path: Path, said: Any) -> None:
    """Twice, because the second is compared with the first; nothing of it is noted."""
    log = AuditLog(tmp_path / "audit.jsonl")
    asks = Dispatcher(None, "", "", None, log)  # type: ignore[arg-type]
    for _ in range(2):
        replies = {"mallory": codec.pack(said), "alice": codec.pack(Hello(0, 5))}
        found, errors = asks.read_hellos(NodeReplies(replies, {}, {}))
        assert found == {"alice": Hello(0, 5)}
        assert errors["mallory"].why.startswith("mallory: ")
    log.close()
    assert [json.loads(line)["peer"] for line in (tmp_path / "audit.jsonl").read_text().splitlines()] == ["alice"]


def test_an_edge_with_a_wildcard_speaks_for_names_of_nodes_only() -> None:
    names = ("alice", "a/bob", "\x1b[2J", "x\ny", "", "..", "a" * 64)
    found = read_attached("north", NodeRole.of("edge", ["*"]), Attached(dict.fromkeys(names, Hello(None, 5)), {}))
    assert list(found.hellos) == ["north/alice"]
    assert len(found.refused) == len(names) - 1
    assert all((name + reason).isprintable() for name, reason in found.refused.items())


def test_an_edge_cannot_flood_the_log_with_names() -> None:
    devices = {f"d{i}": Hello(None, 5) for i in range(300)}
    found = read_attached("north", NodeRole.of("edge", ["alice"]), Attached(devices, {}))
    assert len(found.refused) == MAX_NAMED_STRANGERS + 1
    assert found.refused["north/*"] == f'edge "north" may not speak for {300 - MAX_NAMED_STRANGERS} more devices'


def test_an_edge_has_no_more_devices_than_connections() -> None:
    devices = {f"d{i}": Hello(None, 5) for i in range(MAX_DEVICES_OF_EDGE + 1)}
    with pytest.raises(CoterieError, match="speaks for 4097 devices, more than 4096"):
        read_attached("north", NodeRole.of("edge", ["*"]), Attached(devices, {}))


def test_an_edge_cannot_fill_the_audit_log_with_hellos(tmp_path: Path) -> None:
    log = AuditLog(tmp_path / "audit.jsonl")
    asks = Dispatcher(None, "", "", None, log)  # type: ignore[arg-type]
    for n in range(HELLO_LINES + 5):
        said = Attached({f"d{n}-{i}" + "x" * 100: Hello(None, 5) for i in range(NAMES_SHOWN + 2)}, {})
        asks.read_hellos(NodeReplies({"north": codec.pack(said)}, {}, {}))
    asks.read_hellos(NodeReplies({"alice": codec.pack(Hello(0, 5))}, {}, {}))
    log.close()
    lines = [json.loads(line) for line in (tmp_path / "audit.jsonl").read_text().splitlines()]
    assert [line["peer"] for line in lines] == ["north"] * HELLO_LINES + ["alice"]
    assert all(len(x["about"]["devices"]) == NAMES_SHOWN and x["about"]["more"] == 2 for x in lines[:-1])
    assert max(len(d) for x in lines[:-1] for d in x["about"]["devices"]) == 63


def test_an_edge_with_a_wildcard_leaves_nothing_of_names_it_does_not_say_any_more(tmp_path: Path) -> None:
    with federation(tmp_path, "fedavg", 2, join=1.0, rounds=1) as f:
        honest, n = f.link.handlers["edge-0"], 0
        known = f.runtime.membership.roles()
        f.runtime.membership.roles = lambda: {**known, "edge-0": NodeRole.of("edge", ["*"])}

        def inventing(kind: str, round: int, shared: Any, own: Any) -> memoryview:
            nonlocal n
            made = codec.unpack(honest(kind, round, shared, own))
            if kind != "hello":
                return codec.pack(made)
            n += 1
            return codec.pack(replace(made, refused={f"w{n}-{i}": f"no {n}" for i in range(50)}))

        f.link.handlers["edge-0"] = inventing
        for _ in range(5):
            f.runtime.membership._edges_asked = 0.0
            f.runtime.membership.update()
        assert (
            n == 5
            and len(f.runtime.membership.refused)
            == len(f.runtime.membership._logged)
            == len(f.runtime.membership.excluded)
            == 50
        )
        assert len(f.runtime.membership.connected) == 4


# ---- answers ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("answer", [{"loss": HUGE}, {"loss": -HUGE}, {"note": {"a": HUGE}}, {"after": Score({}, HUGE)}])
def test_numbers_that_are_no_floats_are_refused(answer: dict[str, Any]) -> None:
    honest = TrainAnswer(0, {}, {}, 1, 1, 0)
    assert check_message(honest, TrainAnswer) is honest
    with pytest.raises(CoterieError, match="has an impossible value"):
        check_message(codec.unpack(codec.pack(replace(honest, **answer))), TrainAnswer)


def test_a_tensor_of_too_many_dimensions_is_refused() -> None:
    assert codec.unpack(codec.pack(torch.zeros((1,) * codec.DIMENSIONS))).ndim == codec.DIMENSIONS
    with pytest.raises(CoterieError, match="65 dimensions, more than 32"):
        codec.unpack(codec.pack(torch.zeros((1,) * 65)))


def test_a_header_from_another_host_has_a_bound() -> None:
    """A header is read into objects that take many times its bytes."""
    whole = codec.pack(list(range(2_000_000)))
    assert len(codec.unpack(whole)) == 2_000_000
    with pytest.raises(CoterieError, match=r"its header has \d+ bytes, more than 8388608"):
        codec.unpack_foreign(whole)


def test_a_structure_from_another_host_has_a_bound() -> None:
    """Whatever walks through it later would end with an error that nobody expects."""

    def nested(levels: int) -> memoryview:
        value: Any = 0
        for _ in range(levels):
            value = [value]
        return codec.pack(value)

    assert codec.unpack(nested(200)) and codec.unpack_foreign(nested(codec.LEVELS))
    with pytest.raises(CoterieError, match="it is nested too deep"):
        codec.unpack_foreign(nested(codec.LEVELS + 2))


def test_a_device_cannot_have_the_edge_before_it_blamed(tmp_path: Path) -> None:
    """Words of its own in a refusal, which begin with the edge's name."""
    with federation(tmp_path, "fedavg", 2, join=1.0, rounds=4, eval_every=4) as f:
        note = {"edge-0: it": 1e10}
        f.device_link(BAD).spoil[f"device-{BAD}"] = lambda a: replace(a, note=note) if isinstance(a, TrainAnswer) else a
        assert f.loop.run()
        assert list(f.runtime.quarantine.out) == [f"edge-0/device-{BAD}"]
    assert [e["failed"] for e in events(tmp_path / "run")] == [[BAD]] * 4
    why = events(tmp_path / "run")[0]["reasons"][str(BAD)]
    assert why == f"edge-0/device-{BAD}: in the note, 'edge-0: it' is 1e+10"


def test_an_upload_that_is_too_large_counts_against_its_sender(tmp_path: Path) -> None:
    def swollen(answer: Any) -> Any:
        if isinstance(answer, TrainAnswer):
            return replace(answer, upload={**answer.upload, "more": torch.zeros(2**22)})
        return answer

    with federation(tmp_path, "fedavg", join=1.0, rounds=5, eval_every=5) as f:
        f.link.spoil[f"device-{BAD}"] = swollen
        assert f.loop.run()
        assert "is larger than the" in f.runtime.quarantine.out[f"device-{BAD}"]
    assert [e["failed"] for e in events(tmp_path / "run")] == [[BAD]] * 5


def test_a_device_cannot_pass_for_absent_by_saying_so(tmp_path: Path) -> None:
    """What it says is told as its refusal, and it is not taken for a silent node either."""
    with federation(tmp_path, "fedavg", join=1.0, rounds=4, eval_every=4) as f:
        name = f"device-{BAD}"
        honest = f.link.handlers[name]

        def pretending(kind: str, round: int, shared: Any, own: Any) -> memoryview:
            if kind == "train":
                raise CoterieError(f"{name} did not answer within 600 s")
            return honest(kind, round, shared, own)

        f.link.handlers[name] = pretending
        assert f.loop.run()
        assert f.runtime.membership.silent == set()
    lines = [json.loads(x) for x in (tmp_path / "run" / "audit.jsonl").read_text().splitlines()]
    mine = [x for x in lines if x["peer"] == name and x["message"] == "train" and x["way"] == "in"]
    assert len(mine) == 4 and all("refused" in x and "missing" not in x for x in mine)


def test_a_job_that_names_not_all_devices_is_refused_by_an_edge(tmp_path: Path) -> None:
    with federation(tmp_path, "fedavg", 2, join=1.0, rounds=1) as f:
        assert f.loop.run()
        edge = f.link.handlers["edge-0"].__self__  # type: ignore[attr-defined]
        job = EdgeJob(edge._run.plan.run, 5.0, {}, {}, (TrainRequest(0, 1),), ())
        with pytest.raises(CoterieError, match="does not name all devices"):
            edge.answer("train", 1, job)


LIES: dict[str, Callable[[TrainAnswer], TrainAnswer]] = {
    "loss": lambda a: replace(a, loss=HUGE),
    "dimensions": lambda a: replace(a, upload={k: v.reshape(v.shape + (1,) * 62) for k, v in a.upload.items()}),
}


@pytest.mark.long
@pytest.mark.parametrize("what", LIES)
def test_a_run_ends_with_the_result_of_a_run_without_the_liar(tmp_path: Path, what: str) -> None:
    found = []
    for lie in (LIES[what], None):
        folder = tmp_path / ("lie" if lie else "absent")
        with federation(folder, "fedavg", join=1.0, rounds=3) as f:
            if lie is None:
                del f.link.handlers[f"device-{BAD}"]
            else:
                f.link.spoil[f"device-{BAD}"] = lambda a, lie=lie: lie(a) if isinstance(a, TrainAnswer) else a  # type: ignore[misc]
            assert f.loop.run()
            assert all(e["failed"] == [BAD] for e in events(folder / "run"))
            found.append(codec.deep_copy(f.loop.server))
    assert codec.equal(*found)


@pytest.mark.long
def test_nobody_is_blamed_for_what_an_edge_has_merged(tmp_path: Path) -> None:
    def spoil(answer: Any) -> Any:
        if not isinstance(answer, EdgeAnswer):
            return answer
        return replace(
            answer,
            merged=tuple(replace(m, upload={k: v * 10**9 for k, v in m.upload.items()}) for m in answer.merged),
        )

    own = {"partition": "rotate(2)", "join": 1.0, "rounds": 5, "watch": False, "final_trained": False}
    with federation(tmp_path, "fedpc", 2, **own) as f:
        f.link.spoil["edge-0"] = spoil
        assert f.loop.run()
        assert f.runtime.quarantine.offenders == {}
    assert [e["failed"] for e in events(tmp_path / "run")] == [[]] + [[BAD]] * 5


@pytest.mark.long
@pytest.mark.parametrize("stays", [True, False])
def test_a_state_of_an_edge_that_cannot_be_used_does_not_end_the_run_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stays: bool
) -> None:
    """It is found when it comes, not when clients are evaluated rounds later."""
    cls = find("fedcpmd")
    switch = cls.switch  # type: ignore[attr-defined]
    layers = {0: 0, 1: 0, 2: 1, 3: 1}  # two clusters of two clients, whatever they voted for
    monkeypatch.setattr(cls, "switch", lambda self, server: replace(switch(self, server), layer=layers))
    lied = []
    with federation(tmp_path, "fedcpmd", 2, join=1.0, rounds=6, eval_every=6) as f:

        def spoil(answer: Any) -> Any:
            if lied or not isinstance(answer, EdgeAnswer) or not answer.merged:
                return answer
            lied.append(answer)
            if not stays:
                del f.link.handlers["edge-0"]
            return replace(answer, merged=tuple(replace(m, state=dict.fromkeys(m.state, 5)) for m in answer.merged))

        f.link.spoil["edge-0"] = spoil
        assert f.loop.run()
    found = [e["failed"] for e in events(tmp_path / "run")]
    first = found.index([0, 1])
    assert lied and found[first + 1 :] == [[] if stays else [0, 1]] * (len(found) - first - 1)


@pytest.mark.long
def test_a_liar_behind_an_edge_that_merges_is_put_in_quarantine(tmp_path: Path) -> None:
    own = {"partition": "rotate(2)", "join": 1.0, "rounds": 5, "watch": False, "final_trained": False}
    with federation(tmp_path, "fedpc", 2, **own) as f:
        f.device_link(BAD).spoil[f"device-{BAD}"] = lambda a: replace(a, loss=HUGE) if isinstance(a, TrainAnswer) else a
        assert f.loop.run()
        assert list(f.runtime.quarantine.out) == [f"edge-0/device-{BAD}"]


def test_a_merged_upload_that_is_too_large_costs_its_edge_the_round_and_no_other(tmp_path: Path) -> None:
    """With two edges, from the first round on; afterwards the server's state is that of a run without the liar."""
    own = {
        "join": 1.0,
        "rounds": 4,
        "eval_every": 4,
        "watch": False,
        "final_trained": False,
        "settings": {"n_edges": 2},
    }
    roles = {
        "edge-0": NodeRole.of("edge", ["device-0", "device-2"]),
        "edge-1": NodeRole.of("edge", ["device-1", "device-3"]),
    }

    def huge(answer: Any) -> Any:
        if not isinstance(answer, EdgeAnswer):
            return answer
        spoiled = ({k: v + 1e6 if v.is_floating_point() else v for k, v in m.upload.items()} for m in answer.merged)
        return replace(answer, merged=tuple(replace(m, upload=u) for m, u in zip(answer.merged, spoiled, strict=True)))

    with federation(tmp_path, "ecs-fl", 2, **own) as f:
        north, south = f.links["edge-0"], f.links["edge-1"]
        north.handlers["device-2"] = south.handlers.pop("device-2")
        south.handlers["device-1"] = north.handlers.pop("device-1")
        f.runtime.membership.roles = lambda: roles
        f.link.spoil["edge-0"] = huge
        assert f.loop.run()
        assert f.runtime.quarantine.out == {}
        largest = max(float(v.abs().max()) for v in codec.tensors_of(f.loop.server) if v.is_floating_point())
        assert largest < 100
    found = events(tmp_path / "run")
    assert [e["failed"] for e in found if e["round"]] == [[0, 2]] * 4
    assert all("edge-0: edge 0: the upload is" in why for e in found for why in e["reasons"].values())
    assert "as what was sent" in found[-4]["reasons"]["0"] and "as usual" in found[-1]["reasons"]["0"]

"""The ServerApp and the ClientApp with a Grid in this process: the real messages of Flower, without its processes."""

import json
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from uuid import uuid4

import pytest

from coterie.errors import CoterieError
from coterie.federation.policy.audit import read_audit_log
from coterie.federation.replay import replay_differences
from coterie.federation.transport import Cause
from support.in_process_link import NET

pytest.importorskip("flwr", reason="needs Flower: pip install 'coterie[flower]'")
from flwr.app import ConfigRecord, Context, Error, Message, RecordDict

from coterie.flower import client_app, link, server_app
from coterie.flower.link import FlowerLink, NodeNames
from coterie.flower.records import make_records

SMALL: dict[str, Any] = {
    "data": "digits", "subset": 300, "model": NET, "rounds": 3, "join": 1.0, "epochs": 1, "batch": 16, "lr": 0.1,
    "eval_every": 1, "clients": 4, "partition": "dirichlet(0.5)", "seed": 3,
}  # fmt: skip
ALLOW = f'models = ["{NET}"]\n'


@dataclass
class LocalGrid:
    """A Grid whose nodes answer at once, in this process."""

    run_config: dict[str, Any]
    nodes: dict[int, dict[str, Any]]  # node configuration by node id
    mute: set[int] = field(default_factory=set)  # nodes that take messages and never answer
    replies: dict[str, Any] = field(default_factory=dict)
    pushed: list[tuple[int, str]] = field(default_factory=list)  # node id and message type

    def get_node_ids(self) -> Iterable[int]:
        return list(self.nodes)

    def push_messages(self, messages: Iterable[Any]) -> Iterable[str]:
        ids = []
        for message in messages:
            node = message.metadata.dst_node_id
            message.metadata.__dict__["_message_id"] = str(uuid4())
            self.pushed.append((node, message.metadata.message_type))
            ids.append(message.metadata.message_id)
            if node not in self.mute:
                context = Context(1, node, self.nodes[node], RecordDict(), self.run_config)
                self.replies[message.metadata.message_id] = client_app.client_app(message, context)
        return ids

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Any]:
        return [self.replies.pop(i) for i in message_ids if i in self.replies]


@pytest.fixture(autouse=True)
def one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make no pauses, and set the identity that Flower gives to each of its processes."""
    monkeypatch.setattr(link, "_LOOK_SECONDS", 0.0)
    for name in ("_task_id", "_run_id", "_node_id"):
        monkeypatch.setattr(f"flwr.supercore.task_identity.TaskIdentity.{name}", 1)


def node_config(folder: Path, i: int) -> dict[str, Any]:
    allow = folder / "allow.toml"
    allow.write_text(ALLOW)
    state = folder / "states" / str(i)
    return {"coterie-state": str(state), "coterie-client": i, "coterie-name": f"ward-{i}", "coterie-allow": str(allow)}


def make_grid(folder: Path, method: str, **more: Any) -> LocalGrid:
    config = {**SMALL, "method": method, "cloud.out": str(folder / "run"), "cloud.min-clients": 4, **more}
    return LocalGrid(config, {10**18 + i: node_config(folder, i) for i in range(4)})


def serve(grid: LocalGrid) -> None:
    server_app.server_app(grid, SimpleNamespace(run_config=grid.run_config))  # type: ignore[arg-type]


# ---- rounds ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("method", ["fedrep", "fedpc"])
def test_a_run_through_flower_gives_the_bits_of_a_simulation(tmp_path: Path, method: str) -> None:
    grid = make_grid(tmp_path, method)
    serve(grid)
    states = {i: tmp_path / "states" / str(i) for i in range(4)}
    assert replay_differences(tmp_path / "run", tmp_path / "again", states) == []
    assert {kind for _, kind in grid.pushed} == {"query", "train", "evaluate"}
    run = json.loads((tmp_path / "run" / "cloud.json").read_text())["run"]
    assert (states[0] / run / "model.safetensors").is_file()
    lines = read_audit_log(states[0] / "audit.jsonl")
    assert not lines.damage and {line["message"] for line in lines.lines} == {"hello", "train", "score", "over"}


def test_flwr_run_in_the_same_folder_continues_the_run(tmp_path: Path) -> None:
    grid = make_grid(tmp_path, "fedrep")

    def stop_in_round_2(messages: Iterable[Any]) -> Iterable[str]:
        if sum(kind == "train" for _, kind in grid.pushed) > 5:
            raise KeyboardInterrupt
        return LocalGrid.push_messages(grid, messages)

    grid.push_messages = stop_in_round_2  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        serve(grid)
    assert len((tmp_path / "run" / "events.jsonl").read_text().splitlines()) == 1
    again = LocalGrid(grid.run_config, {77 + i: config for i, config in enumerate(grid.nodes.values())})  # new ids
    serve(again)
    states = {i: tmp_path / "states" / str(i) for i in range(4)}
    assert replay_differences(tmp_path / "run", tmp_path / "again", states) == []


def test_a_node_of_a_simulation_is_the_client_of_its_partition(tmp_path: Path) -> None:
    config = {"cloud.out": str(tmp_path), "data": "digits"}
    node = client_app.node_settings({"partition-id": 2, "num-partitions": 4}, config)
    assert node == {"state": str(tmp_path / "nodes" / "2"), "client": 2, "name": "client-2", "data": "digits"}


# ---- nodes -----------------------------------------------------------------------------------------------------------
def greet(grid: Any, folder: Path) -> FlowerLink:
    made = FlowerLink(grid, NodeNames(folder / "nodes.json"))
    made.nodes()  # asks for the names
    return made


def test_a_node_that_returns_under_a_new_id_gets_its_request_again(tmp_path: Path) -> None:
    grid = make_grid(tmp_path, "fedrep")
    flower = greet(grid, tmp_path)
    assert flower.nodes() == ["ward-0", "ward-1", "ward-2", "ward-3"]
    first = 10**18
    grid.mute = {first}
    exchange = flower.begin({"ward-0": b"plan"}, "hello", 0, 600)
    assert not any(exchange.poll()) and exchange.waiting == {"ward-0"}
    grid.nodes[5] = grid.nodes[first]  # it was started again, and the SuperLink has not noticed that the first is gone
    deadline = time.monotonic() + 20
    while exchange.waiting and time.monotonic() < deadline:
        replies = exchange.poll()
    assert flower.ids["ward-0"] == 5 and replies.errors["ward-0"].cause is Cause.DECLINED  # "plan" is no plan
    assert grid.pushed[-1] == (5, "query")


def test_a_name_belongs_to_the_secret_that_came_first(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    grid = make_grid(tmp_path, "fedrep")
    flower = greet(grid, tmp_path)
    assert len(flower.nodes()) == 4
    thief = {**grid.nodes[10**18], "coterie-state": str(tmp_path / "elsewhere")}
    grid.nodes = {66: thief}
    flower.nodes()
    assert flower.nodes() == [] and flower.ids["ward-0"] == 10**18
    assert 'the name "ward-0" belongs to a node with a different state folder' in caplog.text
    assert greet(grid, tmp_path).nodes() == []  # also after a new start of the ServerApp


def test_a_node_that_is_away_for_long_is_absent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    grid = make_grid(tmp_path, "fedrep")
    flower = greet(grid, tmp_path)
    flower.nodes()
    exchange, grid.nodes = flower.begin({"ward-0": b"", "ward-9": b""}, "hello", 0, 600), {}
    grid.replies.clear()
    assert set(exchange.poll().errors) == {"ward-9"}  # it was never there
    monkeypatch.setattr(link, "_RETURN_SECONDS", 0.0)
    assert exchange.poll().errors["ward-0"].cause is Cause.ABSENT


# ---- answers ---------------------------------------------------------------------------------------------------------
HEAD = {"kind": "train", "round": 1}


@pytest.mark.parametrize(
    ("content", "cause", "reason"),
    [
        (RecordDict(), Cause.WRONG, "not one of Coterie's"),
        (RecordDict({"coterie": ConfigRecord({"kind": "train"})}), Cause.WRONG, "not one of Coterie's"),
        (make_records({**HEAD, "round": 2}, answer=b"x"), Cause.WRONG, "not an answer to train of round 1"),
        (make_records(HEAD), Cause.WRONG, "not an answer to train of round 1"),
        (make_records(HEAD, answer=b"x" * 9), Cause.WRONG, "payload of 9 bytes is larger than the 8 allowed"),
        (make_records({"error": "no\nsuch", "no_plan": False}), Cause.DECLINED, "ward-0: no such"),
        (make_records({"error": "none", "no_plan": True}), Cause.NO_PLAN, "none"),
        (Error(2, "a crash"), Cause.DECLINED, "Flower reports error 2: a crash"),
        (Error(4, "expired"), Cause.LATE, "Flower reports error 4: expired"),
    ],
)
def test_an_answer_that_is_none_is_a_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: Any, cause: Cause, reason: str
) -> None:
    grid = make_grid(tmp_path, "fedrep")
    flower = greet(grid, tmp_path)
    flower.nodes()
    monkeypatch.setattr(client_app.client_app, "_registered_funcs", {"train.default": lambda m, c: reply(m, content)})
    replies = flower.send({"ward-0": b"x"}, "train", 1, 60, None, largest=8)
    failure = replies.errors["ward-0"]
    assert failure.cause is cause and reason in failure.why and not replies.answers


def reply(message: Any, content: Any) -> Any:
    return Message(content, reply_to=message)


# ---- the configuration of a node -------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("config", "sentence"),
    [
        ({}, "must name a folder for the private state: --node-config 'coterie-state="),
        ({"coterie-state": "s"}, "must name the data of this node: --node-config 'coterie-data="),
        ({"coterie-alow": "a"}, 'configuration "coterie-alow"; did you mean "coterie-allow"'),
    ],
)
def test_a_mistake_in_the_configuration_of_a_node_gets_one_sentence(config: dict[str, Any], sentence: str) -> None:
    with pytest.raises(CoterieError, match=sentence):
        client_app.node_settings(config, {"data": "digits"})


def test_the_policy_of_a_node_holds(tmp_path: Path) -> None:
    grid = make_grid(tmp_path, "fedrep")
    (tmp_path / "strict.toml").write_text(f'methods = ["fedavg"]\n{ALLOW}')
    grid.nodes[10**18]["coterie-allow"] = str(tmp_path / "strict.toml")
    grid.run_config |= {"cloud.min-clients": 3, "rounds": 1}
    serve(grid)
    lines = read_audit_log(tmp_path / "states" / "0" / "audit.jsonl").lines
    assert any('"fedrep"' in line.get("refused", "") for line in lines)
    assert all(line["message"] == "hello" for line in lines)
    event = json.loads((tmp_path / "run" / "events.jsonl").read_text().splitlines()[0])
    assert event["failed"] == [0]

"""Who may be what, and who is which client: decided by the operator's list, never by what a node claims."""

from pathlib import Path
from typing import Any

import pytest

from coterie.core.tasks import MOST_SAMPLES
from coterie.errors import CoterieError
from coterie.federation.identity import admin as nodes
from coterie.federation.identity import authority as certs
from coterie.federation.identity.roles import NodeRole, reserved_seats, scoped
from coterie.federation.identity.seats import MAX_NEWCOMERS, Roster, read_attached, read_hello
from coterie.federation.protocol.messages import Attached, Hello

HELLO = Hello(None, 10)
EDGE = NodeRole.of("edge", ["alice", "ward-*"])


# ---- roles -------------------------------------------------------------------------------------------------------
def test_a_node_without_a_word_is_a_device(tmp_path: Path) -> None:
    assert NodeRole.read(tmp_path / "none.json") == NodeRole("device")


def test_what_is_written_is_read(tmp_path: Path) -> None:
    (tmp_path / "e.json").write_text(EDGE.text())
    assert NodeRole.read(tmp_path / "e.json") == EDGE


@pytest.mark.parametrize(
    "text",
    [
        "", "[]", "{}", '{"role": "edge", "devices": []}', '{"role": "king", "devices": []}', '{"role": ["edge"]}',
        '{"role": "device", "devices": ["a"]}', '{"role": "edge", "devices": [1]}', '{"role": "edge", "devices": 5}',
        '{"role": "edge", "devices": ["../a"]}',
    ],
)  # fmt: skip
def test_a_damaged_role_is_a_sentence_and_no_role(tmp_path: Path, text: str) -> None:
    (tmp_path / "e.json").write_text(text)
    with pytest.raises(CoterieError, match="does not contain the role of a node"):
        NodeRole.read(tmp_path / "e.json")


def test_an_edge_speaks_for_the_names_and_patterns_it_was_given() -> None:
    assert [EDGE.speaks_for(n) for n in ("alice", "ward-", "ward-7")] == [True] * 3
    assert [EDGE.speaks_for(n) for n in ("bob", "Alice", "alice2", "a/ward-7", "", "ward")] == [False] * 6
    assert not NodeRole().speaks_for("alice")


# ---- hello -------------------------------------------------------------------------------------------------------
def test_a_hello_is_read() -> None:
    assert read_hello(HELLO) == HELLO
    assert read_hello(Hello(4, 10)) == Hello(4, 10)


@pytest.mark.parametrize(
    ("hello", "reason"),
    [
        (Hello(None, MOST_SAMPLES + 1), "samples"), (Hello(None, -1), "samples"), (Hello(-1, 1), "client"),
        (Hello(2**31, 1), "client"), (Hello(None, True), "impossible value"), (Hello("0", 1), "impossible value"),
        (Hello(None, 1.0), "impossible value"), (Attached({}, {}), "registered as a device and answers like an edge"),
    ],
)  # fmt: skip
def test_a_hello_with_absurd_values_is_refused(hello: Any, reason: str) -> None:
    with pytest.raises(CoterieError, match=reason):
        read_hello(hello)


@pytest.mark.parametrize("value", [None, [], "hello", {"client": None, "samples": 1}])
def test_what_is_no_hello_is_refused(value: Any) -> None:
    with pytest.raises(CoterieError, match="expected a Hello"):
        read_hello(value)


# ---- behind an edge ----------------------------------------------------------------------------------------------
def test_devices_behind_an_edge_have_its_name_before_theirs() -> None:
    found = read_attached("north", EDGE, Attached({"alice": HELLO, "ward-1": HELLO}, {}))
    assert set(found.hellos) == {"north/alice", "north/ward-1"} and found.refused == {}


def test_an_edge_cannot_speak_for_others() -> None:
    answer = Attached({"alice": HELLO, "bob": HELLO, "north/alice": HELLO}, {"carol": "no", "x" * 99: ""})
    found = read_attached("north", EDGE, answer)
    assert set(found.hellos) == {"north/alice"}
    assert found.refused["north/bob"] == 'edge "north" may not speak for device "bob"'
    assert found.refused["north/carol"] == 'edge "north" may not speak for device "carol"'
    assert all(name.startswith("north/") and len(name) < 80 for name in found.refused)


def test_an_edge_reports_refusals_of_its_own_devices_and_wrong_hellos_are_refused_one_by_one() -> None:
    answer = Attached({"alice": HELLO, "ward-1": Hello(None, MOST_SAMPLES + 1)}, {"ward-2": "no\n" + 999 * "data "})
    found = read_attached("north", EDGE, answer)
    assert set(found.hellos) == {"north/alice"}
    assert "samples 1000000001" in found.refused["north/ward-1"]
    assert found.refused["north/ward-2"].startswith("no data") and len(found.refused["north/ward-2"]) <= 300


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (None, "expected an? Attached"), (HELLO, "answers like a device"), (Attached([], {}), "impossible value"),
        (Attached({1: HELLO}, {}), "impossible value"), (Attached({"alice": {}}, {}), "impossible value"),
    ],
)  # fmt: skip
def test_an_edge_that_does_not_answer_like_one_is_refused(answer: Any, reason: str) -> None:
    with pytest.raises(CoterieError, match=reason):
        read_attached("north", EDGE, answer)


def test_a_device_cannot_answer_for_devices() -> None:
    with pytest.raises(CoterieError, match="not registered as an edge"):
        read_attached("mallory", NodeRole(), Attached({"alice": HELLO}, {}))


# ---- places ------------------------------------------------------------------------------------------------------
def test_places_are_given_once_and_kept(tmp_path: Path) -> None:
    roster = Roster(tmp_path / "roster.json", 2)
    hello = Hello(None, 10)
    assert [roster.admit(n, hello).client for n in ("b", "a", "c", "b")] == [0, 1, 2, 0]
    assert roster.newcomers == [2]
    again = Roster(tmp_path / "roster.json", 2)
    assert [again.admit(n, hello).client for n in ("c", "d", "a")] == [2, 3, 1]
    with pytest.raises(CoterieError, match="seat 1 already belongs to a"):
        again.admit("e", Hello(1, 10))
    with pytest.raises(CoterieError, match="is client 2 of this run and now asks to be client 5"):
        again.admit("c", Hello(5, 10))


def test_devices_of_one_name_behind_two_edges_are_two_clients(tmp_path: Path) -> None:
    roster = Roster(tmp_path / "roster.json", 3)
    names = [scoped("north", "site"), scoped("south", "site"), "site"]
    entries = [roster.admit(n, Hello(None, 1)) for n in names]
    assert [e.client for e in entries] == [0, 1, 2]
    assert [(e.via, e.device, e.edge) for e in entries] == [
        ("north", "site", "north"), ("south", "site", "south"), ("site", "site", None),
    ]  # fmt: skip


def test_a_place_that_was_asked_for_is_not_given_to_another(tmp_path: Path) -> None:
    roster = Roster(tmp_path / "roster.json", 3)
    assert roster.admit("b", Hello(0, 1)).client == 0
    assert roster.admit("a", Hello(None, 1)).client == 1
    with pytest.raises(CoterieError, match="beyond the 3 seats"):
        roster.admit("c", Hello(3 + MAX_NEWCOMERS, 1))
    assert roster.admit("c", Hello(None, 1)).client == 2


def test_a_reserved_seat_is_for_its_device_alone_whoever_comes_first(tmp_path: Path) -> None:
    roster, reserved = Roster(tmp_path / "roster.json", 3), {"alice": 0, "north/site": 2}
    with pytest.raises(CoterieError, match="seat 0 already belongs to alice"):
        roster.admit("eve", Hello(0, 1), reserved=reserved)
    assert roster.admit("eve", Hello(None, 1), reserved=reserved).client == 1
    assert roster.admit("bob", Hello(None, 1), reserved=reserved).client == 3  # a newcomer
    with pytest.raises(CoterieError, match="seat 0 is reserved for it and it asks to be client 5"):
        roster.admit("alice", Hello(5, 1), reserved=reserved)
    assert roster.admit("alice", Hello(0, 1), reserved=reserved).client == 0
    assert roster.admit("north/site", Hello(None, 1), reserved=reserved).client == 2
    assert roster.admit("alice", Hello(None, 1), reserved={"alice": 7}).client == 0  # a seat that was given stays


def test_seats_are_reserved_in_the_registry(tmp_path: Path) -> None:
    root = certs.init(tmp_path / "c", []).root
    certs.add_node(root, "alice")
    certs.add_node(root, "bob")
    certs.add_node(root, "north", role="edge", devices=["site"])
    nodes.reserve_seat(root, "alice", 4)
    nodes.reserve_seat(root, "north/site", 1)
    nodes.suspend(root, "alice")
    assert reserved_seats(certs.Certs(root).roles()) == {"alice": 4, "north/site": 1}
    for name, client, reason in (
        ("bob", 4, 'client 4 is reserved for "alice"'), ("north", 0, "is not a device"),
        ("north/other", 0, "is not a device"), ("alice/x", 0, "is not a device"),
    ):  # fmt: skip
        with pytest.raises(CoterieError, match=reason):
            nodes.reserve_seat(root, name, client)

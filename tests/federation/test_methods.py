"""Every method federates: the events of the simulation, byte for byte, through the real handlers and their checks."""

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("grpc", reason="a federation needs the extra federation")

from coterie.core.edges import EdgeMethod
from coterie.engine import codec
from coterie.methods import find, known
from support.in_process_link import federation, simulated

OWN: dict[str, dict[str, Any]] = {}  # settings that the small task needs


def full(name: str) -> dict[str, Any]:
    return {"join": 1.0} if "full" in find(name).needs else {}


@pytest.mark.parametrize("name", known())
def test_a_method_has_the_events_of_the_simulation(tmp_path: Path, name: str) -> None:
    with federation(tmp_path, name, **full(name), **OWN.get(name, {})) as f:
        assert f.loop.run()
        ours = simulated(tmp_path / "simulation", f.session)
        assert f.runtime.liveness.errors == []
    assert (tmp_path / "run/events.jsonl").read_text() == (tmp_path / "simulation/events.jsonl").read_text()
    assert codec.equal([f.loop.server, f.loop.edges, f.loop.bytes], [ours.server, ours.edges, ours.bytes])


@pytest.mark.parametrize("name", [n for n in known() if issubclass(find(n), EdgeMethod)])
@pytest.mark.parametrize("edges", [1, 2])
def test_physical_edges_change_no_event(tmp_path: Path, name: str, edges: int) -> None:
    with federation(tmp_path, name, edges, **full(name), **OWN.get(name, {})) as f:
        assert f.loop.run()
        ours = simulated(tmp_path / "simulation", f.session)
        assert f.runtime.liveness.errors == []
    assert (tmp_path / "run/events.jsonl").read_text() == (tmp_path / "simulation/events.jsonl").read_text()
    assert codec.equal([f.loop.server, f.loop.edges, f.loop.bytes], [ours.server, ours.edges, ours.bytes])


# ---- the ledger and the wire -------------------------------------------------------------------------------------
@pytest.mark.parametrize(("name", "edges"), [("fedavg", 0), ("fedcac", 0), ("cd2-pfed", 0), ("fedpc", 2)])
def test_the_wire_carries_what_the_ledger_counts_and_a_small_header(tmp_path: Path, name: str, edges: int) -> None:
    """Booleans too: FedCAC sends masks. On the links of devices, where every message has one payload."""
    quiet = {"watch": False, "final_trained": False, "eval_every": 100, "rounds": 3, "join": 1.0}
    with federation(tmp_path, name, edges, **quiet) as f:
        f.loop.start()
        seen = 0
        while f.loop.done < 2:  # after the last round everybody is scored, which the ledger does not count
            before = f.loop.bytes
            f.loop.step()
            links = list(f.links.values()) if edges else [f.link]
            jobs = [x for each in links for x in each.sizes if x[0] == "train" and x[2] == f.loop.done]
            assert len(jobs) == 4
            for way in ("down", "up"):
                wire = sum(x[3].payload_down if way == "down" else x[3].payload_up for x in jobs)
                counted = _sum(f.loop.bytes, way) - _sum(before, way)
                entries = len(f.session.method.schema("down" if way == "down" else "up").entries)
                assert 0 <= wire - counted <= 4 * (4096 + 64 * entries), (f.loop.done, way, wire, counted)
                seen += counted
        assert seen > 0


def _sum(page: Any, way: str) -> int:
    """Of the links of devices; who has no edge in the method talks to the cloud, also through a physical edge."""
    return sum(sum(page.get(link, {}).get(way, {}).values()) for link in ("device-edge", "device-cloud"))


def test_what_all_devices_get_crosses_once(tmp_path: Path) -> None:
    with federation(tmp_path, "fedavg", join=1.0, rounds=1, watch=False, eval_every=9, final_trained=False) as f:
        sent: list[tuple[int, int]] = []
        send = f.link.send

        def spy(payloads: Any, kind: str, round: int, deadline: float, shared: Any = None, largest: int = 0) -> Any:
            sent.extend((len(own), len(shared)) for own in payloads.values() if kind == "train")
            return send(payloads, kind, round, deadline, shared, largest)

        f.link.send = spy  # type: ignore[method-assign]
        assert f.loop.run()
        model = f.session.method.schema("down").nbytes()
    assert len(sent) == 4 and all(own < 2048 and shared > model for own, shared in sent)


def test_a_device_that_is_gone_is_missed_by_name_and_goes_on_with_its_state(tmp_path: Path) -> None:
    with federation(tmp_path, "fedrep", join=1.0, rounds=4, eval_every=9) as f:
        f.loop.start()
        f.loop.step()
        handler = f.link.handlers.pop("device-1")
        f.runtime.membership._last_seen.clear()  # it left long ago
        f.loop.step()
        f.link.handlers["device-1"] = handler
        f.loop.step()
        assert f.runtime.versions.rounds.tolist() == [3, 3, 3, 3]
        lines = (tmp_path / "run/events.jsonl").read_text().splitlines()
    assert [json.loads(x)["failed"] for x in lines] == [[], [1], []]
    assert json.loads(lines[1])["reasons"] == {"1": "device-1 is not connected"}

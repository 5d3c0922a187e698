"""Every method has the same events in a federation as in a simulation, through the real handlers and checks."""

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("grpc", reason="a federation needs the extra federation")

from coterie.core.edges import EdgeMethod
from coterie.engine import codec
from coterie.methods import find, method_names
from support.in_process_link import federation, simulated
from support.methods import PARAMETERS

OWN: dict[str, dict[str, Any]] = {}  # settings that the small task needs


def full(name: str) -> dict[str, Any]:
    return {"join": 1.0} if "full" in find(name).needs else {}


@pytest.mark.parametrize("name", PARAMETERS)
def test_a_method_has_the_events_of_the_simulation(tmp_path: Path, name: str) -> None:
    with federation(tmp_path, name, **full(name), **OWN.get(name, {})) as f:
        assert f.loop.run()
        simulation = simulated(tmp_path / "simulation", f.session)
        assert f.runtime.liveness.errors == []
    assert (tmp_path / "run/events.jsonl").read_text() == (tmp_path / "simulation/events.jsonl").read_text()
    assert codec.equal(
        [f.loop.server, f.loop.edges, f.loop.bytes], [simulation.server, simulation.edges, simulation.bytes]
    )


@pytest.mark.parametrize("name", [n for n in method_names() if issubclass(find(n), EdgeMethod)])
@pytest.mark.parametrize("edges", [1, 2])
def test_physical_edges_change_no_event(tmp_path: Path, name: str, edges: int) -> None:
    with federation(tmp_path, name, edges, **full(name), **OWN.get(name, {})) as f:
        assert f.loop.run()
        simulation = simulated(tmp_path / "simulation", f.session)
        assert f.runtime.liveness.errors == []
    assert (tmp_path / "run/events.jsonl").read_text() == (tmp_path / "simulation/events.jsonl").read_text()
    assert codec.equal(
        [f.loop.server, f.loop.edges, f.loop.bytes], [simulation.server, simulation.edges, simulation.bytes]
    )


# ---- the ledger and the wire -------------------------------------------------------------------------------------
@pytest.mark.parametrize(("name", "edges"), [("fedavg", 0), ("fedcac", 0), ("cd2-pfed", 0), ("fedpc", 2)])
def test_wire_bytes_are_the_declared_bytes_and_a_small_header(tmp_path: Path, name: str, edges: int) -> None:
    """Compared on the links of devices, where every message has one payload; FedCAC sends masks of booleans."""
    quiet = {"watch": False, "final_trained": False, "eval_every": 100, "rounds": 3, "join": 1.0}
    with federation(tmp_path, name, edges, **quiet) as f:
        f.loop.start()
        seen = 0
        while f.loop.done < 2:  # the last round also scores clients, which the ledger does not count
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
    """Sum the bytes of devices; the ledger counts clients without an edge of the method as linked to the cloud."""
    return sum(sum(page.get(link, {}).get(way, {}).values()) for link in ("device-edge", "device-cloud"))


def test_the_common_part_of_downloads_is_sent_once(tmp_path: Path) -> None:
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


def test_an_absent_device_is_named_and_returns_with_its_state(tmp_path: Path) -> None:
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

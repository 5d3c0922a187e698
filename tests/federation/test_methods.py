"""Every method has the same events in a federation as in a simulation, through the real handlers and checks."""

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("grpc", reason="a federation needs the extra federation")

from coterie.core.edges import EdgeMethod
from coterie.engine import codec
from coterie.federation.policy.audit import AUDIT_FILE
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
QUICK_WIRE = (("fedavg", 0), ("fedcac", 0), ("cd2-pfed", 0), ("fedpc", 2), ("ecs-fl-mended", 0))
WIRE = [
    *(pytest.param(name, edges, id=f"{name}-{edges}") for name, edges in QUICK_WIRE),
    *(
        pytest.param(name, 0, id=f"{name}-0", marks=pytest.mark.long)
        for name in method_names()
        if (name, 0) not in QUICK_WIRE
    ),
]


@pytest.mark.parametrize(("name", "edges"), WIRE)
def test_ledger_wire_and_audit_logs_agree(tmp_path: Path, name: str, edges: int) -> None:
    """Compare on the links of devices, in rounds in which clients are not scored.

    The wire has a small header on top. The audit logs of the devices have exactly the bytes of the ledger,
    and the numbers of samples, steps and loss.
    """
    quiet = {"watch": False, "final_trained": False, "eval_every": 100, "rounds": 3, "join": 1.0}
    with federation(tmp_path, name, edges, **quiet, **OWN.get(name, {})) as f:
        f.loop.start()
        while f.loop.done < 2:  # the last round also scores clients, which the ledger does not count
            before = f.loop.bytes
            f.loop.step()
            links = list(f.links.values()) if edges else [f.link]
            sizes = [x for link in links for x in link.sizes if x[1].startswith("device") and x[2] == f.loop.done]
            jobs = [x for x in sizes if x[0] in ("train", "send")]
            for way, said in (("down", "in"), ("up", "out")):
                wire = sum(x[3].payload_down if way == "down" else x[3].payload_up for x in jobs)
                counted = _sum(f.loop.bytes, way) - _sum(before, way)
                entries = len(f.session.method.schema("down" if way == "down" else "up").entries)
                assert 0 <= wire - counted <= len(jobs) * (4096 + 64 * entries), (f.loop.done, way, wire, counted)
                assert _audited(tmp_path, f.loop.done, said) == counted, (f.loop.done, way)


def _audited(folder: Path, round: int, way: str) -> int:
    """Return the bytes of payloads that the devices' audit logs name for the training of a round."""
    lines = [json.loads(x) for log in folder.glob(f"devices/*/{AUDIT_FILE}") for x in log.read_text().splitlines()]
    jobs = [x for x in lines if x["way"] == way and x["message"] in ("train", "send") and x["round"] == round]
    return sum(n for x in jobs for kind, n in x.get("sizes", {}).items() if kind != "numbers")


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

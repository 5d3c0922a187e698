"""Metrics for Prometheus, in its text format."""

from collections.abc import Iterable, Mapping
from typing import Any

TYPE = "text/plain; version=0.0.4; charset=utf-8"
STATES = ("running", "finished", "stopped", "damaged")


def _label(value: object) -> str:
    return str(value).replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def _line(name: str, labels: Mapping[str, object], value: float) -> str:
    inside = ",".join(f'{k}="{_label(v)}"' for k, v in labels.items())
    return f"{name}{{{inside}}} {float(value):.10g}" if inside else f"{name} {float(value):.10g}"


def prometheus_text(runs: Iterable[Mapping[str, Any]], federation: Mapping[str, Any] | None) -> str:
    """Return the metrics of runs and of a federation."""
    metrics: dict[str, tuple[str, str, list[str]]] = {}

    def add(name: str, kind: str, about: str, labels: Mapping[str, object], value: Any) -> None:
        if value is not None:
            metrics.setdefault(name, (kind, about, []))[2].append(_line(name, labels, float(value)))

    counts = dict.fromkeys(STATES, 0)
    for r in runs:
        labels = {"run": r["id"], "method": r.get("method", ""), "seed": r.get("seed", "")}
        counts[r["state"]] += 1
        add("coterie_run_running", "gauge", "1 while a process computes the run.", labels, r["state"] == "running")
        add("coterie_run_round", "gauge", "Last finished round.", labels, r["round"])
        add("coterie_run_rounds", "gauge", "Planned rounds.", labels, r["rounds"])
        if r.get("score") is not None:
            about = "Personal models, mean over clients, last evaluation; percentages as shares of 1."
            value = r["score"] / (100 if r["metric"]["percent"] else 1)
            add("coterie_run_score", "gauge", about, {**labels, "metric": r["metric"]["name"]}, value)
        add("coterie_run_bytes_total", "counter", "Bytes over all links, both ways.", labels, r.get("bytes"))
        add("coterie_run_failed_total", "counter", "Clients that failed, over all rounds.", labels, r.get("failed"))
        add("coterie_run_nonfinite_total", "counter", "Uploads that were not finite.", labels, r.get("nonfinite"))
        add("coterie_run_round_seconds", "gauge", "Median time of recent rounds.", labels, r.get("seconds"))
        add("coterie_run_left_seconds", "gauge", "Estimated time to the end.", labels, r.get("left"))
    for state, n in counts.items():
        add("coterie_runs", "gauge", "Runs by state.", {"state": state}, n)
    if federation is not None and "state" in federation:
        f = federation
        add(
            "coterie_federation_up",
            "gauge",
            "1 while the cloud writes heartbeats.",
            {},
            f["state"] in ("waiting", "running"),
        )
        add("coterie_federation_heartbeat_seconds", "gauge", "Unix time of the last heartbeat.", {}, f["heartbeat"])
        add("coterie_federation_round", "gauge", "Last finished round.", {}, f["round"])
        add("coterie_federation_rounds", "gauge", "Planned rounds.", {}, f["rounds"])
        add("coterie_federation_online", "gauge", "Devices that are connected.", {}, f["online"])
        add("coterie_federation_places", "gauge", "Seats in the federation.", {}, f["places"])
        add("coterie_federation_waiting_for", "gauge", "Nodes the cloud waits for.", {}, len(f["waiting_for"]))
        for n in [*f["edges"], *(d for e in f["edges"] for d in e["devices"]), *f["devices"]]:
            labels = {"node": n["name"], "role": n["role"]}
            add("coterie_node_online", "gauge", "1 while the node is connected.", labels, n["online"])
            add(
                "coterie_node_last_seen_seconds",
                "gauge",
                "Unix time when the node was last seen.",
                labels,
                n["last_seen"],
            )
            add(
                "coterie_node_refused_uploads_total",
                "counter",
                "Uploads of the node that were refused.",
                labels,
                n["refusals"],
            )
        for link, ways in f["wire"].items():
            for way, part in ways.items():
                about = "Bytes on the wire, framing included."
                add(
                    "coterie_federation_wire_bytes_total",
                    "counter",
                    about,
                    {"link": link, "direction": way},
                    sum(part.values()),
                )
    lines = []
    for name, (kind, about, values) in metrics.items():
        lines += [f"# HELP {name} {about}", f"# TYPE {name} {kind}", *values]
    return "\n".join(lines) + "\n"

"""A finished or unfinished run, read back from its folder as data frames, curves and models."""

import json
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pandas as pd
from torch import nn

from coterie.errors import CoterieError
from coterie.runs.statistics import summarise
from coterie.session import Session, rebuild, stored


class Run:
    """Reads what is there; never writes. `session` is given for a run made here with objects of its own."""

    group = ""  # runs of one group have the same clients and can be compared
    base = ""  # the name without what tells it from other runs of the same method
    apart: Mapping[str, Any] = MappingProxyType({})  # what tells it

    def __init__(self, path: str | Path, session: Session | None = None, title: str = ""):
        self.path = Path(path)
        self.description = stored(self.path)
        if missing := {"settings", "method", "partition", "versions"} - set(self.description):
            raise CoterieError(
                f"{self.path} was written by another version of Coterie ({', '.join(sorted(missing))} is missing)"
            )
        self._session, self._title = session, title

    def __repr__(self) -> str:
        return f"Run({str(self.path)!r}, {self.title}, round {self.last_round} of {self.settings['rounds']})"

    @property
    def settings(self) -> dict[str, Any]:
        found: dict[str, Any] = self.description["settings"]
        return found

    @property
    def title(self) -> str:
        """What a table calls it: the method, or a name given to tell it from other runs of the same method."""
        return self._title or str(self.description["method"]["title"])

    @cached_property
    def events(self) -> list[dict[str, Any]]:
        """One dictionary per finished round; a line that a crash cut short is left out."""
        out = []
        path = self.path / "events.jsonl"
        for line in path.read_text().splitlines() if path.exists() else []:
            try:
                out.append(json.loads(line))
            except json.JSONDecodeError:
                break
        return out

    @property
    def last_round(self) -> int:
        return int(self.events[-1]["round"]) if self.events else 0

    @property
    def finished(self) -> bool:
        return self.last_round >= int(self.settings["rounds"])

    @cached_property
    def rounds(self) -> pd.DataFrame:
        """One row per round: loss, bytes, seconds, participants' accuracy before and after, evaluated statistics."""
        rows = []
        for e in self.events:
            row = {"round": e["round"], "loss": e["loss"], "participants": len(e["participants"])}
            row |= {"failed": len(e["failed"]), "nonfinite": len(e["nonfinite"])}
            for link, directions in e["bytes"].items():
                for direction, parts in directions.items():
                    row[f"bytes/{link}/{direction}"] = sum(parts.values())
            for when, stats in e["watch"].items():
                row |= {f"participants/{when}/{k}": stats[k] for k in ("pooled", "mean")}
            for view, stats in e["eval"].items():
                row |= {f"{view}/{k}": v for k, v in stats.items()}
            row |= {f"note/{k}": v for k, v in e["notes"].items()}
            rows.append(row)
        frame = pd.DataFrame(rows).set_index("round") if rows else pd.DataFrame()
        times = self._timing()
        return frame.join(times) if len(times) and len(frame) else frame

    def _timing(self) -> pd.DataFrame:
        path = self.path / "timing.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        rows = [json.loads(x) for x in lines if x.endswith("}")]
        return pd.DataFrame(rows).drop_duplicates("round", keep="last").set_index("round") if rows else pd.DataFrame()

    def curve(self, view: str = "personal", part: str = "test", statistic: str = "mean") -> pd.Series:
        """A statistic over the evaluated rounds, e.g. curve("global", statistic="pooled")."""
        name = f"{view}/{part}/{statistic}"
        if name not in self.rounds:
            raise CoterieError(f"{self.title} has no {name} in {self.path}")
        return self.rounds[name].dropna()

    def evaluation(self, round: int | None = None) -> dict[str, np.ndarray]:
        """Raw arrays of one evaluation (default: the last): hits and totals [clients, classes], losses [clients]."""
        files = sorted((self.path / "eval").glob("*.npz"))
        files = [f for f in files if int(f.stem) <= self.last_round]
        if round is not None:
            files = [f for f in files if int(f.stem) == round]
        if not files:
            raise CoterieError(f"{self.path} has no evaluation" + (f" of round {round}" if round is not None else ""))
        with np.load(files[-1], allow_pickle=False) as z:
            return {k: z[k] for k in z.files}

    def clients(self, round: int | None = None) -> pd.DataFrame:
        """One row per client: test samples and accuracy of every view."""
        z = self.evaluation(round)
        frame = pd.DataFrame({"client": z["clients"], "newcomer": z["newcomer"]}).set_index("client")
        for key in sorted(k.removesuffix("/hits") for k in z if k.endswith("/hits")):
            n = z[f"{key}/total"].sum(1)
            if key.endswith("/test"):
                frame["samples"] = n
            frame[key] = np.where(n > 0, z[f"{key}/hits"].sum(1) / np.maximum(n, 1), np.nan)
        return frame

    def summary(self) -> dict[str, Any]:
        """The protocol's statistics (see statistics.py)."""
        return summarise(self.rounds, int(self.settings["rounds"]))

    # ---- models ------------------------------------------------------------------------------------------------------
    def session(self) -> Session:
        """The run's data, model and method, built again from its settings."""
        if self._session is None:
            self._session = rebuild(self.path)
        return self._session

    def personal(self, client: int) -> nn.Module:
        """The personal model of a client, ready to use (in evaluation mode)."""
        from coterie.runs.models import personal_module

        return personal_module(self, client)

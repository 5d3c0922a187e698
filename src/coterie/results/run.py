"""A finished or unfinished run, read back from its folder as data frames, curves and models."""

from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pandas as pd
from torch import nn

from coterie.core.tasks import Classification, Metric, Task, make
from coterie.engine.evaluation import ALONE, statistics
from coterie.engine.personal_models import SavedRun, refuse_devices
from coterie.engine.session import Objects, Session, rebuild
from coterie.errors import CoterieError
from coterie.export.newcomers import cloud_session, welcome
from coterie.export.personal_model import Predictions, Predictor, Welcome
from coterie.export.run_models import client_module, client_predictor, export_model
from coterie.methods import fields
from coterie.results.statistics import summarise
from coterie.storage import run_folder as folder

_NEEDED = ("settings", "method", "partition", "versions", "data", "subset", "federation", "rounds", "seed")


class Run:
    """A run's folder, read only. `objects` are the user's own objects that its settings refer to, if any."""

    group = ""  # runs of one group have the same clients and can be compared
    base = ""  # the name without what tells it from other runs of the same method
    apart: Mapping[str, Any] = MappingProxyType({})  # what tells it

    def __init__(
        self, path: str | Path, session: Session | None = None, title: str = "", objects: Objects | None = None
    ):
        self.path = Path(path)
        self.description = folder.read_settings(self.path)
        settings = self.description.get("settings") or {}
        if missing := [k for k in _NEEDED if k not in self.description and k not in settings]:
            raise CoterieError(f"{self.path} was written by another version of Coterie ({missing[0]} is missing)")
        self._session, self._title, self.objects = session, title, objects or Objects()

    def __repr__(self) -> str:
        return f"Run({str(self.path)!r}, {self.title}, round {self.last_round} of {self.settings['rounds']})"

    @property
    def settings(self) -> dict[str, Any]:
        found: dict[str, Any] = self.description["settings"]
        return found

    @property
    def client_names(self) -> list[str] | None:
        """By client number, if the data name their clients."""
        return self.description.get("client_names")

    @property
    def title(self) -> str:
        """What a table calls it: the method, or a name given to tell it from other runs of the same method."""
        return self._title or str(self.description["method"]["title"]) + (f" ({self.reading})" if self.reading else "")

    @property
    def headline(self) -> str:
        """The view that tables lead with."""
        return str(self.settings.get("headline", "personal"))

    @cached_property
    def reading(self) -> str:
        """The reading of the paper that was run, if it is not the method's default."""
        about = self.description["method"]
        if "reading" in about:
            return str(about["reading"])
        try:  # from before it was written down
            field = fields(self.settings["method"]).get("reading")
        except CoterieError:
            return ""
        used = str(about["settings"].get("reading", "paper"))
        return "" if field is None or used == field.default else used

    @cached_property
    def task(self) -> Task:
        """Runs from before there were tasks are classification."""
        found = self.description.get("task", {"name": Classification.name, "outputs": 1})
        return make(found["name"], found["outputs"])

    @property
    def metric(self) -> Metric:
        """What its numbers are: accuracy, RMSE, ..."""
        return self.task.metric

    @cached_property
    def events(self) -> list[dict[str, Any]]:
        """One dictionary per finished round. Damaged events raise CoterieError."""
        return folder.read_events(self.path)

    @cached_property
    def damage(self) -> list[str]:
        """A sentence for each damaged or missing evaluation. Damaged events raise an error."""
        return folder.evaluation_damage(self.path, self.events)

    @property
    def last_round(self) -> int:
        return int(self.events[-1]["round"]) if self.events else 0

    @property
    def finished(self) -> bool:
        return self.last_round >= int(self.settings["rounds"]) or bool(self.ended)

    @property
    def ended(self) -> str:
        """Why it ended before its last round; empty if it did not."""
        return str(self.events[-1].get("ended", "")) if self.events else ""

    @cached_property
    def rounds(self) -> pd.DataFrame:
        """One row per round: loss, bytes, seconds, participants' metric before and after, evaluated statistics."""
        rows = []
        for e in self.events:
            row: dict[str, Any] = {"round": e["round"], "loss": e["loss"], "participants": len(e["participants"])}
            row |= {"failed": len(e["failed"]), "nonfinite": len(e["nonfinite"])}
            for link, directions in e["bytes"].items():
                for direction, parts in directions.items():
                    row[f"bytes/{link}/{direction}"] = sum(parts.values())
            for when, stats in e["watch"].items():
                row |= {f"participants/{when}/{k}": stats[k] for k in ("pooled", "mean")}
            for view, stats in e["eval"].items():
                row |= {f"{view}/{k}": v for k, v in stats.items()}
            row |= {f"note/{k}": v for k, v in e["notes"].items()}
            rows.append({k: np.nan if v is None else v for k, v in row.items()})
        frame = pd.DataFrame(rows).set_index("round") if rows else pd.DataFrame()
        for name, value in self._clusters_of_old().items():
            frame.loc[frame.index[frame.index == self._evaluated["round"]], name] = value
        if seconds := {row["round"]: row["seconds"] for row in self._timing.rows}:
            frame["seconds"] = frame.index.map(seconds).astype(float)
        return frame

    @property
    def _evaluated(self) -> dict[str, Any]:
        """The event of the last evaluation; empty if there is none."""
        return next((e for e in reversed(self.events) if "evaluation" in e), {})

    def _clusters_of_old(self) -> dict[str, float]:
        """The mean over clusters of the last evaluation of a run that logged its clusters and not this mean."""
        event = self._evaluated
        of = next((m for k in ("layer", "clusters") if (m := _clients(event.get("facts", {}).get(k)))), {})
        if not of or any("clusters" in stats for stats in event["eval"].values()):
            return {}
        try:
            z = folder.read_evaluation(self.path, event)
        except CoterieError:  # a warning says so
            return {}
        names = {name: k for k, name in enumerate(dict.fromkeys(of.values()))}
        cluster = np.array([names[of[int(i)]] if int(i) in of else ALONE for i in z["clients"]])
        out: dict[str, float] = {}
        for key in (k.removesuffix("/hits") for k in z if k.endswith("/hits")):
            rows = ~z["newcomer"]
            hits, total, loss = (z[f"{key}/{part}"][rows] for part in ("hits", "total", "loss"))
            found = statistics(Classification(hits.shape[1]), {"hits": hits, "total": total}, loss, cluster[rows])
            out |= {f"{key}/{k}": v for k, v in found.items() if k.startswith("cluster")}
        return out

    @cached_property
    def _timing(self) -> folder.Log:
        return folder.read_timing(self.path / folder.TIMING)

    def warnings(self) -> list[str]:
        """Warnings that a reader of the numbers must know, one sentence each."""
        out = [f"{sentence}; {folder.how_to_mend(self.path)}" for sentence in self.damage]
        out += [f"{self._timing.damage}; seconds are incomplete"] if self._timing.damage else []
        found = self.summary().get("personal", {})
        if found.get("nonfinite"):
            name = f"{self.title}, seed {self.settings['seed']}"
            many = f"{found['nonfinite']} of {found['clients']} clients"
            out.append(f"{name}: training diverged, the personal models of {many} give NaN or infinity")
        if found.get("undefined"):
            many = f"{found['undefined']} of {found['clients']} clients"
            out.append(f"{self.title}: {self.metric.name} is not defined for {many}, which are left out of its mean")
        return out

    def curve(self, view: str = "personal", part: str = "test", statistic: str = "mean") -> pd.Series:
        """A statistic over the evaluated rounds, e.g. curve("global", statistic="pooled")."""
        name = f"{view}/{part}/{statistic}"
        if name not in self.rounds:
            raise CoterieError(f"{self.title} has no {name} in {self.path}")
        return self.rounds[name].dropna()

    def evaluation(self, round: int | None = None) -> dict[str, np.ndarray]:
        """Raw arrays of one evaluation (default: the last): counts of the task [clients, ...] (hits and total per
        class), losses [clients].
        """
        found = [e for e in self.events if "evaluation" in e and round in (None, e["round"])]
        if not found:
            raise CoterieError(f"{self.path} has no evaluation" + (f" of round {round}" if round is not None else ""))
        return folder.read_evaluation(self.path, found[-1])

    def clients(self, round: int | None = None) -> pd.DataFrame:
        """One row per client: its name if the data have names, test samples, and the task's metric of every view."""
        z = self.evaluation(round)
        frame = pd.DataFrame({"client": z["clients"], "newcomer": z["newcomer"]}).set_index("client")
        if self.client_names:
            frame.insert(0, "name", [self.client_names[i] for i in z["clients"]])
        for key in sorted(k.removesuffix("/loss") for k in z if k.endswith("/loss")):
            counts = {k.removeprefix(f"{key}/"): v for k, v in z.items() if k.startswith(f"{key}/")}
            if key.endswith("/test"):
                frame["samples"] = self.task.samples(counts)
            frame[key] = self.task.measured(counts)[self.metric.name]
        return frame

    def summary(self) -> dict[str, Any]:
        """The protocol's statistics (see statistics.py)."""
        return summarise(self.rounds, int(self.settings["rounds"]), self.task.metrics)

    # ---- models ------------------------------------------------------------------------------------------------------
    def session(self) -> Session:
        """The run's data, model and method, built again from its settings."""
        if self._session is None:
            self._session = rebuild(self.path, objects=self.objects)
        return self._session

    def saved(self) -> SavedRun:
        """Return the run as its newest checkpoint left it."""
        refuse_devices(self.path)  # before its data are loaded, which are on the devices too
        return SavedRun(self.path, self.session())

    def personal(self, client: int | str) -> nn.Module:
        """Return the personal model of a client, by number or by name, in evaluation mode."""
        return client_module(self.saved(), client)

    def predictor(self, client: int | str) -> Predictor:
        """Return the personal model of a client with the run's preprocessing, in evaluation mode."""
        return client_predictor(self.saved(), client)

    def predict(self, client: int | str, x: Any, y: Any = None) -> Predictions:
        """Return the predictions of a client's model for raw items; with targets `y`, the task's metrics too."""
        return self.predictor(client).predict(x, y)

    def export(self, client: int | str, path: str | Path) -> str:
        """Write the personal model of a client as a safetensors file; return code that loads the file."""
        return export_model(self.predictor(client), Path(path))

    def welcome(self, x: Any, y: Any = None, x_test: Any = None, y_test: Any = None, name: str = "stranger") -> Welcome:
        """Make a personal model for a newcomer from its own raw samples; labels are optional."""
        session = cloud_session(self.path) or self.session()
        return welcome(session, self.path, x, y, x_test, y_test, name)


def _clients(value: Any) -> dict[int, str]:
    """A map of clients to names, if it is one."""
    if not isinstance(value, Mapping) or not all(str(k).isdecimal() for k in value):
        return {}
    return {int(k): str(v) for k, v in value.items()}

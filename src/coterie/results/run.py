"""A run, finished or not, read from its folder as data frames, curves and models."""

from collections.abc import Mapping
from functools import cached_property
from html import escape
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pandas as pd
from torch import nn

from coterie.core.metrics import Metric
from coterie.core.tasks import Classification, Task, make
from coterie.engine.evaluation import ALONE, statistics
from coterie.engine.personal_models import SavedRun, refuse_devices
from coterie.engine.session import Objects, Session, rebuild
from coterie.errors import CoterieError
from coterie.export.newcomers import Welcome, cloud_session, welcome_newcomer
from coterie.export.personal_model import Predictions, Predictor
from coterie.export.run_models import client_module, client_predictor, export_model
from coterie.methods.stored import names_today
from coterie.results.statistics import summarise
from coterie.storage import run_folder as folder

_FINE_TUNING = ("fedavg-ft", "lp-ft", "per-fedavg", "per-fedavg-hf", "fedbabu")  # used adapted in version 0.1 too
_REJECTIONS = 3  # last rounds without an accepted agent (SC-FPFL) that are worth a warning
IN_USE = "in use"  # stands for the headline of each run where these differ
_NEEDED = ("settings", "method", "partition", "versions", "data", "subset", "federation", "rounds", "seed")


class Run:
    """A run's folder, which is only read. `objects` are Python objects of the user that its settings refer to."""

    group = ""  # name of the group; runs of one group have the same clients and can be compared
    base = ""  # title without the settings that differ from other runs of the same method
    apart: Mapping[str, Any] = MappingProxyType({})  # settings that differ from other runs of the same method

    def __init__(
        self, path: str | Path, session: Session | None = None, title: str = "", objects: Objects | None = None
    ):
        self.path = Path(path)
        self.description = folder.read_settings(self.path)
        settings = self.description.get("settings") or {}
        if missing := [k for k in _NEEDED if k not in self.description and k not in settings]:
            raise CoterieError(f"{self.path} was written by a different version of Coterie ({missing[0]} is missing)")
        self._session, self._title, self.objects = session, title, objects or Objects()

    def __repr__(self) -> str:
        return f"Run({str(self.path)!r}, {self.title}, round {self.last_round} of {self.settings['rounds']})"

    def _repr_html_(self) -> str:
        scored = {k: s for k, s in self.summary().items() if isinstance(s, dict) and "last" in s}
        shown = {"last": "last", "worst 10%": "worst10", "std": "std", "pooled": "pooled", "best": "best"}
        texts = [{k: self.metric.text(s[v]) for k, v in shown.items()} for s in scored.values()]
        table = pd.DataFrame(texts, index=pd.Index(list(scored), name="model")).to_html() if scored else ""
        notes = "".join(f"<li>{escape(sentence)}</li>" for sentence in self.warnings())
        where = f"{self.data}, {self.partition}, round {self.last_round} of {self.settings['rounds']}; {self.path}"
        head = f"<p><b>{escape(self.title)}</b>: {escape(where)}</p><p>{escape(self.metric.heading)}</p>"
        return head + table + (f"<ul>{notes}</ul>" if notes else "")

    @property
    def settings(self) -> dict[str, Any]:
        settings: dict[str, Any] = self.description["settings"]
        return settings

    @property
    def own_data(self) -> bool:
        """True if the devices of a federation had data of their own, which the cloud does not know."""
        return bool(self.description["partition"].get("partition") == "own")

    @property
    def data(self) -> str:
        """The name of the data set."""
        return "own data" if self.own_data else str(self.settings["data"])

    @property
    def partition(self) -> str:
        """The name of the partition."""
        return "by device" if self.own_data else str(self.settings["federation"]["partition"])

    @property
    def attack(self) -> str:
        """The attack of some clients, whose liars are not scored; empty without one."""
        return str(self.settings.get("attack") or "")

    @property
    def client_names(self) -> list[str] | None:
        """The clients' names by number, if the data have names."""
        return self.description.get("client_names")

    @property
    def title(self) -> str:
        """The name of the run in tables: the method, or a name that differs from other runs of the same method."""
        return self._title or str(self.description["method"]["title"]) + (f" ({self.reading})" if self.reading else "")

    @cached_property
    def headline(self) -> str:
        """The view in the first column of tables: the model that a client would use, or what the run asks for.

        Runs of version 0.1 recorded personal for all methods.
        """
        view = str(self.settings.get("headline", "personal"))
        old = str(self.description.get("versions", {}).get("coterie", "0.1")).startswith("0.1")
        if old and view == "personal" and self.settings["method"] in _FINE_TUNING:
            view = "adapted"
        return view if any(f"{view}/test" in e["eval"] for e in self.events) else "personal"

    def column(self, name: str) -> str:
        """Return the name of a column of `rounds` or `clients`; IN_USE in it stands for the run's headline."""
        return name.replace(IN_USE, self.headline, 1)

    @cached_property
    def reading(self) -> str:
        """The reading of the paper, if it is not the method's default."""
        about = self.description["method"]
        used = about["settings"].get("reading")
        old = str(self.description.get("versions", {}).get("coterie", "0.1")).startswith("0.1")
        if old and used and names_today(self.settings["method"], used):
            return f"{used} in 0.1"
        return str(about.get("reading", ""))

    @cached_property
    def task(self) -> Task:
        """The learning task; old runs without one are classification."""
        task = self.description.get("task", {"name": Classification.name, "outputs": 1})
        return make(task["name"], task["outputs"], self.settings.get("metrics"))

    @property
    def metric(self) -> Metric:
        """The metric of the task: accuracy, RMSE, ..."""
        return self.task.metric

    @cached_property
    def events(self) -> list[dict[str, Any]]:
        """The events, one dictionary per finished round; CoterieError is raised if they are damaged."""
        return folder.read_events(self.path)

    @cached_property
    def damage(self) -> list[str]:
        """The damaged or missing evaluations, one message each."""
        return folder.evaluation_damage(self.path, self.events)

    @property
    def last_round(self) -> int:
        return int(self.events[-1]["round"]) if self.events else 0

    @property
    def finished(self) -> bool:
        return self.last_round >= int(self.settings["rounds"]) or bool(self.ended)

    @property
    def ended(self) -> str:
        """The reason why the run ended before its last round; otherwise empty."""
        return str(self.events[-1].get("ended", "")) if self.events else ""

    @cached_property
    def rounds(self) -> pd.DataFrame:
        """One row per round: loss, bytes, seconds, metric of the participants before and after training, statistics."""
        rows = []
        for e in self.events:
            row: dict[str, Any] = {"round": e["round"], "loss": e["loss"], "participants": len(e["participants"])}
            row |= {"failed": len(e["failed"]), "nonfinite": len(e["nonfinite"])}
            row |= {k: e[k] for k in ("steps", "samples") if k in e}
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
        for name, value in self._old_cluster_means().items():
            frame.loc[frame.index[frame.index == self._evaluated["round"]], name] = value
        for name in ("seconds", "cpu"):
            if times := {row["round"]: row[name] for row in self._timing.rows if name in row}:
                frame[name] = frame.index.map(times).astype(float)
        return frame

    @property
    def _evaluated(self) -> dict[str, Any]:
        """The event of the last evaluation; empty before the first evaluation."""
        return next((e for e in reversed(self.events) if "evaluation" in e), {})

    def _old_cluster_means(self) -> dict[str, float]:
        """Return the means over clusters at the last evaluation of an old run, which logged its clusters only."""
        event = self._evaluated
        of = next((m for k in ("layer", "clusters") if (m := names_by_client(event.get("facts", {}).get(k)))), {})
        if not of or any("clusters" in stats for stats in event["eval"].values()):
            return {}
        try:
            z = folder.read_evaluation(self.path, event)
        except CoterieError:  # damaged, which a warning reports
            return {}
        names = {name: k for k, name in enumerate(dict.fromkeys(of.values()))}
        cluster = np.array([names[of[int(i)]] if int(i) in of else ALONE for i in z["clients"]])
        out: dict[str, float] = {}
        for key in (k.removesuffix("/hits") for k in z if k.endswith("/hits")):
            rows = ~z["newcomer"]
            hits, total, loss = (z[f"{key}/{part}"][rows] for part in ("hits", "total", "loss"))
            stats = statistics(Classification(hits.shape[1]), {"hits": hits, "total": total}, loss, cluster[rows])
            out |= {f"{key}/{k}": v for k, v in stats.items() if k.startswith("cluster")}
        return out

    @cached_property
    def _timing(self) -> folder.Log:
        return folder.read_timing(self.path / folder.TIMING)

    def _missing_times(self) -> str:
        """Return a message if timing.jsonl has no row for some rounds.

        A running or killed run may lack the time of its last round, which is written after the event.
        """
        saved = max((folder.round_of(p) for p in folder.checkpoints(self.path)), default=-1)
        rounds = {e["round"] for e in self.events if e["round"] <= max(saved, self.last_round - 1)}
        missing = rounds - {row["round"] for row in self._timing.rows}
        return f"{self.path / folder.TIMING} lacks {len(missing)} of {len(rounds)} rounds" if missing else ""

    @property
    def diverged(self) -> bool:
        """True if personal models give NaN or infinity at the end, or no upload of the last round could be used."""
        last = self.events[-1] if self.events else {}
        lost = bool(last.get("nonfinite")) and len(last["nonfinite"]) == len(last.get("participants", ()))
        return lost or bool(self.summary().get("personal", {}).get("nonfinite"))

    def warnings(self) -> list[str]:
        """Return warnings for a reader of the numbers, one sentence each."""
        out = [f"{sentence}; {folder.how_to_mend(self.path)}" for sentence in self.damage]
        if times := self._timing.damage or self._missing_times():
            out.append(f"{times}; seconds are incomplete")
        out += self.description.get("warnings", [])
        personal = self.summary().get("personal", {})
        name = f"{self.title}, seed {self.settings['seed']}"
        if broken := sum(len(e.get("nonfinite", ())) for e in self.events):
            sent = sum(len(e.get("participants", ())) for e in self.events)
            out.append(f"{name}: training diverged, {broken} of {sent} uploads held NaN or infinity and were left out")
        if personal.get("nonfinite"):
            clients = f"{personal['nonfinite']} of {personal['clients']} clients"
            out.append(f"{name}: training diverged, the personal models of {clients} give NaN or infinity")
        asked = [e for e in self.events if e.get("participants")]
        finite = [(set(e["participants"]) - set(e.get("nonfinite", ())), set(e.get("failed", ()))) for e in asked]
        if empty := sum(len(sent) > 0 and sent <= failed for sent, failed in finite):
            out.append(f"{name}: no upload counted in {empty} of {len(asked)} rounds, which changed nothing")
        accepted = [e["round"] for e in self.events if e["notes"].get("rejected") != 1.0]
        if accepted and self.last_round - accepted[-1] >= _REJECTIONS:
            out.append(f"{name}: every agent was rejected in rounds {accepted[-1] + 1} to {self.last_round}")
        if personal.get("undefined"):
            clients = f"{personal['undefined']} of {personal['clients']} clients"
            out.append(f"{self.title}: {self.metric.name} is not defined for {clients}, which its mean leaves out")
        if self.attack:
            out.append(f"{name}: some clients lie (attack = {self.attack}); the scores are those of the others")
        for m in self.task.added:
            if n := personal.get(f"undefined {m.name}"):
                clients = f"{n} of {personal['clients']} clients"
                out.append(f"{self.title}: {m.name} is not defined for {clients}, which its mean leaves out")
        return out

    def curve(self, view: str = "personal", part: str = "test", statistic: str = "mean") -> pd.Series:
        """Return a statistic by evaluated round, such as the pooled value of the global model."""
        name = f"{view}/{part}/{statistic}"
        if name not in self.rounds:
            raise CoterieError(f"{self.title} has no {name} in {self.path}")
        return self.rounds[name].dropna()

    def evaluation(self, round: int | None = None) -> dict[str, np.ndarray]:
        """Return the raw arrays of one evaluation (default: the last).

        They are the counts of the task [clients, ...], such as hits and total per class, and losses [clients].
        """
        events = [e for e in self.events if "evaluation" in e and round in (None, e["round"])]
        if not events:
            raise CoterieError(f"{self.path} has no evaluation" + (f" of round {round}" if round is not None else ""))
        return folder.read_evaluation(self.path, events[-1])

    def clients(self, round: int | None = None) -> pd.DataFrame:
        """Return one row per client: name (if the data have names), test samples, and the metric of every view.

        Metrics of the setting `metrics` follow as VIEW/PART/NAME.
        """
        z = self.evaluation(round)
        frame = pd.DataFrame({"client": z["clients"], "newcomer": z["newcomer"]}).set_index("client")
        if self.client_names:
            frame.insert(0, "name", [self.client_names[i] for i in z["clients"]])
        for key in sorted(k.removesuffix("/loss") for k in z if k.endswith("/loss")):
            counts = {k.removeprefix(f"{key}/"): v for k, v in z.items() if k.startswith(f"{key}/")}
            if key.endswith("/test"):
                frame["samples"] = self.task.samples(counts)
            measured = self.task.measured(counts)
            frame[key] = measured[self.metric.name]
            for metric in (m for m in self.task.added if m.is_number):
                values = counts.get(f"metric {metric.name}") if metric.needs_predictions else measured[metric.name]
                frame[f"{key}/{metric.name}"] = values
        return frame

    def client_rounds(self) -> pd.DataFrame:
        """Return the rows of `clients` for every evaluated round, by round and client."""
        rounds = [e["round"] for e in self.events if "evaluation" in e]
        return pd.concat({r: self.clients(r) for r in rounds}, names=["round"]) if rounds else pd.DataFrame()

    def choices(self) -> list[str]:
        """Return a sentence for each client of autopilot that has chosen a model, as it last sent its scores."""
        facts: dict[str, Any] = next((e["facts"] for e in reversed(self.events) if "chosen" in e.get("facts", {})), {})
        sentences = []
        for client, candidate in facts.get("chosen", {}).items():
            name = self.client_names[int(client)] if self.client_names else client
            sentence = f"client {name} uses {candidate}"
            if candidate != "own" and client in facts.get("ahead_of_own", {}):
                ahead, n = facts["ahead_of_own"][client], facts["validated"][client]
                better = f"{abs(ahead):.2f} nats per sample {'better' if ahead >= 0 else 'worse'} than its own model"
                sentence += f": {better} on its {n} validation samples"
            sentences.append(sentence)
        return sentences

    def confusion(self, view: str = "", part: str = "test", round: int | None = None) -> np.ndarray:
        """Return the confusion matrix [true class, predicted class] of all clients but newcomers (metrics = confusion).

        The view is the headline and the round that of the last evaluation by default.
        """
        z, key = self.evaluation(round), f"{view or self.headline}/{part}/confusion"
        if key not in z:
            raise CoterieError(f"{self.path} has no {key}: run it with --set metrics=confusion")
        matrix: np.ndarray = z[key][~z["newcomer"]].sum(0)
        return matrix

    def summary(self) -> dict[str, Any]:
        """Return the statistics of the evaluation protocol (see statistics.py)."""
        out = summarise(self.rounds, int(self.settings["rounds"]), self.task.reported)
        if self.attack and "attack" not in out and self.metric.name == "accuracy" and "personal" in out:
            out["attack"] = {**out["personal"], "last": 1 - out["personal"]["last"]}  # any wrong class is a success
        return out

    def work(self, view: str = "") -> dict[str, float]:
        """Return the local training of all clients until the last round: steps, samples, and processor seconds as cpu.

        The view `adapted` (default: the headline) includes the fine-tuning of every client once. Numbers that the run
        did not record are missing.
        """
        out = {k: float(self.rounds[k].sum()) for k in ("steps", "samples", "cpu") if k in self.rounds}
        tuning = self._evaluated.get("adapting", {}) if (view or self.headline) == "adapted" else {}
        return {k: v + tuning.get(k, 0) for k, v in out.items()}

    # ---- models ------------------------------------------------------------------------------------------------------
    def session(self) -> Session:
        """Return the run's data, model and method, built again from its settings."""
        if self.own_data:
            raise CoterieError(f"the data of {self.path} are on the devices of the federation")
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
        """Return a client's predictions for raw items, and the task's metrics if targets `y` are given."""
        return self.predictor(client).predict(x, y)

    def export(self, client: int | str, path: str | Path) -> str:
        """Write the personal model of a client as a safetensors file; return code that loads the file."""
        if not isinstance(path, str | Path):
            raise CoterieError(f"path = {path!r} is invalid: it must be the name of the file to write")
        return export_model(self.predictor(client), Path(path))

    def welcome(self, x: Any, y: Any = None, x_test: Any = None, y_test: Any = None, name: str = "newcomer") -> Welcome:
        """Make a personal model for a newcomer from its own raw samples; labels are optional."""
        session = cloud_session(self.path) or self.session()
        return welcome_newcomer(session, self.path, x, y, x_test, y_test, name)


def names_by_client(value: Any) -> dict[int, str]:
    """Return a logged mapping of clients to names; empty if the value is not such a mapping."""
    if not isinstance(value, Mapping) or not all(str(k).isdecimal() for k in value):
        return {}
    named = all(isinstance(v, int | str) for v in value.values())
    return {int(k): str(v) for k, v in value.items()} if named else {}

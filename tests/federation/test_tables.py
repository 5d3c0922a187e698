"""Devices with tables agree on one encoding through small statistics, which their operators allow and can read."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

pytest.importorskip("grpc", reason="a federation needs the extra federation")

import coterie
from coterie.config import RunSettings, settings
from coterie.data.table import ColumnStatistics, TableEncoding
from coterie.engine import codec
from coterie.errors import CoterieError
from coterie.federation.cloud.program import CloudSettings
from coterie.federation.cloud.table_agreement import agreed_settings, ask_devices
from coterie.federation.device import DeviceHandler
from coterie.federation.edge import EdgeHandler
from coterie.federation.policy.allow import Allow
from coterie.federation.policy.audit import AUDIT_FILE, AuditLog
from coterie.federation.protocol.messages import TableAnswer, TableAnswers, TableQuestion
from coterie.federation.table_inquiry import TableInquiry, checked_answer
from support.in_process_link import HandLink, federation

RUN: dict[str, Any] = {
    "rounds": 3, "epochs": 1, "join": 1.0, "public": 0, "model": "mlp", "val_share": 0, "seed": 3, "batch": 16,
    "lr": 0.1, "eval_every": 3, "target": "ill", "client": "hospital", "split_column": "part",
}  # fmt: skip


def ward(i: int, target: str = "ill") -> pd.DataFrame:
    """Patients of a hospital. Hospital 0 has no value of `weight`, 1 lacks a class, and 2 has a category of its own."""
    rng = np.random.default_rng(i)
    age = rng.uniform(20, 90, 60) + i
    frame = pd.DataFrame({"age": age, "weight": rng.normal(70, 9, 60), "sex": rng.choice(["f", "m"], 60)})
    frame["ill"] = np.where(age < 40, "no", np.where(age < 70, "maybe", "yes"))
    if i == 0:
        frame["weight"] = np.nan
    if i == 1:
        frame.loc[frame["ill"] == "no", "ill"] = "maybe"
        frame.loc[::7, "sex"] = None
    if i == 2:
        frame.loc[::5, "sex"] = "x"
    frame["cost"] = 1000 + 10 * age + 5 * (frame["sex"] == "f")
    frame["part"] = np.where(np.arange(60) % 4 == 3, "test", "train")
    return frame.drop(columns="cost" if target == "ill" else "ill")


def write(folder: Path, target: str = "ill") -> list[Path]:
    files = [folder / f"ward{i}.csv" for i in range(3)]
    for i, path in enumerate(files):
        ward(i, target).to_csv(path, index=False)
    return files


def described(
    folder: Path, files: list[Path], chosen: RunSettings, allow: Allow | None = None
) -> dict[str, TableAnswer]:
    """The answers of one device for each file."""
    handlers = [DeviceHandler(str(f), folder / f"asked{i}", allow=allow or Allow()) for i, f in enumerate(files)]
    link = HandLink({f"device-{i}": h.handle for i, h in enumerate(handlers)})
    audit = AuditLog(folder / AUDIT_FILE)
    try:
        return ask_devices(link, chosen, len(files), audit, lambda: False)  # type: ignore[arg-type]
    finally:
        audit.close()
        for handler in handlers:
            handler.close()


@pytest.mark.parametrize(("target", "scaling"), [("ill", "pooled"), ("ill", "client"), ("cost", "pooled")])
def test_a_federation_of_tables_is_a_simulation_of_the_same_files(tmp_path: Path, target: str, scaling: str) -> None:
    files, run = write(tmp_path, target), {**RUN, "target": target, "scaling": scaling}
    chosen = settings(method="fedavg", clients=3, **run)
    chosen, cloud = agreed_settings(chosen, CloudSettings("none"), described(tmp_path, files, chosen))
    task = {"ill": "classification", "cost": "regression"}[target]
    assert chosen.task == task
    with federation(tmp_path / "f", "fedavg", files=files, cloud=cloud, clients=3, **{**run, "task": task}) as f:
        assert f.loop.run()
        got = f.loop.event["eval"]["personal/test"]
    together = pd.concat([ward(i, target).assign(hospital=f"h{i}") for i in range(3)])
    together.to_csv(tmp_path / "all.csv", index=False)
    simulated = coterie.run("fedavg", tmp_path / "all.csv", out=tmp_path / "s", workers=1, **run)
    assert got == simulated.events[-1]["eval"]["personal/test"]
    table = simulated.session().federation.dataset.table
    assert table is not None and TableEncoding.model_validate_json(cloud.table) == table
    assert table.columns[2].categories == ("f", "m", "x")
    model = next((tmp_path / "f" / "devices" / "1").glob("*/model.safetensors"))
    new = ward(1, target).drop(columns=target)
    np.testing.assert_array_equal(
        coterie.load_model(model).predict(new).values, simulated.predictor("h1").predict(new).values
    )


def test_only_declared_statistics_leave_and_the_audit_log_shows_them(tmp_path: Path) -> None:
    handler = DeviceHandler(str(write(tmp_path)[1]), tmp_path / "state")
    chosen = settings(method="fedavg", clients=3, **RUN)
    answer = handler.columns(TableQuestion(chosen.model_dump_json()))
    handler.close()
    train = ward(1)[ward(1)["part"] == "train"]
    assert answer.features == ("age", "weight", "sex") and answer.classes == ("maybe", "yes")
    assert answer.columns["age"].total == pytest.approx(train["age"].sum())
    assert answer.columns["sex"] == ColumnStatistics(
        "category", 45 - int(train["sex"].isna().sum()), True, 0, 0, ("f", "m")
    )
    lines = [json.loads(line) for line in (tmp_path / "state" / AUDIT_FILE).read_text().splitlines()]
    asked, left = lines
    assert asked["about"]["target"] == "ill" and left["way"] == "out" and left["message"] == "columns"
    assert left["about"]["age"]["total"] == answer.columns["age"].total
    assert set(left["entries"]) == {"column.age", "column.weight", "column.sex"}


def test_a_policy_can_refuse_the_statistics_of_a_column(tmp_path: Path) -> None:
    chosen = settings(method="fedavg", clients=3, **RUN)
    for allow, sentence in [
        (Allow(kinds=("model", "scores")), 'does not let "columns" leave, which a federation of tables sends'),
        (Allow(entries=("column.age", "column.sex")), 'does not let the entry "column.weight" leave'),
    ]:
        handler = DeviceHandler(str(write(tmp_path)[0]), tmp_path / "state", allow=allow)
        with pytest.raises(CoterieError, match=sentence):
            handler.columns(TableQuestion(chosen.model_dump_json()))
        handler.close()
        assert '"refused": "this host' in (tmp_path / "state" / AUDIT_FILE).read_text().splitlines()[-1]


def test_tables_that_do_not_fit_together_get_one_sentence() -> None:
    number, text = ColumnStatistics("number", 5, False, 1.0, 1.0), ColumnStatistics("category", 5, False, 0, 0, ("a",))
    a = TableAnswer({"x": number}, ("x",), "classification", ("0", "1"))
    chosen, cloud = settings(method="fedavg", target="y"), CloudSettings("none")
    for b, sentence in [
        (replace(a, columns={"x": text}), 'column "x" holds categories at b and numbers at a'),
        (replace(a, columns={"x": number, "z": number}, features=("x", "z")), 'b has a column "z" and a has not'),
        (replace(a, task="regression", classes=()), "the targets are for classification at a and for regression at b"),
        (replace(a, classes=("ill",)), "classes are numbers at a and names at b"),
    ]:
        with pytest.raises(CoterieError, match=sentence):
            agreed_settings(chosen, cloud, {"a": a, "b": b})
    agreed = agreed_settings(chosen, cloud, {"a": a, "b": replace(a, classes=("10", "9"))})[1]
    assert agreed.class_names == ("0", "1", "9", "10")


def test_devices_behind_edges_agree_on_the_same_encoding(tmp_path: Path) -> None:
    files, chosen = write(tmp_path), settings(method="fedavg", clients=3, **RUN)
    direct = agreed_settings(chosen, CloudSettings("none"), described(tmp_path, files, chosen))
    devices = [DeviceHandler(str(f), tmp_path / f"behind{i}") for i, f in enumerate(files)]
    below = HandLink({"device-0": devices[0].handle})
    strict = Allow(entries=("column.age", "column.weight"))
    north, south = EdgeHandler(below), EdgeHandler(HandLink({"device-2": devices[2].handle}), strict)  # type: ignore[arg-type]
    link = HandLink({"north": north.handle, "south": south.handle})
    audit = AuditLog(tmp_path / AUDIT_FILE)
    inquiry = TableInquiry(link, TableQuestion(chosen.model_dump_json()), audit, {"north", "south"})  # type: ignore[arg-type]
    inquiry.ask()
    assert set(inquiry.answers) == {"north/device-0"}
    assert 'does not let the entry "column.sex" leave' in inquiry.refused["south/device-2"]
    below.handlers["device-1"] = devices[1].handle  # a device that comes later
    south.allow = Allow()
    inquiry._ask_after.clear()
    inquiry.ask()
    audit.close()
    assert set(inquiry.answers) == {"north/device-0", "north/device-1", "south/device-2"} and not inquiry.refused
    assert agreed_settings(chosen, CloudSettings("none"), inquiry.answers) == direct
    asked = [json.loads(line) for line in (tmp_path / "behind0" / AUDIT_FILE).read_text().splitlines()]
    assert [line["way"] for line in asked] == ["in", "out"]  # it is asked once
    for device in devices:
        device.close()


def test_an_edge_cannot_name_any_number_of_devices(tmp_path: Path) -> None:
    files, chosen = write(tmp_path), settings(method="fedavg", clients=3, **RUN)
    device = DeviceHandler(str(files[0]), tmp_path / "state")
    answer = device.columns(TableQuestion(chosen.model_dump_json()))
    device.close()
    for devices, words in [
        ({f"d{i}": answer for i in range(2000)}, "more than 1024 devices"),
        ({"x" * 300: answer}, "names a device of more than 200 characters"),
        ({"d": replace(answer, features=("nowhere",))}, "lacks columns"),
    ]:
        reply = codec.pack(TableAnswers(devices, {}))
        link = HandLink({"north": lambda *a, reply=reply: reply})
        inquiry = TableInquiry(link, TableQuestion("{}"), None, {"north"})  # type: ignore[arg-type]
        inquiry.ask()
        assert not inquiry.answers and words in inquiry.refused["north"]


def test_impossible_statistics_are_refused(tmp_path: Path) -> None:
    files, chosen = write(tmp_path), settings(method="fedavg", clients=1, **RUN)
    handler = DeviceHandler(str(files[1]), tmp_path / "state")
    answer = handler.columns(TableQuestion(chosen.model_dump_json()))
    for age in (replace(answer.columns["age"], total=float("nan")), replace(answer.columns["age"], squares=-1.0)):
        with pytest.raises(CoterieError, match='statistics of column "age" are impossible'):
            checked_answer(replace(answer, columns={**answer.columns, "age": age}))
    handler.close()


def test_data_that_are_no_table_are_refused(tmp_path: Path) -> None:
    np.savez(tmp_path / "x.npz", x=np.zeros((9, 2), np.float32), y=np.arange(9) % 2)
    handler = DeviceHandler(str(tmp_path / "x.npz"), tmp_path / "state")
    with pytest.raises(CoterieError, match="target names a column of a table"):
        handler.columns(TableQuestion(settings(method="fedavg", target="y").model_dump_json()))
    handler.close()

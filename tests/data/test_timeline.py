"""Timelines: the data in force in a round, the same bits in every runtime, and clear errors."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import coterie
from coterie.config import RunSettings, settings
from coterie.data import Dataset, Federation, federate, from_arrays, load_dataset
from coterie.data.rotation import rotate
from coterie.engine.session import prepare
from coterie.errors import CoterieError
from coterie.federation.cloud.program import CloudSettings, open_session
from coterie.federation.protocol.plan import FederationPlan
from coterie.results.command_line import run_command
from coterie.storage import atomic as disk
from support.in_process_link import ALLOW, NET, RUN, federation, simulated

DIGITS = load_dataset("digits")
SHORT: dict[str, Any] = {"clients": 4, "rounds": 4, "epochs": 1, "eval_every": 1, "join": 1.0, "subset": 400}


def fed(timeline: Any = None, data: Dataset = DIGITS, **more: Any) -> Federation:
    given = {"clients": 5, "partition": "dirichlet(0.5)", "min_size": 2, **more}
    return federate(data, settings(method="fedavg", timeline=timeline, **given).federation, 0)


def test_without_a_change_in_force_the_partition_is_in_force() -> None:
    base, f = fed(), fed([{"round": 3, "clients": [1], "labels": [0, 1, 2, 3, 4, 5]}])
    for client, round in ((1, 1), (1, 2), (0, 3), (0, 9)):
        for part in ("train", "val", "test"):
            assert f.indices(client, part, round).equal(base.indices(client, part))
    assert np.array_equal(f.label_counts("all", 2), base.label_counts("all"))


def test_labels_come_and_go_and_a_bare_change_restores_the_partition() -> None:
    base = fed()
    f = fed([{"round": 4, "clients": [0]}, {"round": 2, "clients": [0], "labels": [0, "1", 2, 3, 4]}])
    counts = base.label_counts("all")[0]
    assert (f.label_counts("all", 2)[0] == counts * (np.arange(10) < 5)).all() and (counts[5:] > 0).any()
    assert (f.data(0, 3).train.y < 5).all() and (f.test(0, 3).y < 5).all()
    assert f.data(0, 4).train.y.equal(base.data(0).train.y)
    assert f.sizes("train", 3)[0] == f.size(0, "train", 3) == len(f.data(0, 3).train) < f.size(0)


def test_relabelled_samples_keep_their_pictures() -> None:
    base, f = fed(), fed([{"round": 2, "relabel": {"3": 5, "5": "3"}}])
    before, after = base.data(2).train, f.data(2, 2).train
    swap = torch.arange(10)
    swap[3], swap[5] = 5, 3
    assert after.x.equal(before.x) and after.y.equal(swap[before.y])
    assert np.array_equal(f.label_counts("train", 2)[:, 3], base.label_counts()[:, 5])


def test_rotation_is_added_to_that_of_the_partition() -> None:
    base = fed(partition="rotate(4)", normalize="unit")
    f = fed([{"round": 2, "clients": [0], "rotate": 90}], partition="rotate(4)", normalize="unit")
    assert (base.rotation(0), f.rotation(0, 1), f.rotation(0, 2), f.rotation(1, 2)) == (90, 90, 180, 180)
    raw = DIGITS.x[f.indices(0, "train", 2)]
    assert f.data(0, 2).train.x.equal(rotate(raw, 180.0))


def test_samples_move_between_clients_and_keep_their_part() -> None:
    base = fed()
    moved = [int(i) for p in ("train", "test") for i in base.indices(3, p)[:5]]
    f = fed([{"round": 2, "clients": [0], "samples": np.array(moved)}, {"round": 2, "clients": [1], "data_of": 4}])
    assert f.indices(0, "train", 2).tolist() == moved[:5] and f.indices(0, "test", 2).tolist() == moved[5:]
    assert f.indices(1, "val", 2).equal(base.indices(4, "val")) and f.indices(4, "val", 2).equal(base.indices(4, "val"))


def test_an_array_gives_the_first_and_last_round_of_every_sample(tmp_path: Path) -> None:
    first, number = np.where(np.arange(len(DIGITS)) % 2, 1, 4), np.arange(len(DIGITS))
    np.save(tmp_path / "rounds.npy", np.stack([first, np.where(first == 1, 5, 0)], 1))
    base, f, g = fed(), fed(first), fed(tmp_path / "rounds.npy")
    for client in f.clients:
        held = base.indices(client, "train").numpy()
        assert np.array_equal(f.indices(client, "train", 3).numpy(), held[held % 2 == 1])
        assert np.array_equal(f.indices(client, "train", 4).numpy(), held)
        assert np.array_equal(g.indices(client, "train", 5).numpy(), held)
        assert np.array_equal(g.indices(client, "train", 6).numpy(), held[held % 2 == 0])
    assert len(number) == f.sizes("all", 4).sum()


def test_generated_schedules() -> None:
    base = fed()
    counts, swapped = base.label_counts("all"), [1, 0, 3, 2, 5, 4, 7, 6, 9, 8]
    assert np.array_equal(fed("swap_labels(3)").label_counts("all", 3), counts[:, swapped])
    some = fed("swap_labels(3, 0.4)").label_counts("all", 3)
    assert np.array_equal(some[:2], counts[:2, swapped]) and np.array_equal(some[2:], counts[2:])
    assert np.array_equal(fed("move_data(3)").label_counts("all", 3), np.roll(counts, -1, 0))
    assert fed("rotate(3, 90, share=0.4)").rotation(1, 3) == 90
    f = fed("new_labels(3)")
    before = (f.label_counts("all", 1) > 0).sum(1)
    assert np.array_equal(before, ((counts > 0).sum(1) + 1) // 2)
    assert np.array_equal(f.label_counts("all", 3), counts)


def test_a_timeline_is_part_of_the_identity_and_absent_from_it_otherwise() -> None:
    base, f, g = fed(), fed("swap_labels(3)"), fed("swap_labels(4)")
    assert "timeline" not in base.identity
    assert len({x.identity["sha256"] for x in (base, f, g)}) == 3 and f.identity["timeline"] == "swap_labels(3)"


@pytest.mark.parametrize(
    ("timeline", "words"),
    [
        ("swap_labls(3)", "did you mean"),
        ("swap_labels()", 'timeline "swap_labels()" needs round'),
        ("swap_labels(3, 0.1)", "share must be at most 1"),
        ("new_labels(1)", "round must be 2 or more"),
        ("absent.toml", "absent.toml cannot be read"),
        (5, "must be a file, a schedule or a list of changes"),
        ([{"round": 0}], "change 1: round"),
        ([{"round": 2, "label": [1]}], "known: round, clients"),
        ([{"round": 2, "labels": ["cat"]}], 'unknown label "cat"'),
        ([{"round": 2, "clients": [7]}], "clients are numbered 0 to 4"),
        ([{"round": 2, "clients": [0, 1], "samples": [1]}], "samples belong to one client"),
        ([{"round": 2, "clients": [0], "samples": [1], "data_of": 1}], "exclude each other"),
        ([{"round": 2, "samples": [99999]}], "samples are numbered 0 to 1796"),
        ([{"round": 2, "samples": []}], "client 0 has no training samples from round 2 on"),
        ([{"round": 2}, {"round": 2, "clients": [1]}], "client 1 has two changes in round 2"),
        (np.ones(4, int), "it is for 4 samples, and digits has 1797"),
        (np.ones(1797), "the first round of each sample"),
    ],
)
def test_a_timeline_that_does_not_fit_gets_one_sentence(timeline: Any, words: str) -> None:
    with pytest.raises(CoterieError) as e:
        fed(timeline)
    assert words in str(e.value) and "\n" not in str(e.value)


def test_a_change_of_labels_needs_classes_and_a_rotation_pictures() -> None:
    numbers = from_arrays(np.random.rand(90, 4).astype("float32"), np.random.rand(90).astype("float32"))
    for change, words in (({"labels": [0]}, "classification"), ({"rotate": 90}, "square pictures")):
        with pytest.raises(CoterieError, match=words):
            fed([{"round": 2, **change}], numbers, partition="iid")


def test_settings_of_another_host_never_read_a_file(tmp_path: Path) -> None:
    (tmp_path / "t.toml").write_text("[[change]]\nround = 2\n")
    own = settings(method="fedavg", timeline=str(tmp_path / "t.toml")).model_dump(mode="json")
    assert own["federation"]["timeline"][0]["round"] == 2
    own["federation"]["timeline"] = str(tmp_path / "t.toml")
    with pytest.raises(CoterieError, match="not of the form"):
        RunSettings(**own)


def test_the_repeated_command_holds_the_timeline(tmp_path: Path) -> None:
    given = settings(method="fedavg", timeline=[{"round": 2, "relabel": {"3": 5}}]).model_dump(mode="json")
    assert 'timeline=[{"round" = 2, "relabel" = {"3" = 5}, "rotate" = 0.0}]' in run_command(given)


def results(path: Path) -> list[Any]:
    return [json.loads(line) for line in (path / "events.jsonl").read_text().splitlines()]


def test_rounds_before_a_change_are_those_without_it_and_scores_follow_the_round(tmp_path: Path) -> None:
    change = [{"round": 3, "relabel": {"0": 1, "1": 0}}]
    plain = coterie.run("fedavg", out=tmp_path / "a", workers=1, **SHORT)
    changed = coterie.run("fedavg", out=tmp_path / "b", workers=1, timeline=change, **SHORT)
    one, two = results(plain.path), results(changed.path)
    assert one[:2] == two[:2] and one[2]["watch"]["before"] != two[2]["watch"]["before"]
    totals = [changed.evaluation(t)["personal/test/total"] for t in (2, 3)]
    assert np.array_equal(totals[0][:, [1, 0]], totals[1][:, :2]) and not np.array_equal(*totals)


def test_same_bits_for_any_workers_after_a_stop_and_in_a_federation(tmp_path: Path) -> None:
    given = {**SHORT, "timeline": "new_labels(3)"}
    whole = coterie.run("fedrep", out=tmp_path / "whole", workers=1, **given)
    coterie.run("fedrep", out=tmp_path / "two", workers=2, on_round=lambda p: p.round == 2, **given)
    cut = coterie.resume(tmp_path / "two", workers=1)
    assert results(whole.path) == results(cut.path)
    with federation(tmp_path / "f", "fedrep", timeline="new_labels(2)") as f:
        assert f.loop.run()
        loop = simulated(tmp_path / "s", f.session)
        for i in f.session.federation.clients:
            assert f.session.federation.size(i, round=1) <= f.session.federation.size(i, round=2)
        assert results(tmp_path / "f" / "run") == results(tmp_path / "s")
        assert all(torch.equal(v, loop.server[k]) for k, v in f.loop.server.items() if isinstance(v, torch.Tensor))


def test_a_resumed_run_refuses_another_timeline(tmp_path: Path) -> None:
    run = coterie.run("local", out=tmp_path / "r", workers=1, timeline="swap_labels(2)", **{**SHORT, "rounds": 2})
    stored = disk.read_json(run.path / "settings.json")
    stored["settings"]["federation"]["timeline"] = "swap_labels(1)"
    disk.write_json(run.path / "settings.json", stored)
    with pytest.raises(CoterieError, match=r"the data of .* have changed since it ran \(sha256, timeline\)"):
        coterie.resume(run.path, rounds=3)


def test_a_device_with_data_of_its_own_has_a_timeline_of_its_own(tmp_path: Path) -> None:
    files = []
    for i in range(2):
        part = slice(200 * i, 200 * (i + 1))
        files.append(tmp_path / f"{i}.npz")
        np.savez(files[-1], x=DIGITS.x[part, 0].numpy(), y=DIGITS.y[part].numpy())
    cloud = CloudSettings("none", shape=(1, 8, 8), classes=10, min_clients=2)
    more: dict[str, Any] = {"files": files, "cloud": cloud, "clients": 2, "public": 0, "join": 1.0, "eval_every": 1}
    rows = []
    for name, timeline in (("plain", None), ("changed", "swap_labels(3)")):
        with federation(tmp_path / name, "fedavg", own_timeline=timeline, **more) as f:
            assert f.loop.run()
        rows.append(results(tmp_path / name / "run"))
    assert rows[0][:2] == rows[1][:2] and rows[0][2]["watch"] != rows[1][2]["watch"]
    with pytest.raises(CoterieError, match="timelines of their own"):
        open_session(settings(method="fedavg", clients=2, timeline="swap_labels(3)"), cloud)
    plan = FederationPlan.of(prepare(settings(method="fedavg", model=NET)), RUN)
    with pytest.raises(CoterieError, match="leave out --timeline"):
        plan.session("digits", 0, None, ALLOW, "swap_labels(3)")


def test_a_change_after_the_last_round_is_said_and_official_scores_are_refused() -> None:
    late = prepare(settings(method="fedavg", timeline="swap_labels(60)", rounds=50))
    assert "after the last round (50)" in late.warnings()[-1]
    with pytest.raises(CoterieError, match="timeline"):
        prepare(settings(method="fedavg", timeline="swap_labels(6)", official=True, pool="train"))

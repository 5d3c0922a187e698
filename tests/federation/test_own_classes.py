"""Classes of devices with their own data: matched to those of the plan by name, never renumbered."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import coterie
from coterie.config import settings
from coterie.data.arrays import from_arrays
from coterie.data.settings import PartitionSettings
from coterie.data.sources import load_dataset
from coterie.errors import CoterieError
from coterie.federation.cloud.program import CloudSettings, open_session
from coterie.federation.device_data import example_dataset, only_client
from coterie.federation.policy.allow import Allow
from coterie.federation.protocol.plan import FederationPlan
from support.in_process_link import federation

HELD = ([0, 1, 2], [1, 2], [2])  # classes of each device
RUN: dict[str, Any] = {
    "rounds": 8, "epochs": 2, "join": 1.0, "public": 0, "model": "mlp", "val_share": 0.1, "seed": 3, "batch": 16,
    "lr": 0.1, "eval_every": 2,
}  # fmt: skip


def samples(device: int, names: list[str] | None = None) -> dict[str, Any]:
    """Return 90 vectors whose class is plain to see, with their split."""
    rng = np.random.default_rng(device)
    y = rng.choice(HELD[device], 90)
    x = rng.normal(0, 0.3, (90, 4)).astype(np.float32)
    x[np.arange(90), y] += 2
    split = np.arange(90) % 4
    return {"x": x, "y": y if names is None else np.array(names)[y], "split": np.where(split == 3, 2, split == 2)}


def of(names: list[str], y: np.ndarray, like: tuple[str, ...], task: str = "classification") -> Any:
    """Return the targets of a device whose classes have these names, for a federation with the classes `like`."""
    data = from_arrays(np.zeros((len(y), 4), np.float32), y, classes=names, task=task)
    example = example_dataset((4,), like, "float32", None, None, None, task, len(like) if y.ndim > 1 else 1)
    return only_client(data, example, PartitionSettings(val_share=0), 0).dataset.y


@pytest.mark.parametrize("names", [None, ["ill", "healthy", "unsure"]], ids=["numbers", "names"])
def test_devices_that_lack_classes_give_what_a_simulation_of_the_same_files_gives(
    tmp_path: Path, names: list[str] | None
) -> None:
    files = [tmp_path / f"{i}.npz" for i in range(3)]
    parts = [samples(i, names) for i in range(3)]
    for path, part in zip(files, parts, strict=True):
        np.savez(path, **part)
    cloud = CloudSettings("none", shape=(4,), classes=3, class_names=tuple(names or ()))
    with federation(tmp_path / "f", "fedavg", files=files, cloud=cloud, clients=3, **RUN) as f:
        assert f.loop.run()
        got = f.loop.event["eval"]["personal/test"]
    together = {k: np.concatenate([p[k] for p in parts]) for k in parts[0]}
    data = from_arrays(**together, classes=names, client=np.repeat([0, 1, 2], 90))
    run = coterie.run("fedavg", data, out=tmp_path / "s", workers=1, partition="natural", **RUN)
    want = run.events[-1]["eval"]["personal/test"]
    assert got == want and got["mean"] > 0.9 and got["worst10"] > 0.9


def test_balanced_class_weights_are_those_of_a_simulation(tmp_path: Path) -> None:
    """Every device balances its own classes, so that nothing about them is sent."""
    files, parts = [tmp_path / f"{i}.npz" for i in range(3)], [samples(i) for i in range(3)]
    for path, part in zip(files, parts, strict=True):
        np.savez(path, **part)
    more = {**RUN, "rounds": 2, "class_weights": "balanced"}
    with federation(
        tmp_path / "f", "fedavg", files=files, cloud=CloudSettings("none", shape=(4,), classes=3), clients=3, **more
    ) as f:
        assert f.loop.run()
        got = f.loop.event["eval"]["personal/test"]
    together = {k: np.concatenate([p[k] for p in parts]) for k in parts[0]}
    data = from_arrays(**together, client=np.repeat([0, 1, 2], 90))
    runs = [
        coterie.run(
            "fedavg", data, out=tmp_path / str(w), workers=1, partition="natural", **{**more, "class_weights": w}
        )
        for w in ("balanced", None)
    ]
    want, plain = (run.events[-1]["eval"]["personal/test"] for run in runs)
    assert got == want and want["loss"] != plain["loss"]


def test_a_device_compares_the_code_of_a_loss_with_that_of_the_cloud(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "wardloss.py").write_text("def own(outputs, y):\n    return (outputs**2).mean(1)\n")
    np.savez(tmp_path / "a.npz", x=np.zeros((20, 4), np.float32), y=np.arange(20) % 3)
    chosen = settings(method="fedavg", clients=2, model="mlp", loss="wardloss:own")
    plan = FederationPlan.of(open_session(chosen, CloudSettings("none", shape=(4,), classes=3)), "0" * 32)
    allow = Allow(code=("wardloss:own",))
    plan.session(str(tmp_path / "a.npz"), None, None, allow)
    with pytest.raises(CoterieError, match="the code of loss = wardloss:own here differs from that of the cloud"):
        plan.model_copy(update={"code": {"loss": "0" * 64}}).session(str(tmp_path / "a.npz"), None, None, allow)


def test_explicit_classes_in_a_different_order_are_matched_by_name() -> None:
    assert of(["b", "c", "a"], np.array([0, 1, 2, 0]), ("a", "b", "c")).tolist() == [1, 2, 0, 1]
    assert of(["c", "b"], np.array([0, 1, 0, 1]), ("a", "b", "c")).tolist() == [2, 1, 2, 1]


def test_numbers_are_positions_among_the_classes_of_the_federation() -> None:
    for like in (("0", "1", "2"), ("a", "b", "c")):
        data = from_arrays(np.zeros((4, 4), np.float32), np.array([2, 1, 2, 1]))
        example = example_dataset((4,), like, "float32", None, None, None)
        assert only_client(data, example, PartitionSettings(), 0).dataset.y.tolist() == [2, 1, 2, 1]


def test_a_device_may_hold_one_class_of_a_binary_federation(tmp_path: Path) -> None:
    np.savez(tmp_path / "ill.npz", x=np.zeros((20, 4), np.float32), y=np.array(["ill"] * 20))
    chosen = settings(method="fedavg", clients=2, model="mlp", task="binary")
    cloud = open_session(chosen, CloudSettings("none", shape=(4,), classes=2, class_names=("healthy", "ill")))
    plan = FederationPlan.of(cloud, "0" * 32)
    session = plan.session(str(tmp_path / "ill.npz"), None, None, Allow())
    assert session.federation.task.name == "binary" and session.federation.data(0).train.y.unique().tolist() == [1]


def test_labels_of_a_multilabel_task_are_matched_by_name() -> None:
    y = np.array([[1, 0, 0], [1, 1, 0]] * 5)
    assert of(["c", "a", "b"], y, ("a", "b", "c"), "multilabel")[:2].tolist() == [[0, 0, 1], [1, 0, 1]]
    with pytest.raises(CoterieError, match='the class "d", which is not among the 3 classes'):
        of(["c", "a", "d"], y, ("a", "b", "c"), "multilabel")


def test_a_multilabel_device_whose_items_have_one_label_each_is_read_for_the_task(tmp_path: Path) -> None:
    np.savez(tmp_path / "one.npz", x=np.zeros((20, 4), np.float32), y=np.eye(3, dtype=int)[np.arange(20) % 3])
    assert load_dataset(str(tmp_path / "one.npz"), task="multilabel").kind == "multilabel"


def test_picture_folders_of_devices_are_matched_by_name(tmp_path: Path) -> None:
    for name in ("cat", "owl"):
        (tmp_path / "mine" / name).mkdir(parents=True)
        for i in range(6):
            Image.new("L", (8, 8), i).save(tmp_path / "mine" / name / f"{i}.png")
    data, like = load_dataset(str(tmp_path / "mine")), ("ant", "cat", "dog", "owl")
    example = example_dataset((1, 8, 8), like, "float32", None, None, None)
    assert only_client(data, example, PartitionSettings(), 0).dataset.y.tolist() == [1] * 6 + [3] * 6


@pytest.mark.parametrize(
    ("names", "like", "words"),
    [
        (["a", "d"], ("a", "b", "c"), 'class "d", which is not among the 3 classes of the federation .a,b,c.'),
        (["a", "b"], ("0", "1", "2"), "have names .a,b., and the federation has 3 numbered classes; name the classes"),
        (["0", "3"], ("0", "1", "2"), 'class "3", which is not among the 3'),
        (["0", "7"], ("a", "b", "c"), 'class "7", which is not among the 3'),
    ],
)
def test_a_class_that_the_federation_does_not_have_is_refused(
    names: list[str], like: tuple[str, ...], words: str
) -> None:
    with pytest.raises(CoterieError, match=words):
        of(names, np.array([0, 1, 0, 1]), like)


def test_string_labels_keep_the_order_of_the_given_classes() -> None:
    data = from_arrays(np.zeros((3, 2), np.float32), np.array(["b", "a", "b"]), classes=["b", "a", "c"])
    assert data.classes == ("b", "a", "c") and data.y.tolist() == [0, 1, 0]
    with pytest.raises(CoterieError, match='label "b" of arrays is not among its 2 classes'):
        from_arrays(np.zeros((3, 2), np.float32), np.array(["b", "a", "b"]), classes=["a", "c"])

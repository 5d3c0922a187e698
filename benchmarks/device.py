"""Times and differences of a device and the processor: a table to send, `python benchmarks/device.py --device cuda`."""

import argparse
import platform
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

import coterie
from coterie.data.arrays import from_arrays
from coterie.data.dataset import Dataset
from coterie.train.devices import find_devices

WORKLOADS: dict[str, tuple[tuple[int, ...], dict[str, Any]]] = {  # shape of an item, settings
    "MLP, 64 features": ((64,), {"model": "mlp", "batch": 32}),
    "LeNet5, 28 x 28": ((1, 28, 28), {"model": "lenet5", "batch": 32}),
    "ResNet-18 with group norm, 32 x 32": ((3, 32, 32), {"model": "resnet18", "model_options": {"norm": "group"}}),
}
RUN: dict[str, Any] = {
    "rounds": 3, "clients": 20, "join": 0.5, "epochs": 1, "lr": 0.01, "partition": "iid", "watch": False,
    "eval_every": 3, "final_trained": False, "seed": 0,
}  # fmt: skip


def made_up(shape: tuple[int, ...], samples: int) -> Dataset:
    """Return items of ten classes with noise."""
    rng = np.random.default_rng(0)
    y = rng.integers(0, 10, samples)
    centres = rng.normal(size=(10, *shape)).astype(np.float32)
    return from_arrays(centres[y] + rng.normal(size=(samples, *shape)).astype(np.float32), y, name="made-up")


def measured(data: Dataset, device: str, engine: str, more: dict[str, Any], folder: Path) -> tuple[float, float]:
    """Return the seconds of the last round, and the loss of the personal models at the end."""
    ends: list[float] = []
    run = coterie.run(
        "fedper", data, out=folder, device=device, engine=engine, workers=1, on_round=lambda p: ends.append(p.seconds),
        **{**RUN, **more},
    )  # fmt: skip
    return ends[-2], float(run.events[-1]["eval"]["personal/test"]["loss"])  # the last round also evaluates


def machine(device: str) -> str:
    """Return the names and versions of what computes."""
    place = find_devices(device)[0]
    name = torch.cuda.get_device_name(place) if place.type == "cuda" else str(place)
    cpu = platform.processor() or platform.machine()
    return f"{name}; processor {cpu}; PyTorch {torch.__version__}, CUDA {torch.version.cuda}; {platform.platform()}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--samples", type=int, default=6000)
    parser.add_argument("--precision", default="float32")
    given = parser.parse_args()
    print(f"{machine(given.device)}; {given.precision}; {time.strftime('%Y-%m-%d')}\n")
    print("| model | device | engine | seconds per round of 10 clients | loss after 3 rounds |\n|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        for name, (shape, more) in WORKLOADS.items():
            data = made_up(shape, given.samples)
            for device, engine in ((given.device, "stack"), (given.device, "loop"), ("cpu", "loop")):
                precision = {} if device == "cpu" else {"precision": given.precision}
                out = Path(folder) / f"{len(list(Path(folder).iterdir()))}"
                seconds, loss = measured(data, device, engine, {**more, **precision}, out)
                print(f"| {name} | {device} | {engine} | {seconds:.3f} | {loss:.5f} |", flush=True)


if __name__ == "__main__":
    main()

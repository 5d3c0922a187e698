"""Measure what FedGMH costs a client: storage, and the time of the pass for mean features beside a local epoch.

python benchmarks/fedgmh_cost.py

The network is the paper's (32 x 32 pictures in colour). Storage is that of the client's state after a round, and of the
heads that it receives for its labels. Times are medians of repeated passes over random pictures on one thread.
"""

import statistics
import time
from collections.abc import Callable

import torch

from coterie.config import settings
from coterie.core.method import Moment
from coterie.core.tree import Tree
from coterie.data.dataset import Dataset
from coterie.engine.session import Objects, Session, prepare
from coterie.train.optimisers import Optimiser
from coterie.train.trainer import train

SAMPLES, BATCH = 400, 100


def session(classes: int, labels: int) -> Session:
    """Return FedGMH with one client that has this many of the classes."""
    rng = torch.Generator().manual_seed(0)
    x = torch.rand(SAMPLES + 100, 3, 32, 32, generator=rng)
    y = torch.arange(len(x)) % labels
    test = torch.arange(len(x)) >= SAMPLES
    data = Dataset("pictures", x, y, tuple(map(str, range(classes))), test)
    chosen = settings(
        "fedgmh", model="fedgmh-cnn", clients=1, partition="iid", test_from="official", pool="train", batch=BATCH,
        epochs=1, lr=0.01, val_share=0.0, min_size=1,
    )  # fmt: skip
    return prepare(chosen, objects=Objects(dataset=data))


def kilobytes(tree: Tree) -> float:
    return sum(v.numel() * v.element_size() for v in tree.values()) / 1024


def storage(classes: int, labels: int) -> str:
    """Return a row: model, mask and received heads of a client in KB, and what is added to the model in percent."""
    made = session(classes, labels)
    method, data = made.method, made.federation.data(0)
    server, state = method.setup(), method.init_client(data)
    state, upload = method.end(state, train(method.ctx, Optimiser(), [], method.begin(state, {}, data, 1), data, 1)[0],
                               data, 1)  # fmt: skip
    server = {**server, "labels": {0: upload.tree["x:labels"]}}
    heads = method.down(server, [0], 2).to(0)
    method.schema("down", Moment(server, 0, 2)).check(heads, "the download")
    model, mask, received = kilobytes(state["own"]), kilobytes(state["mask"]), kilobytes(heads)
    added = 100 * (mask + received) / model
    return f"| {classes} | {labels} | {model:,.2f} | {mask:.2f} | {received:,.2f} | {added:.1f} % |"


def seconds(work: Callable[[], object], times: int = 7) -> float:
    def once() -> float:
        start = time.perf_counter()
        work()
        return time.perf_counter() - start

    once()  # warm-up
    return statistics.median(once() for _ in range(times))


def main() -> None:
    print("| classes | labels of the client | model (KB) | mask (KB) | received heads (KB) | added |")
    print("|---|---|---|---|---|---|")
    for classes, labels in ((10, 2), (10, 10), (100, 5), (100, 100)):
        print(storage(classes, labels))

    made = session(10, 2)
    method, data = made.method, made.federation.data(0)
    state = method.init_client(data)
    begin = method.begin(state, {}, data, 1)
    epoch = seconds(lambda: train(method.ctx, Optimiser(), method.phases(1), begin, data, 1))
    features = seconds(lambda: method.mean_features(state["own"], data))
    share = features / (2 * epoch + features)
    print(f"\na local epoch of {SAMPLES} pictures: {1000 * epoch:.0f} ms; the pass for mean features: "
          f"{1000 * features:.0f} ms, {100 * features / epoch:.0f} % of an epoch and {100 * share:.0f} % of a round "
          "of two epochs")  # fmt: skip


if __name__ == "__main__":
    main()

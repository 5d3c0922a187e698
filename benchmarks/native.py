"""Compare training steps (forward, cross-entropy, backward, SGD) with PyTorch's operations and with the native block.

Both take turns in one process on one thread; the table shows medians and the median of the ratios of neighbours.
Times are processor times, so that other work on the machine does not count.
Usage: python benchmarks/native.py [--repeats 15] [--steps 10] [--profile]
"""

import argparse
import time
from collections.abc import Callable
from itertools import pairwise
from statistics import median

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from coterie.train import native

Shape = tuple[int, int, int]


class Net(nn.Module):
    """A network of 5x5 convolutions, then fully connected layers."""

    def __init__(self, shape: Shape, convs: list[int], hidden: list[int], bn: bool):
        super().__init__()
        channels, side, _ = shape
        self.convs = nn.ModuleList()
        self.norms = nn.ModuleList()
        for out in convs:
            self.convs.append(nn.Conv2d(channels, out, 5))
            self.norms.append(nn.BatchNorm2d(out) if bn else nn.Identity())
            channels, side = out, (side - 4) // 2
        widths = [channels * side * side, *hidden, 10]
        self.fcs = nn.ModuleList(nn.Linear(a, b) for a, b in pairwise(widths))

    def forward(self, x: Tensor) -> Tensor:
        for conv, bn in zip(self.convs, self.norms, strict=True):
            if native.enabled():
                x = native.block(conv, bn if isinstance(bn, nn.BatchNorm2d) else None, x)
            else:  # in the usual order
                x = F.max_pool2d(F.relu(bn(conv(x))), 2)
        x = x.flatten(1)
        for fc in self.fcs[:-1]:
            x = F.relu(fc(x))
        return self.fcs[-1](x)


CASES: list[tuple[str, Shape, list[int], list[int], bool, int]] = [
    (f"LeNet5{' BN' if bn else ''} {shape[0]}x{shape[1]}x{shape[2]}", shape, [6, 16], [120, 84], bn, batch)
    for bn in (True, False)
    for shape in ((1, 28, 28), (3, 32, 32))
    for batch in (10, 32)
] + [
    (f"CNN {a}-{b} 3x32x32", (3, 32, 32), [a, b], hidden, False, batch)
    for a, b, hidden in ((32, 64, [512]), (64, 64, [384, 192]))
    for batch in (10, 32)
]


def stepper(shape: Shape, convs: list[int], hidden: list[int], bn: bool, batch: int) -> Callable[[], None]:
    torch.manual_seed(1)
    net = Net(shape, convs, hidden, bn)
    optimiser = torch.optim.SGD(net.parameters(), lr=0.01)
    x, y = torch.randn(batch, *shape), torch.randint(0, 10, (batch,))

    def step() -> None:
        optimiser.zero_grad()
        F.cross_entropy(net(x), y).backward()
        optimiser.step()

    return step


def clock(step: Callable[[], None], steps: int, on: bool) -> float:
    native.enable(on)
    start = time.process_time()
    for _ in range(steps):
        step()
    return (time.process_time() - start) / steps * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument("--profile", action="store_true", help="profile a native step")
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(native.native_status())
    print(f"{'case':<24}{'batch':>6}{'plain ms':>10}{'native ms':>11}{'native/plain':>14}{'times faster':>14}")
    for name, *case in CASES:
        if options.only not in name:
            continue
        step, batch = stepper(*case), case[-1]
        for on in (False, True):
            clock(step, 3, on)
        pairs = [(clock(step, options.steps, False), clock(step, options.steps, True)) for _ in range(options.repeats)]
        plain, mine = (median(column) for column in zip(*pairs, strict=True))
        ratio = median(b / a for a, b in pairs)
        print(f"{name:<24}{batch:>6}{plain:>10.3f}{mine:>11.3f}{ratio:>14.3f}{1 / ratio:>14.2f}", flush=True)
        if options.profile:
            with torch.profiler.profile() as profile:
                clock(step, options.steps, True)
            print(profile.key_averages().table(sort_by="self_cpu_time_total", row_limit=14, max_name_column_width=40))


if __name__ == "__main__":
    main()

"""The choice of the training engine: client by client or stacked. `auto` tries both in the first round that trains."""

import logging
import time
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from coterie.core.context import ClientData, ClientId, State
from coterie.core.method import Phase, Start, Trained, started
from coterie.core.rng import torch_rng
from coterie.engine.edge_steps import downloads
from coterie.errors import CoterieError
from coterie.train import native
from coterie.train.clients import Clients
from coterie.train.trainer import train
from coterie.train.vmap.phase import LARGEST_STACK, Member
from coterie.train.vmap.trainer import Stacker

Asked = Literal["loop", "stack", "auto"]
TRIED = 8  # number of participants in the trial
EXCHANGED = 64  # number of participants in earlier rounds without training
WORTH = 0.9  # stacking is chosen if it takes less than this share of the loop's time
SPLIT = 0.65  # two processes are not worth it if half of the clients take more than this share of the total time


@dataclass(frozen=True)
class Choice:
    engine: Literal["loop", "stack"]
    why: str
    workers: int | None = None  # number of processes, if the user left it open; it decides on the stacks
    native: str = ""  # instruction set of the kernels that train and score; empty: PyTorch's operations do
    by_pytorch: tuple[str, ...] = ()  # work left to PyTorch's operations, with the reason

    @property
    def sentence(self) -> str:
        return f"engine {self.engine}: {self.why}"


def choose_engine(clients: Clients, asked: Asked | None, device: str = "cpu") -> Choice:
    """Return the engine of a new run; engines agree only up to rounding, so a resumed run keeps its own.

    Only the processor is tried, because a trial on another device would start that device in this process.
    """
    if asked == "loop" or (asked is None and device == "cpu"):
        return Choice("loop", "as asked")
    if clients.others:
        if asked == "stack":
            raise CoterieError("engine = stack trains clients of one model together; here their models differ")
        return Choice("loop", "clients have different models")
    noised = clients.guard is not None and clients.guard.setting.unit == "example"
    private = "steps are noised sample by sample (dp is set)" if noised else ""
    if why := private or clients.rule.loop_only or clients.method.ctx.loop_only:
        if asked == "stack":
            raise CoterieError(f"engine = stack is not possible: {why}")
        return Choice("loop", why)
    if device != "cpu":
        return Choice("stack", "as asked" if asked == "stack" else f"the default on {device}")
    if asked == "auto" and clients.method.ctx.net.layout.of_kind("conv"):
        return Choice("loop", "convolutions of many clients at once are slower than one after the other")
    try:
        at, loop, stack, half, alone = _timed(clients)
    except Exception as e:  # a failed trial must not stop a run, because the loop always works
        if asked == "stack":
            return Choice("stack", "as asked")
        return Choice("loop", f"stacking could not be tried ({(str(e).splitlines() or [type(e).__name__])[0][:80]})")
    left = f"; phase {min(alone) + 1} client by client: {alone[min(alone)]}" if alone else ""
    ctx = clients.method.ctx
    one = half > SPLIT * stack and ctx.join * len(ctx.clients) <= LARGEST_STACK
    left += "; one process, because half of the clients take nearly as long as all" if one else ""
    if asked == "stack":
        return Choice("stack", f"as asked{left}", 1 if one else None)
    if len(alone) == len(clients.method.phases(at)):
        return Choice("loop", f"nothing can be stacked: {alone[min(alone)]}")
    times = f"{1000 * stack:.0f} ms stacked, {1000 * loop:.0f} ms client by client for an epoch of {TRIED} clients"
    return Choice("stack", f"{times}{left}", 1 if one else None) if stack < WORTH * loop else Choice("loop", times)


def with_native(choice: Choice, clients: Clients, example: Tensor) -> Choice:
    """Return the choice with the kernels that a new run trains and scores with; `example` are two items."""
    kernels, natives = native.kernels(), clients.natives
    if kernels is None or natives is None or choice.engine != "loop":
        why = native.native_status() if kernels is None else "PyTorch's operations train stacks and noised steps"
        return replace(choice, by_pytorch=(why,))
    if clients.others:
        return replace(choice, native=kernels.instructions)
    left = natives.described(clients.method, example)
    for sentence in left:
        logging.getLogger("coterie").info("native code: %s", sentence)
    return replace(choice, native=kernels.instructions, by_pytorch=tuple(left))


def _timed(clients: Clients) -> tuple[int, float, float, float, dict[int, str]]:
    """Return the tried round, three durations of one epoch of a few clients, and why phases cannot be stacked.

    The durations in seconds are for training one by one, stacked, and with half of the clients stacked.
    """
    ctx = clients.method.ctx
    t, starts = _first_training(clients)
    phases = [_short(p) for p in clients.method.phases(t)]
    stacker = Stacker(ctx, clients.rule, patient=False)

    def one_by_one(members: list[tuple[Start, ClientData]]) -> None:
        for start, data in members:
            train(ctx, clients.rule, phases, start, data, t, natives=clients.natives)

    def stacked(members: list[tuple[Start, ClientData]]) -> None:
        stacker.train(phases, [Member.of(*s) for s in members], t)

    took = []
    for way, members in ((one_by_one, starts), (stacked, starts), (stacked, starts[: max(1, len(starts) // 2)])):
        for _ in range(3):  # the first pass warms up and traces
            begin = time.perf_counter()
            way(members)
            last = time.perf_counter() - begin
        took.append(last)
    return t, took[0], took[1], took[2], {k: v for k, v in stacker.reasons.items() if isinstance(k, int)}


def _first_training(clients: Clients) -> tuple[int, list[tuple[Start, ClientData]]]:
    """Return the first round with phases and the starts of a few participants; earlier rounds do not train."""
    method, ctx = clients.method, clients.method.ctx
    server = method.setup()
    states: dict[ClientId, State] = {}
    for t in range(0 if method.opening() else 1, ctx.planned_rounds + 1):
        trains = bool(method.phases(t))
        ids = sorted(set(method.sample(server, t, torch_rng(ctx.seed, "sample", t))))
        ids = ids[: TRIED if trains else EXCHANGED]
        received = downloads(method, server, {}, method.down(server, ids, t), ids, t)
        starts: list[tuple[Start, ClientData]] = []
        uploads = []
        for i in ids:
            data = clients.federation.data(i)
            state = states[i] if i in states else method.init_client(data)
            shared, own = received[i]
            start = started(method, state, {**shared, **own}, data, t)
            starts.append((start, data))
            if not trains:
                with torch.no_grad():
                    states[i], upload = method.end(state, Trained(start.params, start.extras), data, t)
                uploads.append(replace(upload, sender=i, samples=len(data.train)))
        if trains:
            return t, starts
        server = method.aggregate(server, uploads, t)
    raise ValueError("it trains nothing")


def _short(phase: Phase) -> Phase:
    """Return the phase limited to one epoch or ten steps."""
    return replace(phase, steps=min(10, phase.steps)) if phase.steps is not None else replace(phase, epochs=1.0)

"""Which engine a run uses: client by client or stacked. `auto` tries both on participants of the first round."""

import json
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal

from coterie import codec
from coterie.errors import CoterieError
from coterie.method import ClientData, Extras, Phase
from coterie.rng import torch_rng
from coterie.train.clients import Device
from coterie.train.stack import Stacker
from coterie.train.stack_run import LARGEST, Member
from coterie.train.trainer import train
from coterie.tree import Tree

Asked = Literal["loop", "stack", "auto"]
Start = tuple[Tree, Extras, ClientData]
FILE = "engine.json"
TRIED = 8  # participants
WORTH = 0.9  # of the loop's time: below, stacking is taken
SPLIT = 0.65  # of the time of all clients: if half of them take more, sharing them out between processes does not pay


@dataclass(frozen=True)
class Choice:
    engine: Literal["loop", "stack"]
    why: str
    workers: int | None = None  # processes, where the user leaves it open; they decide who shares a stack

    @property
    def sentence(self) -> str:
        return f"engine {self.engine}: {self.why}"


def settle(folder: Path, device: Device, asked: Asked, resume: bool) -> Choice:
    """The engine of the run in `folder`: what it began with, or a new choice, written down there.

    Engines agree to rounding only, so a run that goes on must not change its own."""
    path = folder / FILE
    if resume:
        kept = Choice(**json.loads(path.read_text())) if path.exists() else Choice("loop", "as asked")
        return replace(kept, why="as the run began") if asked not in ("auto", kept.engine) else kept
    choice = Choice("loop", "as asked") if asked == "loop" else _choose(device, asked)
    if asked != "loop":
        codec.write_atomic(path, json.dumps(asdict(choice)).encode() + b"\n")
    return choice


def _choose(device: Device, asked: Asked) -> Choice:
    if device.rule.keep:
        if asked == "stack":
            raise CoterieError("engine = stack trains without memory of earlier rounds; opt_state = keep needs loop")
        return Choice("loop", "optimisers keep their memory, which stacks do not have")
    if asked == "auto" and device.method.ctx.net.layout.of_kind("conv"):
        return Choice("loop", "convolutions of many clients at once are slower than one after the other")
    try:
        loop, stack, half, alone = _timed(device)
    except Exception as e:  # a trial must never stop a run: the loop always works
        if asked == "stack":
            return Choice("stack", "as asked")
        return Choice("loop", f"stacking could not be tried ({(str(e).splitlines() or [type(e).__name__])[0][:80]})")
    left = f"; phase {min(alone) + 1} client by client: {alone[min(alone)]}" if alone else ""
    ctx = device.method.ctx
    one = half > SPLIT * stack and ctx.join * len(ctx.clients) <= LARGEST
    left += "; one process, because half of the clients take nearly as long as all" if one else ""
    if asked == "stack":
        return Choice("stack", f"as asked{left}", 1 if one else None)
    times = f"{1000 * stack:.0f} ms stacked, {1000 * loop:.0f} ms client by client for an epoch of {TRIED} clients"
    return Choice("stack", f"{times}{left}", 1 if one else None) if stack < WORTH * loop else Choice("loop", times)


def _timed(device: Device) -> tuple[float, float, float, dict[int, str]]:
    """Seconds for one epoch of a few clients: one by one, stacked, half of them stacked; and why phases cannot be."""
    method, ctx = device.method, device.method.ctx
    t = 0 if method.opening() else 1
    phases = [_short(p) for p in method.phases(t)]
    if not phases:
        raise ValueError("its first round trains nothing")
    server = method.setup()
    ids = sorted(set(method.sample(server, t, torch_rng(ctx.seed, "sample", t))))[:TRIED]
    sent = method.down(server, ids, t)
    starts: list[Start] = []
    for i in ids:
        data = device.federation.data(i)
        starts.append((*method.begin(method.init_client(data), sent.to(i), data, t), data))
    stacker = Stacker(ctx, device.rule, patient=False)

    def one_by_one(members: list[Start]) -> None:
        for params, extras, data in members:
            train(ctx, device.rule, phases, params, extras, data, t)

    def stacked(members: list[Start]) -> None:
        stacker.train(phases, [Member(*s) for s in members], t)

    took = []
    for way, members in ((one_by_one, starts), (stacked, starts), (stacked, starts[: max(1, len(starts) // 2)])):
        for _ in range(3):  # the first warms up and traces
            begin = time.perf_counter()
            way(members)
            last = time.perf_counter() - begin
        took.append(last)
    return took[0], took[1], took[2], {k: v for k, v in stacker.reasons.items() if isinstance(k, int)}


def _short(phase: Phase) -> Phase:
    """At most one epoch or ten steps of it."""
    return replace(phase, steps=min(10, phase.steps)) if phase.steps is not None else replace(phase, epochs=1.0)

"""Which engine a run uses: client by client or stacked. `auto` tries both on participants of the first round."""

import json
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal

from coterie import codec
from coterie.engine.device import Device
from coterie.engine.stack import Stacker
from coterie.engine.stack_run import Member
from coterie.engine.trainer import train
from coterie.method import Phase
from coterie.rng import torch_rng

Asked = Literal["loop", "stack", "auto"]
FILE = "engine.json"
TRIED = 8  # participants
WORTH = 0.9  # of the loop's time: below, stacking is taken


@dataclass(frozen=True)
class Choice:
    engine: Literal["loop", "stack"]
    why: str

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
    if asked == "auto" and device.method.ctx.net.layout.of_kind("conv"):
        return Choice("loop", "convolutions of many clients at once are slower than one after the other")
    try:
        loop, stack, alone = _timed(device)
    except Exception as e:  # a trial must never stop a run: the loop always works
        if asked == "stack":
            return Choice("stack", "as asked")
        return Choice("loop", f"stacking could not be tried ({(str(e).splitlines() or [type(e).__name__])[0][:80]})")
    left = f"; phase {min(alone) + 1} client by client: {alone[min(alone)]}" if alone else ""
    if asked == "stack":
        return Choice("stack", f"as asked{left}")
    times = f"{1000 * stack:.0f} ms stacked, {1000 * loop:.0f} ms client by client for an epoch of {TRIED} clients"
    return Choice("stack" if stack < WORTH * loop else "loop", f"{times}{left}")


def _timed(device: Device) -> tuple[float, float, dict[int, str]]:
    """Seconds of both for one epoch of a few clients, and why some phases cannot be stacked."""
    method, ctx = device.method, device.method.ctx
    t = 0 if method.opening() else 1
    phases = [_short(p) for p in method.phases(t)]
    if not phases:
        raise ValueError("its first round trains nothing")
    server = method.setup()
    ids = sorted(set(method.sample(server, t, torch_rng(ctx.seed, "sample", t))))[:TRIED]
    sent = method.down(server, ids, t)
    starts = []
    for i in ids:
        data = device.federation.data(i)
        starts.append((*method.begin(method.init_client(data), sent.to(i), data, t), data))
    stacker = Stacker(ctx, device.rule, patient=False)
    took = []
    for stacked in (False, True):
        for _ in range(2):  # the first warms up and traces
            begin = time.perf_counter()
            if stacked:
                stacker.train(phases, [Member(*s) for s in starts], t)
            else:
                for s in starts:
                    train(ctx, device.rule, phases, *s, t)
            last = time.perf_counter() - begin
        took.append(last)
    return took[0], took[1], {k: v for k, v in stacker.reasons.items() if isinstance(k, int)}


def _short(phase: Phase) -> Phase:
    """At most one epoch or ten steps of it."""
    return replace(phase, steps=min(10, phase.steps)) if phase.steps is not None else replace(phase, epochs=1.0)

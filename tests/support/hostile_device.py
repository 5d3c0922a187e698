"""Devices that send invalid answers or have other versions; tests run this file as a process."""

import argparse
import logging
import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from coterie.engine import codec
from coterie.engine.messages import TrainAnswer
from coterie.federation.device import DeviceHandler, join
from coterie.federation.localhost import processes
from coterie.federation.protocol import plan
from coterie.federation.protocol import version as protocol
from coterie.federation.protocol.messages import Attached, DeviceJob, Hello
from coterie.federation.transport.node import OutgoingAnswer

MARK = 0.015625  # first value of a marked upload
HONEST = (1, 5)
WRONGS = {  # round -> kind of error, and words of the cloud's reason
    2: ("shape", "of shape"),
    3: ("replay", "it is a reply of round 1, asked was round 3"),
    4: ("samples", "the hello reported"),
}


class Hostile(DeviceHandler):
    def answer(self, kind: str, round: int, job: DeviceJob) -> Any:
        answer = super().answer(kind, round, job)
        what = WRONGS.get(round, ("", ""))[0]
        if not isinstance(answer, TrainAnswer):
            return answer
        if what == "shape":
            name = max(answer.upload, key=lambda k: answer.upload[k].numel())
            return replace(answer, upload={**answer.upload, name: torch.zeros(3)})
        return replace(answer, samples=10**9) if what == "samples" else answer


class Huge(DeviceHandler):
    """Sends finite numbers that would spoil all training."""

    def answer(self, kind: str, round: int, job: DeviceJob) -> Any:
        answer = super().answer(kind, round, job)
        if not isinstance(answer, TrainAnswer):
            return answer
        return replace(answer, upload={k: torch.full_like(v, 3e38) for k, v in answer.upload.items()})


class Labels(DeviceHandler):
    """Claims in FedPC too many samples of a class, then too many classes, then more than a message can hold."""

    lies = 0

    def answer(self, kind: str, round: int, job: DeviceJob) -> Any:
        answer = super().answer(kind, round, job)
        if not isinstance(answer, TrainAnswer) or "x:counts" not in answer.upload:
            return answer
        self.lies += 1
        own = answer.upload
        if self.lies == 1:
            return replace(answer, upload={**own, "x:counts": torch.full_like(own["x:counts"], 2**31 - 1)})
        many = {k: v for k, v in own.items() if k.startswith("x:")}
        times = 2 if self.lies == 2 else 2**14
        return replace(answer, upload={**own, **{k: torch.cat([v] * times) for k, v in many.items()}})


class Slow(DeviceHandler):
    """Takes four seconds for a round while there is a file `hold` next to the folder of all states.

    A file `busy-NAME` next to it shows that a request has arrived.
    """

    def answer(self, kind: str, round: int, job: DeviceJob) -> Any:
        until = time.monotonic() + 4.0
        if kind == "train":
            (self.state.parent.parent / f"busy-{self.state.name}").touch()
        while kind == "train" and time.monotonic() < until and (self.state.parent.parent / "hold").exists():
            time.sleep(0.05)
        return super().answer(kind, round, job)


class Marked(DeviceHandler):
    """Sends uploads with the first value that makes broken_cloud.py fail."""

    def answer(self, kind: str, round: int, job: DeviceJob) -> Any:
        answer = super().answer(kind, round, job)
        if not isinstance(answer, TrainAnswer):
            return answer
        name, first = next(iter(answer.upload.items()))
        marked = first.clone()
        marked.view(-1)[0] = MARK
        return replace(answer, upload={**answer.upload, name: marked})


class Hijacker(DeviceHandler):
    """Claims to be an edge with device-0 behind it, and that device-2 is refused."""

    def handle(self, kind: str, round: int, shared: memoryview | None, own: memoryview) -> memoryview:
        return codec.pack(Attached({"device-0": Hello(0, 10**9)}, {"device-2": "no"}))


class DiesWhenCalled(DeviceHandler):
    """Announces its upload, and is gone when it is called for the rest, from round 2 on."""

    def answer(self, kind: str, round: int, job: DeviceJob) -> Any:
        if kind == "send" and round >= 2:
            os._exit(9)
        return super().answer(kind, round, job)


HANDLERS = {"huge": Huge, "marked": Marked, "labels": Labels, "slow": Slow, "dies": DiesWhenCalled}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("mode", choices=["wrong", "hijack", "protocol", "package", *HANDLERS])
    for name in ("--cloud", "--ca", "--key", "--data", "--state", "--client"):
        parser.add_argument(name, required=True)
    a, _ = parser.parse_known_args()
    processes.die_with_parent()
    logging.basicConfig(level=logging.INFO)
    if a.mode in ("protocol", "package"):
        protocol.version = plan.version = lambda name: "9.9.9"  # type: ignore[attr-defined]
    if a.mode == "protocol":
        protocol.PROTOCOL = 99
    honest = OutgoingAnswer.offer.fget  # type: ignore[attr-defined]

    def offer(self: OutgoingAnswer) -> Any:
        message = honest(self)
        if a.mode == "wrong" and self.request.kind == "train" and self.request.round == 3:
            message.answer.round = 1
        return message

    OutgoingAnswer.offer = property(offer)  # type: ignore[assignment]
    handler = {"hijack": Hijacker, "wrong": Hostile, **HANDLERS}.get(a.mode, DeviceHandler)
    join(a.cloud, Path(a.ca), Path(a.key), handler(a.data, Path(a.state), int(a.client)))


if __name__ == "__main__":
    main()

"""What runs in a process of the cluster: a device that was built once, and the states it leaves on its node."""

import copy
import traceback
import warnings
from dataclasses import replace
from importlib.metadata import version
from typing import Any

import numpy as np
import torch

from coterie import native
from coterie.errors import CoterieError
from coterie.flat import Packed, pack, unpack
from coterie.train.clients import Device

Reply = tuple[str, Packed | str]  # "r" and an answer, "e" and a sentence for the user, or "x" and a traceback


def fingerprint() -> dict[str, str]:
    """What has to be equal on all machines, or results would not be."""
    return {"coterie": version("coterie"), "torch": torch.__version__, "convolutions": native.status()}


def without_items(device: Device) -> Device:
    """The same device with an empty data set: the items travel apart, once per machine."""
    federation = copy.copy(device.federation)
    federation.dataset = replace(federation.dataset, x=federation.dataset.x[:0].clone())
    return replace(device, federation=federation)


class Member:
    """An actor. `x` are the data set's items, which all actors of a machine share."""

    def __init__(self, device: Device, x: np.ndarray, native_wanted: bool):
        torch.set_num_threads(1)
        native.enable(native_wanted)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the items are read-only, and nobody writes to them
            items = torch.from_numpy(x)
        device.federation.dataset = replace(device.federation.dataset, x=items)
        self.device = device

    def hello(self) -> dict[str, str]:
        return fingerprint()

    def handle(self, request: Packed, *states: Packed) -> Any:
        """The reply, and after it one object per job with the client's new state (None where there is none)."""
        value = unpack(request)
        jobs = value["jobs"]
        for job in jobs:
            if "held" in job:
                job["state"] = unpack(states[job.pop("held")])
        left: list[Packed | None] = [None] * len(jobs)
        try:
            answers = self.device.handle(value)
            for i, answer in enumerate(answers):
                if isinstance(answer, dict) and answer.get("state"):
                    left[i] = pack(answer.pop("state"))
                    answer["held"] = i
            reply: Reply = ("r", pack(answers))
        except CoterieError as e:
            reply = ("e", str(e))
        except Exception:
            reply = ("x", traceback.format_exc())
        return [reply, *left]

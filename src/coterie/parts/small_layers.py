"""Small extra layers as entries of a tree (FedCP's policy, GPFL's valve, FedRoD's hyper-network)."""

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from coterie.core.tree import Tree


def linear(name: str, inner: int, out: int, rng: torch.Generator) -> Tree:
    """Return the initial values of a linear layer, drawn as PyTorch draws them."""
    bound = inner**-0.5
    weight, bias = (torch.rand(shape, generator=rng) * (2 * bound) - bound for shape in ((out, inner), (out,)))
    return {f"{name}.weight": weight, f"{name}.bias": bias}


def layer_norm(name: str, width: int) -> Tree:
    return {f"{name}.weight": torch.ones(width), f"{name}.bias": torch.zeros(width)}


def run_linear(params: Mapping[str, Tensor], name: str, x: Tensor) -> Tensor:
    return F.linear(x, params[f"{name}.weight"], params[f"{name}.bias"])


def run_layer_norm(params: Mapping[str, Tensor], name: str, x: Tensor) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], params[f"{name}.weight"], params[f"{name}.bias"])

"""Rotate pictures: exactly by multiples of 90 degrees, otherwise by interpolation with zero fill."""

import math
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

Interp = Literal["bilinear", "nearest"]


def rotate(x: Tensor, degrees: float, interp: Interp = "bilinear") -> Tensor:
    """Rotate x [n, C, S, S] counter-clockwise about the centre; multiples of 90 degrees keep the type."""
    quarters = degrees / 90
    if quarters == round(quarters):
        return torch.rot90(x, int(quarters) % 4, dims=(2, 3)).contiguous()
    angle = math.radians(degrees)
    # This matrix maps output to input coordinates; the signs are such because y points down.
    theta = torch.tensor([[math.cos(angle), -math.sin(angle), 0.0], [math.sin(angle), math.cos(angle), 0.0]])
    grid = F.affine_grid(theta.expand(len(x), 2, 3), list(x.shape), align_corners=False)
    return F.grid_sample(x.float(), grid, mode=interp, padding_mode="zeros", align_corners=False)

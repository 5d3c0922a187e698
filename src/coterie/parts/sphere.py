"""Class prototypes on the unit sphere (FedNH): where they start and how they move."""

import torch
import torch.nn.functional as F
from torch import Tensor


def spread_rows(rows: int, width: int, rng: torch.Generator, steps: int = 500, sharpness: float = 20.0) -> Tensor:
    """Unit rows [rows, width]: orthonormal if they fit, else with their largest cosines pushed down."""
    draw = torch.randn(rows, width, generator=rng, dtype=torch.float64)
    if rows <= width:
        basis: Tensor = torch.linalg.qr(draw.T).Q
        return basis.T.float().contiguous()
    eye = torch.eye(rows, dtype=torch.bool)
    P = F.normalize(draw, dim=1)
    for _ in range(steps):
        # gradient of the soft maximum of the cosines in a row, followed by a return to the sphere
        pull = (sharpness * (P @ P.T)).masked_fill(eye, -torch.inf).softmax(1)
        P = F.normalize(P - 0.1 * (pull + pull.T) @ P, dim=1)
    return P.float()


def move_rows(P: Tensor, directions: Tensor, counts: Tensor, rho: float) -> Tensor:
    """unit(rho P + (1 - rho) M), M the mean of directions [n, classes, d] by counts [n, classes].

    Rows that nobody has an opinion on come back bit for bit, and all of them with rho = 1.
    """
    mean = torch.einsum("nk,nkd->kd", counts.to(directions), directions)
    moved = F.normalize(rho * P + (1 - rho) * F.normalize(mean, dim=1), dim=1)
    still = (mean.norm(dim=1, keepdim=True) == 0) | (rho == 1)
    return torch.where(still, P, moved)

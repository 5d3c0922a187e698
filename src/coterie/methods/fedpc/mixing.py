"""How groups of FedPC learn from each other: by the similarity of their prototypes."""

from typing import Literal

import torch
from torch import Tensor

from coterie.errors import unknown
from coterie.parts.prototypes import Prototypes, from_sums, one_hot
from coterie.parts.similarity import map_similarity, normalise_rows, softmax_rows

GroupMap = Literal["clip", "shift01", "softmax"]


def group_weights(prototypes: Prototypes, sim_map: GroupMap = "clip") -> Tensor:
    """Return rho [j, j], equation (6): how much of group q enters group j; rows sum to 1, no common class: 0."""
    cos, common = group_cosine(prototypes)
    if sim_map == "softmax":
        return softmax_rows(cos, known=common)
    if sim_map not in ("clip", "shift01"):
        raise unknown("sim_map", sim_map, ("clip", "shift01", "softmax"))
    similarity = torch.where(common, map_similarity(cos, sim_map), 0.0)
    return normalise_rows(similarity, torch.eye(len(cos), device=cos.device))


def group_cosine(prototypes: Prototypes) -> tuple[Tensor, Tensor]:
    """Return the cosines M [j, j] of prototype sets, equation (5), and which pairs of groups have common classes.

    Sets are flattened over their common classes; the diagonal is 1.
    """
    value, mask = prototypes
    held = mask.double()
    p = value.double() * held.unsqueeze(-1)
    product = p.flatten(1) @ p.flatten(1).T
    norms = (p.square().sum(-1) @ held.T).sqrt()  # [j, q]: norm of j over the classes of q
    scale = norms * norms.T
    cos = torch.where(scale > 0, product / torch.where(scale > 0, scale, 1.0), 0.0).clamp(-1, 1)
    eye = torch.eye(len(value), dtype=torch.bool, device=value.device)
    return torch.where(eye, 1.0, cos), (held @ held.T > 0) | eye


def masked_mix(rows: Tensor, prototypes: Prototypes) -> Prototypes:
    """Return mixtures [m, classes, d] of n prototype sets by rows [m, n], each class over the sets that hold it.

    With rho as rows this is equation (7). A class is present in a mixture if a set that holds it has positive weight.
    """
    value, mask = prototypes
    rows = rows.to(value)
    held = mask.to(value)
    total = rows @ held
    sums = torch.einsum("mn,nkd->mkd", rows, value * held.unsqueeze(-1))
    return from_sums(sums, total)


def group_means(prototypes: Prototypes, groups: Tensor, count: int) -> Prototypes:
    """Return means [groups, classes, d]: of each class, over the members of each of `count` groups [n] that hold it."""
    return masked_mix(one_hot(groups, count, None, torch.float64).T, prototypes)

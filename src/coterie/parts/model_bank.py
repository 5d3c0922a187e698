"""The last model of every client as one matrix on the server, so that mixing is one matrix product.

A bank is a state {"ids": [client, ...], "flat": [clients, P]}; clients that never answered have the initial model.
"""

from collections.abc import Container, Mapping, Sequence

import torch
from torch import Tensor

from coterie.core import tree as T
from coterie.core.context import ClientId, State
from coterie.core.tree import Tree


def fill(tree: Mapping[str, Tensor], ids: Sequence[ClientId]) -> State:
    """Return a bank in which all clients have the same model."""
    return {"ids": list(ids), "flat": T.flatten(tree).expand(len(ids), -1).clone()}


def rows(bank: State, ids: Sequence[ClientId]) -> Tensor:
    """Return the row numbers of these clients; all must be in the bank."""
    at = {i: r for r, i in enumerate(bank["ids"])}
    return torch.tensor([at[i] for i in ids], dtype=torch.int64)


def known(bank: State, ids: Sequence[ClientId]) -> list[ClientId]:
    """Return those of `ids` that are in the bank; the others are newcomers."""
    have = set(bank["ids"])
    return [i for i in ids if i in have]


def put(bank: State, models: Mapping[ClientId, Mapping[str, Tensor]]) -> State:
    """Return a bank with these models replaced, or added for clients that it does not have yet."""
    new = [i for i in models if i not in set(bank["ids"])]
    flat = torch.cat([bank["flat"], bank["flat"].new_zeros(len(new), bank["flat"].shape[1])]) if new else bank["flat"]
    out: State = {"ids": [*bank["ids"], *new], "flat": flat if new else flat.clone()}
    for i, r in zip(models, rows(out, list(models)).tolist(), strict=True):
        out["flat"][r] = T.flatten(models[i])
    return out


def columns(like: Mapping[str, Tensor], names: Container[str]) -> Tensor:
    """Return the mask [P] of a bank's columns that belong to these entries."""
    order = sorted(k for k, v in like.items() if v.is_floating_point())
    return torch.cat([torch.full((like[k].numel(),), k in names) for k in order])


def trees(flat: Tensor, like: Mapping[str, Tensor]) -> list[Tree]:
    """Turn rows [m, P] into trees with the names and shapes of `like`."""
    return [T.unflatten(row, like) for row in flat]

"""Models whose first channels are private: private entries, shared entries, and the two sub-networks.

A layer's private channels are its first ones, so the size of a travelling tensor tells how many there are.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from coterie.core.net import Net
from coterie.core.tree import Tree
from coterie.parts.masks import share_count


def split_axis(net: Net, name: str) -> int | None:
    """Return the axis of an entry's channels: outputs, but inputs for the head; None if it has no channels."""
    layout = net.layout
    if name in layout.group("head"):
        return 1 if name == net.head_names[0] else None
    return 0 if any(name in layout.group(kind) for kind in ("conv", "fc", "bn")) else None


def private_entries(tensor: Tensor, share: float, dim: int = 0) -> Tensor:
    """Return a mask that is set on private channels along `dim` (0: outputs; 1: inputs, for the classifier).

    The first floor(share * channels) channels are private, so that a growing share only adds to them.
    """
    channels = tensor.shape[dim]
    view = [1] * tensor.ndim
    view[dim] = -1
    private = torch.arange(channels) < share_count(share, channels)
    return private.to(tensor.device).reshape(view).expand(tensor.shape)


def masks(net: Net, like: Mapping[str, Tensor], share: float) -> Tree:
    """Return masks of private positions; an entry without channels is shared until the whole model is private."""
    out = {}
    for name, v in like.items():
        axis = split_axis(net, name)
        out[name] = (
            torch.full_like(v, share >= 1, dtype=torch.bool) if axis is None else private_entries(v, share, axis)
        )
    return out


def shared_positions(tree: Mapping[str, Tensor], private: Mapping[str, Tensor]) -> Tree:
    """Return the shared positions of each tensor as a vector; tensors without any are omitted."""
    return {k: tree[k][~mask] for k, mask in private.items() if not bool(mask.all())}


def with_shared(packed: Mapping[str, Tensor], own: Mapping[str, Tensor], private: Mapping[str, Tensor]) -> Tree:
    """Return `own` with its shared positions replaced."""
    return {k: v.masked_scatter(~private[k], packed[k]) if k in packed else v.clone() for k, v in own.items()}


def masks_of(net: Net, packed: Mapping[str, Tensor], like: Mapping[str, Tensor]) -> Tree:
    """Return the masks of a packed tree, from the sizes of its vectors."""
    out = {}
    for name, v in like.items():
        axis = split_axis(net, name)
        sent = packed[name].numel() if name in packed else 0
        if axis is None:
            out[name] = torch.full_like(v, sent == 0, dtype=torch.bool)
            continue
        count = (v.numel() - sent) * v.shape[axis] // v.numel()
        view = [-1 if a == axis else 1 for a in range(v.ndim)]
        out[name] = (torch.arange(v.shape[axis], device=v.device) < count).reshape(view).expand(v.shape)
    return out


def divides_every_layer(net: Net, private: Mapping[str, Tensor]) -> bool:
    """True if every layer has both private and shared channels; else one of the sub-networks is disconnected."""
    split = [m for k, m in private.items() if split_axis(net, k) is not None]
    return bool(split) and all(bool(m.any()) and not bool(m.all()) for m in split)


def sub_net(net: Net, params: Mapping[str, Tensor], keep: Mapping[str, Tensor]) -> Tree:
    """Return the model with all other channels silenced.

    Silenced channels output 0, so they affect nothing (for activations with f(0) = 0). Batch-norm statistics are
    clones, so that a pass changes none of the originals; entries without channels belong to both sub-networks.
    """
    stats = net.layout.group("bn_stats")
    silenced = {k: v * keep[k] for k, v in params.items() if k in keep and split_axis(net, k) is not None}
    return {**params, **silenced, **{k: params[k].clone() for k in stats}}

"""Private heads on the global body, fitted to features that are computed once."""

import torch
import torch.nn.functional as F
from torch import Tensor

from coterie.core import tree as T
from coterie.core.context import Context, Extras
from coterie.core.tree import Tree
from coterie.methods.autopilot.candidates import HEADS

MOMENTUM = 0.9  # momentum of fitting a head


def fitted(ctx: Context, w: Tree, store: Extras) -> dict[str, Tree]:
    """Return private heads, fitted by Nesterov's gradient descent on all stored samples from the global head.

    The rate is one over the features' mean square, which suits any body; it is smaller for tasks without classes.
    """
    weight, bias = ctx.net.head_names
    z, y = store["keys"], store["labels"]
    ones = z.new_ones(len(z), 1)
    a = torch.cat([z, ones], 1) if bias else z  # [n, d + 1]
    now = torch.cat([w[weight], w[bias][:, None]], 1) if bias else w[weight]  # [outputs, d + 1]
    rate = (1.0 if ctx.classes else 0.4) / float(a.square().sum(1).mean().clamp(min=1e-6))
    speed, heads = torch.zeros_like(now), {}
    for step in range(1, max(HEADS.values()) + 1):
        slope = _slope(ctx, a @ (now + MOMENTUM * speed).T, y)
        speed = MOMENTUM * speed - rate * (slope.T @ a)
        now = now + speed
        for name in (m for m, steps in HEADS.items() if steps == step):
            heads[name] = {weight: now[:, :-1], bias: now[:, -1]} if bias else {weight: now}
    return {m: T.clone(tree) for m, tree in heads.items()}


def _slope(ctx: Context, outputs: Tensor, y: Tensor) -> Tensor:
    """Return the gradient of the mean loss with respect to outputs [n, outputs], in closed form where possible."""
    if ctx.classes:
        return (outputs.softmax(1) - F.one_hot(y, ctx.classes)) / len(y)
    with torch.enable_grad():
        outputs = outputs.detach().requires_grad_()
        return torch.autograd.grad(ctx.task.loss(outputs, y), outputs)[0]

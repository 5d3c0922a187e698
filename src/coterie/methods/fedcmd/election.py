"""Election of the layer at which a network turns from its input towards the labels."""

from collections.abc import Sequence

import torch
from torch import Tensor

from coterie.core.context import Batch, Context
from coterie.core.layers import Layout, Names
from coterie.core.method import Upload
from coterie.core.tree import Tree
from coterie.parts.gaussian import best_layer, fit, layer_scores, w2, winner

BALLOT = "x:vote"


def voting_loss(
    ctx: Context, params: Tree, batch: Batch, layers: Sequence[str], use_sigma: bool
) -> tuple[Tensor, Tensor]:
    """Return the loss of a batch and, from the same pass, the mismatch of each layer."""
    logits, entering = ctx.net.inputs(params, batch.x, layers)
    return ctx.loss_of(logits, batch), output_scores(batch.x, batch.y, [*entering, logits], use_sigma)


@torch.no_grad()
def output_scores(x: Tensor, y: Tensor, outputs: Sequence[Tensor], use_sigma: bool) -> Tensor:
    """Return the mismatch [layers] of a batch, from the input of the first candidate and the output of each."""
    to = [torch.stack([w2(fit(o), fit(end), use_sigma) for o in outputs]) for end in (y, x)]
    return layer_scores(to[0], to[1])


def client_vote(scores: Sequence[Tensor], layers: int) -> Tensor:
    """Return the layer that most batches voted for, as one byte [1]; a tie goes to the smaller mean score.

    A client that saw no batch abstains: its vote is the number of layers.
    """
    if not scores:
        return torch.tensor([layers], dtype=torch.uint8)
    s = torch.stack(list(scores))  # [batches, layers]
    votes = torch.bincount(best_layer(s), minlength=s.shape[1])
    return winner(votes, s.mean(0)).reshape(1).to(torch.uint8)


def most_voted(votes: Sequence[int]) -> int:
    """Return the index of the most frequent vote; a tie goes to the deepest layer."""
    return max(range(len(votes)), key=lambda layer: (votes[layer], layer))


def round_winner(uploads: Sequence[Upload], votes: Sequence[int]) -> list[int]:
    """Return the votes [layers] with one more for the layer that most clients named; abstentions do not count."""
    ballots = [int(u.tree[BALLOT]) for u in uploads]
    counts = [ballots.count(layer) for layer in range(len(votes))]
    best = most_voted(counts) if any(counts) else -1
    return [v + (layer == best) for layer, v in enumerate(votes)]


def around(layout: Layout, layer: str) -> tuple[Names, Names, Names]:
    """Return the names of entries before, in and after the layer, in order of execution (unused ones before)."""
    own = layout.group(f"layer:{layer}")
    later = layout.layers[layout.layers.index(layer) + 1 :]
    after = Names(n for name in later for n in layout.group(f"layer:{name}"))
    return layout.group("all") - own - after, own, after

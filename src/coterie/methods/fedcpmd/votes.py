"""The choice of a client's personal layer: scores of layers, votes, and the elected layer."""

from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from coterie.core.context import ClientId
from coterie.core.layers import Layout
from coterie.core.net import Net
from coterie.core.tree import Tree
from coterie.errors import CoterieError, unknown
from coterie.methods.fedcpmd.settings import VoteSettings
from coterie.parts.gaussian import (
    Gaussian,
    Tie,
    best_layer,
    diag_mean,
    distance,
    encode_labels,
    fit,
    layer_scores,
    shift_scores,
    winner,
)

PAPER = ("js", "w2", "hellinger", "bhattacharyya")  # the four distances of the paper
CHUNK = 512  # samples of one forward pass
Ballot = dict[str, Tensor]  # votes and summed scores, both [distances, layers]


# ---- candidates ------------------------------------------------------------------------------------------------------
def candidates(layout: Layout, which: str | Sequence[str]) -> tuple[str, ...]:
    """Candidate layers in order of execution: fc, all (convolutions too), classifier, or these names."""
    weighted = _weighted(layout)
    if which == "classifier":
        return (layout.head,) if layout.head is not None else ()
    if isinstance(which, str):
        return layout.of_kind("fc") if which == "fc" else tuple(weighted)
    for name in which:
        if name not in weighted:
            raise unknown("candidate layer", name, weighted)
    return tuple(n for n in weighted if n in which)


def _weighted(layout: Layout) -> list[str]:
    return [n for n in layout.layers if n in (*layout.of_kind("conv"), *layout.of_kind("fc"))]


def check_candidates(layout: Layout, which: str | Sequence[str]) -> None:
    """A choice needs two candidates, unless the user named the only one."""
    found = candidates(layout, which)
    named = which == "classifier" or not isinstance(which, str)
    if len(found) < (1 if named else 2):
        have = f"it has {len(found)}" + (f": {', '.join(found)}" if found else "")
        every = _weighted(layout)
        ways = ["all (convolutions too)"] if len(every) > 1 and which != "all" else []
        ways += ["classifier"] if layout.head is not None else []
        ways += [f"a list of names out of {', '.join(every)}"] if every else []
        other = f"; candidates may also be {', or '.join(ways)}" if ways else ""
        raise CoterieError(
            f"FedCPMD with candidates = {which} needs a model with at least two candidate layers ({have}){other}"
        )


# ---- scores ----------------------------------------------------------------------------------------------------------
@torch.no_grad()
def layer_outputs(net: Net, params: Tree, x: Tensor, layers: Sequence[str]) -> list[Tensor]:
    """Return o_0, o_1 ... o_L [n, d]: the input of the first of `layers`, then the output of each.

    An output is taken where the next layer with weights receives it, so after the activation; the model's last layer
    gives raw logits.
    """
    order = _weighted(net.layout)
    after = dict(zip(order, [*order[1:], None], strict=True))
    taps = [layers[0], *(after[name] for name in layers)]
    inner = list(dict.fromkeys(t for t in taps if t is not None))

    pieces: dict[str | None, list[Tensor]] = {t: [] for t in taps}
    for part in torch.split(x, CHUNK):
        logits, entering = net.inputs(params, part, inner)
        for tap, value in zip([*inner, None], [*entering, logits], strict=True):
            if tap in pieces:
                pieces[tap].append(value.flatten(1))

    whole = {tap: torch.cat(piece) for tap, piece in pieces.items()}
    return [whole[t] for t in taps]


def distances(hp: VoteSettings) -> tuple[str, ...]:
    """The distances that clients vote with."""
    return PAPER if hp.distance in ("auto", "best") else (hp.distance,)


def scores(hp: VoteSettings, outputs: Sequence[Tensor], x: Tensor, y: Tensor, classes: int) -> Tensor:
    """s_l [distances, L] of outputs against inputs and labels: equation (7), Algorithm 2, lines 2, 7 and 8.

    The score eq6 is equation (6), which (7) estimates; eq6_reversed takes inputs minus labels in it.
    """
    per_dim = hp.gaussian == "diag_mean"
    inputs = fit(x, hp.fit_normalize, hp.sigma_min, per_dim=per_dim)
    labels = fit(encode_labels(y, classes, hp.label_encoding), "none", hp.sigma_min, per_dim=per_dim)
    o = [fit(t, hp.fit_normalize, hp.sigma_min, per_dim=per_dim) for t in outputs]

    rows = []
    for name in distances(hp):
        d = distance(name, hp.js_sqrt, hp.w2_sigma)
        if per_dim:
            to_y, to_x = (torch.stack([diag_mean(d, g, end) for g in o]) for end in (labels, inputs))
        else:
            all_at_once = Gaussian(torch.stack([g.mu for g in o]), torch.stack([g.sigma for g in o]))
            to_y, to_x = (d(all_at_once, end) for end in (labels, inputs))
        if hp.score == "eq6":
            rows.append(shift_scores(all_at_once, inputs, labels, d))
        elif hp.score == "eq6_reversed":
            rows.append(shift_scores(all_at_once, labels, inputs, d))
        else:
            rows.append(layer_scores(to_y, to_x, hp.score))
    return torch.stack(rows)


# ---- votes -----------------------------------------------------------------------------------------------------------
def cast(ballot: Mapping[str, Tensor] | None, scores: Tensor) -> Ballot:
    """The ballot with one vote more per row of scores [rows, distances, layers]: Algorithm 2, line 9."""
    new = {"votes": F.one_hot(best_layer(scores), scores.shape[-1]).sum(0), "sums": scores.double().sum(0)}
    return new if ballot is None else {k: ballot[k] + v for k, v in new.items()}


def leading(ballot: Mapping[str, Tensor], tie: Tie) -> Tensor:
    """The layer in the lead for each distance, as bytes [distances]."""
    votes = ballot["votes"]
    return winner(votes, ballot["sums"] / votes.sum(-1, keepdim=True).clamp(min=1), tie).to(torch.uint8)


def most_agreed(choices: Tensor) -> int:
    """The distance whose choices [clients, distances] agree most with those of the others; a tie goes to the first."""
    same = choices[:, :, None] == choices[:, None, :]
    return int(same.sum((0, 2)).argmax())


def unseen(
    how: str, clients: Sequence[ClientId], seen: Mapping[ClientId, int], layers: int, rng: torch.Generator
) -> dict[ClientId, int]:
    """Layers of clients that never voted: none yet (probe), the last one (classifier) or drawn (random)."""
    missing = [i for i in clients if i not in seen] if how != "probe" else []
    drawn = torch.randint(layers, (len(missing),), generator=rng).tolist()
    return dict(zip(missing, drawn if how == "random" else [layers - 1] * len(missing), strict=True))

"""Which layer a client should keep for itself: outputs of layers, their scores, ballots, and what they decide."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from coterie.errors import CoterieError, unknown
from coterie.models.layers import Layout
from coterie.models.net import Net
from coterie.parts import gaussian as G
from coterie.parts.gaussian import Gaussian, Normalize, Score, Tie, best_layer, encode_labels, fit, winner
from coterie.tree import Tree

PAPER = ("js", "w2", "hellinger", "bhattacharyya")  # the four distances of the paper
CHUNK = 512  # samples of one forward pass
Ballot = dict[str, Tensor]  # votes and summed scores, both [distances, layers]


def candidates(layout: Layout, which: str | Sequence[str]) -> tuple[str, ...]:
    """Candidate layers in order of execution: fc, all (convolutions too), classifier, or these names."""
    weighted = [n for n in layout.layers if layout.kinds[n] in ("conv", "fc")]
    if which == "classifier":
        return (layout.head,) if layout.head is not None else ()
    if isinstance(which, str):
        return layout.of_kind("fc") if which == "fc" else tuple(weighted)
    for name in which:
        if name not in weighted:
            raise unknown("candidate layer", name, weighted)
    return tuple(n for n in weighted if n in which)


def enough(found: Sequence[str], named: bool) -> None:
    """A choice needs two candidates, unless the user named the only one."""
    if len(found) < (1 if named else 2):
        have = f"it has {len(found)}" + (f": {', '.join(found)}" if found else "")
        raise CoterieError(f"FedCPMD needs a model with at least two candidate layers ({have}); see candidates")


@torch.no_grad()
def layer_outputs(net: Net, params: Tree, x: Tensor, layers: Sequence[str]) -> list[Tensor]:
    """o_0, o_1 ... o_L [n, d]: what enters the first of `layers`, then what each of them hands to the next layer with
    weights (so after the activation), raw logits for the last of the model."""
    order = [n for n in net.layout.layers if net.layout.kinds[n] in ("conv", "fc")]
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


@dataclass(frozen=True)
class Ruler:
    """How layers are measured; the options are those of docs/methods/fedcpmd.md, A2, A3, A4 and A16."""

    distances: tuple[str, ...]
    gaussian: Literal["scalar", "diag_mean"] = "scalar"
    normalize: Normalize = "minmax"
    label_encoding: Literal["index", "onehot"] = "index"
    sigma_min: float = 1e-3
    score: Score = "eq7"
    js_sqrt: bool = False
    w2_sigma: bool = True

    def scores(self, outputs: Sequence[Tensor], x: Tensor, y: Tensor, classes: int) -> Tensor:
        """s_l [distances, L] of outputs o_0 ... o_L against inputs and labels, equation (7)."""
        deep = self.gaussian == "diag_mean"
        to_x = fit(x, self.normalize, self.sigma_min, per_dim=deep)
        to_y = fit(encode_labels(y, classes, self.label_encoding), "none", self.sigma_min, per_dim=deep)
        o = [fit(t, self.normalize, self.sigma_min, per_dim=deep) for t in outputs]
        rows = []
        for name in self.distances:
            d = G.distance(name, self.js_sqrt, self.w2_sigma)
            if deep:
                gaps = [torch.stack([G.diag_mean(d, g, end) for g in o]) for end in (to_y, to_x)]
            else:
                all_at_once = Gaussian(torch.stack([g.mu for g in o]), torch.stack([g.sigma for g in o]))
                gaps = [d(all_at_once, end) for end in (to_y, to_x)]
            rows.append(G.layer_scores(gaps[0], gaps[1], self.score))
        return torch.stack(rows)


def cast(ballot: Mapping[str, Tensor] | None, scores: Tensor) -> Ballot:
    """The ballot with one vote more per row of scores [rows, distances, layers]."""
    new = {"votes": F.one_hot(best_layer(scores), scores.shape[-1]).sum(0), "sums": scores.double().sum(0)}
    return new if ballot is None else {k: ballot[k] + v for k, v in new.items()}


def standing(ballot: Mapping[str, Tensor], tie: Tie) -> Tensor:
    """The layer in the lead for each distance, as bytes [distances]."""
    votes = ballot["votes"]
    return winner(votes, ballot["sums"] / votes.sum(-1, keepdim=True).clamp(min=1), tie).to(torch.uint8)


def most_agreed(choices: Tensor) -> int:
    """The distance whose choices [clients, distances] agree most with those of the others; a tie goes to the first."""
    same = choices[:, :, None] == choices[:, None, :]
    return int(same.sum((0, 2)).argmax())


@torch.no_grad()
def accuracy(net: Net, params: Tree, x: Tensor, y: Tensor) -> float:
    """Share of right answers."""
    hits = [
        (net.forward(params, a).argmax(1) == b).sum()
        for a, b in zip(torch.split(x, CHUNK), torch.split(y, CHUNK), strict=True)
    ]
    return float(torch.stack(hits).sum()) / len(y)


def unseen(
    how: str, clients: Sequence[int], seen: Mapping[int, int], layers: int, rng: torch.Generator
) -> dict[int, int]:
    """Layers of clients that never voted: none yet (probe), the last one (classifier) or drawn (random)."""
    missing = [i for i in clients if i not in seen] if how != "probe" else []
    drawn = torch.randint(layers, (len(missing),), generator=rng).tolist()
    return dict(zip(missing, drawn if how == "random" else [layers - 1] * len(missing), strict=True))

"""Scalar Gaussians fitted to tensors, distances between them, and the layer votes built on them (FedCPMD, FedCMD)."""

import math
from collections.abc import Callable
from functools import partial
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from coterie.errors import unknown

Normalize = Literal["minmax", "none", "zscore"]
LabelEncoding = Literal["index", "onehot", "number"]
LayerScore = Literal["eq7", "eq6", "eq6_reversed", "absdiff"]  # shift_scores computes eq6
Tie = Literal["mean_score", "deepest", "fc2"]

LN2 = math.log(2.0)
NODES = 4001  # nodes of the quadrature in js


class Gaussian(NamedTuple):
    mu: Tensor  # [...] float64
    sigma: Tensor  # [...] float64, positive


Distance = Callable[[Gaussian, Gaussian], Tensor]


def fit(
    t: Tensor, normalize: Normalize = "minmax", sigma_min: float = 1e-3, batch_dims: int = 0, per_dim: bool = False
) -> Gaussian:
    """Return mean and biased std of all elements after the first `batch_dims` axes; the whole tensor is normalised.

    `per_dim` gives one Gaussian per column of [n, ...] instead (still normalised as a whole). Under `zscore` every
    scalar fit is (0, 1) by construction, so it only distinguishes constant tensors from others.
    """
    lead = t.shape[:batch_dims]
    flat = t.double().reshape(*lead, -1)
    low, high = flat.amin(-1), flat.amax(-1)
    if normalize == "minmax":
        shift, scale = low, high - low
    elif normalize == "zscore":
        shift, scale = flat.mean(-1), flat.std(-1, correction=0)
    elif normalize == "none":
        shift, scale = torch.zeros_like(low), torch.ones_like(low)
    else:
        raise unknown("normalize", normalize, ("minmax", "none", "zscore"))
    scale = torch.where(high == low, torch.inf, scale) if normalize != "none" else scale  # constant: all elements to 0
    if per_dim:
        flat = t.double().reshape(*lead, t.shape[batch_dims], -1).transpose(-1, -2)
        shift, scale = shift.unsqueeze(-1), scale.unsqueeze(-1)
    # moments first, map after: the same numbers as mapping every element, without a second copy of the tensor
    mu = (flat.mean(-1) - shift) / scale
    sigma = flat.std(-1, correction=0) / scale
    return Gaussian(mu, sigma.clamp(min=sigma_min))


def encode_labels(y: Tensor, classes: int, encoding: LabelEncoding = "index") -> Tensor:
    """Return labels as numbers: y / (classes - 1), which has the same range for every client, one-hot, or y itself."""
    if encoding == "number":
        return y.double()
    if encoding == "index":
        return y.double() / max(classes - 1, 1)
    if encoding == "onehot":
        return F.one_hot(y, classes).double()
    raise unknown("label_encoding", encoding, ("index", "onehot", "number"))


def pooled(g: Gaussian) -> Gaussian:
    """The scalar Gaussian with the moments of an even mixture of all entries of `g`."""
    variance = g.sigma.square().mean() + g.mu.var(correction=0)
    return Gaussian(g.mu.mean(), variance.sqrt())


def w2(p: Gaussian, q: Gaussian, use_sigma: bool = True) -> Tensor:
    """2-Wasserstein distance, FedCPMD's equation (9); |mu1 - mu2| if sigma is ignored, as in the predecessor."""
    gap = (p.mu - q.mu).abs()
    return torch.hypot(gap, p.sigma - q.sigma) if use_sigma else gap


def bhattacharyya(p: Gaussian, q: Gaussian) -> Tensor:
    """Bhattacharyya distance, FedCPMD's equation (11)."""
    total = p.sigma.square() + q.sigma.square()
    # log1p of the excess over 1 is exact for equal sigmas, where the plain logarithm leaves rounding noise
    spread = torch.log1p((p.sigma - q.sigma).square() / (2 * p.sigma * q.sigma)) / 2
    return (p.mu - q.mu).square() / (4 * total) + spread


def hellinger(p: Gaussian, q: Gaussian) -> Tensor:
    """Hellinger distance, FedCPMD's equation (10)."""
    return (-torch.expm1(-bhattacharyya(p, q))).sqrt()


def js(p: Gaussian, q: Gaussian, sqrt: bool = False) -> Tensor:
    """Jensen-Shannon divergence, FedCPMD's equation (8), in nats by quadrature (`sqrt`: its root, which is a metric).

    Both KL terms are integrated on the grid of the narrower component. There the log-ratio is smooth, and outside it
    the integrand is bounded by the narrow density, so that 4001 nodes are exact to rounding at any ratio of sigmas;
    the textbook grid per component is off by 1.5e-6 at a ratio of 250. Ordering the pair makes it exactly symmetric.
    """
    (mu1, sigma1), (mu2, sigma2) = p, q
    swap = (sigma1 < sigma2) | ((sigma1 == sigma2) & (mu1 < mu2))
    mu_w, mu_n = torch.where(swap, mu2, mu1), torch.where(swap, mu1, mu2)
    sigma_w, sigma_n = torch.where(swap, sigma2, sigma1), torch.where(swap, sigma1, sigma2)
    z = torch.linspace(-10, 10, NODES, dtype=torch.float64, device=mu1.device)
    weight = torch.exp(-z.square() / 2)
    weight = weight / weight.sum()
    ratio = (sigma_n / sigma_w).unsqueeze(-1)
    wide = ((mu_n - mu_w) / sigma_w).unsqueeze(-1) + ratio * z  # the nodes, in units of the wide component
    s = (z - wide) * (z + wide) / 2 + ratio.log()  # ln wide - ln narrow; at most 50, so exp is safe
    zero = torch.zeros((), dtype=s.dtype, device=s.device)
    each = LN2 - (s.exp() * torch.logaddexp(-s, zero) + torch.logaddexp(s, zero)) / 2
    value = (each * weight).sum(-1).clamp(0, LN2)
    return value.sqrt() if sqrt else value


def js_moment(p: Gaussian, q: Gaussian) -> Tensor:
    """JS with the mixture replaced by the Gaussian of its moments: an upper bound, not limited by ln 2."""
    excess = (p.sigma - q.sigma).square() / 2 + (p.mu - q.mu).square() / 4  # v - sigma1*sigma2
    return torch.log1p(excess / (p.sigma * q.sigma)) / 2


DISTANCES: dict[str, Distance] = {
    "js": js,
    "w2": w2,
    "hellinger": hellinger,
    "bhattacharyya": bhattacharyya,
    "js_moment": js_moment,
}


def distance(name: str, js_sqrt: bool = False, w2_sigma: bool = True) -> Distance:
    """Return the distance of that name with its options: the root of js, w2 without deviations."""
    if name not in DISTANCES:
        raise unknown("distance", name, DISTANCES)
    if name == "js":
        return partial(js, sqrt=js_sqrt)
    if name == "w2":
        return partial(w2, use_sigma=w2_sigma)
    return DISTANCES[name]


def diag_mean(d: Distance, p: Gaussian, q: Gaussian) -> Tensor:
    """Mean of the distances per dimension where the dimensions agree, else the distance of the pooled scalars."""
    return d(p, q).mean() if p.mu.shape == q.mu.shape else d(pooled(p), pooled(q))


def layer_scores(to_y: Tensor, to_x: Tensor, score: LayerScore = "eq7") -> Tensor:
    """Mismatch s_l [..., L] of L candidates from d(o_l, y) and d(o_l, x), both [..., L + 1] with o_0 first."""
    step_y, step_x = to_y.diff(dim=-1), to_x.diff(dim=-1)
    if score == "eq7":
        return (step_y - step_x).abs()
    if score == "absdiff":
        return (step_y.abs() - step_x.abs()).abs()
    raise unknown("score", score, ("eq7", "absdiff"))


def shift(before: Gaussian, after: Gaussian) -> Gaussian:
    """Return the distribution of the difference of two independent variables: after - before."""
    return Gaussian(after.mu - before.mu, torch.hypot(before.sigma, after.sigma))


def shift_scores(outputs: Gaussian, start: Gaussian, end: Gaussian, d: Distance) -> Tensor:
    """Mismatch s_l [L] by FedCPMD's equation (6): distance between the shift by layer l and the shift of the data.

    The outputs [L + 1] have o_0 first.
    """
    before, after = (Gaussian(outputs.mu[part], outputs.sigma[part]) for part in (slice(-1), slice(1, None)))
    return d(shift(before, after), shift(start, end))


def best_layer(scores: Tensor) -> Tensor:
    """Index [...] of the smallest score, FedCPMD's equation (6); the deepest layer wins ties, as in `winner`."""
    return scores.shape[-1] - 1 - scores.flip(-1).argmin(-1)


def winner(votes: Tensor, mean_scores: Tensor, tie: Tie = "mean_score") -> Tensor:
    """Return the layer [...] with most votes [..., L].

    A tie goes to the smallest mean score, or to the layer before the classifier (`fc2`), and then to the deepest of the
    tied layers.
    """
    tied = votes == votes.amax(-1, keepdim=True)
    depth = votes.shape[-1]
    if tie == "mean_score":
        rank = mean_scores.double().nan_to_num(torch.inf, posinf=torch.finfo(torch.float64).max)
    elif tie == "deepest":
        rank = torch.zeros_like(mean_scores, dtype=torch.float64)
    elif tie == "fc2":
        rank = (torch.arange(depth, device=votes.device) != max(depth - 2, 0)).double().expand(votes.shape)
    else:
        raise unknown("tie", tie, ("mean_score", "deepest", "fc2"))
    # a tied layer without any score ranks last among the tied, but before every layer that is not tied
    rank = rank.clamp(max=torch.finfo(torch.float64).max)
    return best_layer(rank.masked_fill(~tied, torch.inf))

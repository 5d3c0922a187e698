"""FedUV. Son, Kim, Chung, Huang, Liu, CVPR 2024 (arXiv 2402.18372).

FedAvg with two regularisers that make a client's model behave as if its data were balanced. V: the standard deviation
of each class's probability over the batch should reach 1/sqrt(classes), that of balanced and certain predictions
(hinge, mean over classes). U: features should spread out, by the mean of exp(-d^2 / m) over all pairs of the batch,
where m is the median of the squared distances d^2 that are not zero.
Features are the inputs of the head. A batch with fewer than two samples has the task's loss alone.
"""

import math

import torch
from pydantic import Field
from torch import Tensor

from coterie.core.context import Batch, Extras
from coterie.core.method import Card, Method, Settings
from coterie.core.tree import Tree

LEAST_VARIANCE = 1e-12  # least variance, for a finite gradient


class FedUVSettings(Settings):
    lam: float = Field(2.5, ge=0, description="strength of the variance of predictions (V)")
    mu: float = Field(0.5, ge=0, description="strength of the uniformity of features (U)")


class FedUV(Method):
    Settings = FedUVSettings
    hp: FedUVSettings
    card = Card(
        "FedUV",
        "Son et al., CVPR 2024, arXiv 2402.18372",
        2024,
        "G,R",
        certainty="A",
        compute="distances between all pairs of features of a batch",
    )
    needs = ("head", "classes")

    def loss(self, params: Tree, batch: Batch, extras: Extras) -> Tensor:
        logits, z = self.ctx.net.both(params, batch.x)
        loss = self.ctx.loss_of(logits, batch)
        if (self.hp.lam == 0 and self.hp.mu == 0) or len(z) < 2:
            return loss
        weight = z.new_ones(len(z)) if batch.weight is None else batch.weight
        terms = self.hp.lam * variance(logits.softmax(1), weight) + self.hp.mu * uniformity(z, weight)
        return loss + torch.where(weight.sum() > 1, terms, 0.0)


def variance(p: Tensor, weight: Tensor) -> Tensor:
    """Return the mean hinge of the deviations of probabilities [batch, classes] from 1/sqrt(classes)."""
    w, n = weight[:, None], weight.sum()
    gap = p - (w * p).sum(0) / n
    deviation = ((w * gap.square()).sum(0) / (n - 1).clamp(min=1)).clamp(min=LEAST_VARIANCE).sqrt()
    return torch.relu(1 / math.sqrt(p.shape[1]) - deviation).mean()


def uniformity(z: Tensor, weight: Tensor) -> Tensor:
    """Return the mean of exp(-d^2 / median) over pairs of features [batch, d]; samples of weight 0 do not count."""
    i, j = torch.triu_indices(len(z), len(z), 1, device=z.device)
    d2 = (z[i] - z[j]).square().sum(1)
    pair = weight[i] * weight[j]
    counted = (pair > 0) & (d2 > 0)
    middle = ((counted.sum() - 1) // 2).clamp(min=0)  # the lower one of two
    median = torch.where(counted, d2, torch.inf).sort().values.gather(0, middle[None])[0]
    median = torch.where(counted.any(), median, 1.0)
    return (pair * (-d2 / median).exp()).sum() / pair.sum().clamp(min=1)

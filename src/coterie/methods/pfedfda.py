"""pFedFDA. McLaughlin, Su, NeurIPS 2024 (arXiv 2411.00329).

Features of each class are modelled as Gaussians with one common covariance, so that the best head follows in closed
form (linear discriminant analysis with the client's label shares). Clients train the body under the head of the global
Gaussians, estimate their own ones, and send a mixture of both; the shares of means and covariance in the mixture are
chosen by two-fold cross-validation on the training part. The received body with the head of such a mixture is scored.
Three points differ from the authors' code: folds are every second sample of a class (theirs are shuffled), shares are
found on a grid, to 0.02 (by a quasi-Newton search there), and features come from a clean pass after training (collected
during training there). The identity matrix that is added to a client's covariance is the authors'.
"""

from collections.abc import Sequence

import torch
from pydantic import Field
from torch import Tensor

from coterie.core import tree as T
from coterie.core.context import ClientData, State
from coterie.core.method import Card, Client, Method, Model, Moment, Phase, Settings, Start, Trained, Upload
from coterie.core.schema import Entry, Link, Schema
from coterie.core.tree import Tree
from coterie.core.views import ModelView
from coterie.errors import CoterieError
from coterie.parts.prototypes import class_sums, from_sums

CLASS_MEANS, COVARIANCE = "x:means", "x:covariance"
RIDGE = 1e-4


class PFedFDASettings(Settings):
    single: bool = Field(False, description="one share for means and covariance instead of two")


class PFedFDA(Method):
    combines = "mean"
    Settings = PFedFDASettings
    hp: PFedFDASettings
    card = Card(
        "pFedFDA",
        "McLaughlin and Su, NeurIPS 2024, arXiv 2411.00329",
        2024,
        "S,P",
        personal="the head, from mixed Gaussians",
        compute="a forward pass over the training part and a few decompositions of matrices of the features' size, per"
        " round and before use",
    )
    needs = ("head", "classes")

    def check(self) -> None:
        if self.ctx.net.head_names[1] is None:
            raise CoterieError("pFedFDA writes label shares into the bias of the head; the model's head has none")

    def private(self, name: str) -> bool:
        return name in self.ctx.group("head")

    def schema(self, link: Link, now: Moment | None = None) -> Schema:
        """The body with class means and covariance travels both ways; means of absent classes come back unchanged."""
        d, part, labels = self.ctx.net.width, "gaussians", link == "up"
        gaussians = {
            CLASS_MEANS: Entry((self.ctx.classes, d), kind="prototype", part=part, summable=True, shows_labels=labels),
            COVARIANCE: Entry((d, d), kind="statistic", part=part, summable=True),
        }
        return self.model_schema | Schema(gaussians)

    def setup(self) -> State:
        d = self.ctx.net.width
        means = torch.rand(self.ctx.classes, d, generator=self.ctx.rng("means"))
        return {"w": {**super().setup()["w"], CLASS_MEANS: means, COVARIANCE: torch.eye(d)}}

    def init_client(self, data: ClientData) -> State:
        own = T.keep(self.ctx.w0, lambda k: self.stays(k) and not self.private(k))
        return {"own": T.clone(own)}

    def begin(self, state: State, download: Tree, data: ClientData, round: int) -> Start:
        params = {**T.untagged(download), **state.get("own", {})}
        head = self._head(discriminant(download[CLASS_MEANS], download[COVARIANCE], priors(data)))
        return Start({**params, **head}, {CLASS_MEANS: download[CLASS_MEANS], COVARIANCE: download[COVARIANCE]})

    def phases(self, round: int) -> list[Phase]:
        return [Phase(self.loss, lambda name: not self.private(name))]

    def _head(self, found: tuple[Tensor, Tensor]) -> Tree:
        weight, bias = self.ctx.net.head_names
        assert bias is not None
        return {weight: found[0].float(), bias: found[1].float()}

    @torch.no_grad()
    def mixture(self, params: Tree, data: ClientData, common: Tree) -> tuple[Tensor, Tensor]:
        """Return means and covariance between the client's own, under this body, and the common ones."""
        z = self.ctx.outputs(params, data.train.x, 512, self.ctx.features).double()
        y, shared = data.train.y, (common[CLASS_MEANS].double(), common[COVARIANCE].double())
        own = gaussians(z, y, shared[0])
        shares = self.shares(z, y, shared, priors(data).double())
        means, covariance = (s * a + (1 - s) * b for s, a, b in zip(shares, own, shared, strict=True))
        return means.float(), covariance.float()

    def shares(self, z: Tensor, y: Tensor, shared: tuple[Tensor, Tensor], prior: Tensor) -> Tensor:
        """Return the shares [2] of the client's own means and covariance; zeros if no class has two samples."""
        n = torch.bincount(y, minlength=len(prior))
        order = torch.argsort(y, stable=True)
        rank = torch.empty_like(y)  # number of earlier samples of the same class
        rank[order] = torch.arange(len(y), device=y.device) - (n.cumsum(0) - n)[y[order]]
        usable = n[y] > 1
        folds = [(usable & (rank % 2 == i), usable & (rank % 2 != i)) for i in (0, 1)]
        if not bool(usable.any()):
            return z.new_zeros(2)
        fitted = [Fold(gaussians(z[a], y[a], shared[0]), shared, prior, z[b], y[b]) for a, b in folds]
        best, width = z.new_full((2,), 0.5), 0.5
        for _ in range(2):  # steps of 0.1, then of 0.02 around the best
            ticks = torch.linspace(-width, width, 11, dtype=torch.float64, device=z.device)
            steps = ticks[:, None].expand(-1, 2) if self.hp.single else torch.cartesian_prod(ticks, ticks)
            tried = (best + steps).clamp(0, 1)
            best, width = tried[torch.stack([f.losses(tried) for f in fitted]).sum(0).argmin()], width / 5
        return best

    def end(self, state: State, trained: Trained, data: ClientData, round: int) -> tuple[State, Upload]:
        body = T.drop(trained.params, self.stays)
        means, covariance = self.mixture(trained.params, data, trained.extras)
        head = self._head(discriminant(means, covariance, priors(data)))
        own = T.keep(trained.params, lambda k: self.stays(k) and not self.private(k))
        return {**state, "own": own, "head": list(head.values())}, Upload(
            {**body, CLASS_MEANS: means, COVARIANCE: covariance}
        )

    def aggregate(self, server: State, uploads: Sequence[Upload], round: int) -> State:
        w = super().aggregate(server, uploads, round)["w"]
        return {"w": {**w, COVARIANCE: definite(w[COVARIANCE])}}

    def personal(self, state: State, download: Tree, data: ClientData) -> Model:
        start = self.begin(state, download, data, 0)
        params, common = start.params, start.extras
        if not len(data.train):
            return Model(params)
        return Model({**params, **self._head(discriminant(*self.mixture(params, data, common), priors(data)))})

    def model(self, view: ModelView, client: Client) -> Model | None:
        if view == "trained" and client.trained is not None:
            return Model({**client.trained.params, **self._head(tuple(client.state["head"]))})
        return super().model(view, client)


def priors(data: ClientData) -> Tensor:
    """Return the label shares of the training part [classes], all of them positive."""
    shares = data.label_counts.float() / max(len(data.train), 1) + RIDGE
    return shares / shares.sum()


def gaussians(z: Tensor, y: Tensor, fallback: Tensor) -> tuple[Tensor, Tensor]:
    """Return class means [classes, d], from the fallback for classes without samples, and one covariance [d, d]."""
    means, mask = from_sums(*class_sums(z, y, len(fallback)))
    means = torch.where(mask[:, None], means, fallback)
    centred = z - means[y]
    eye = torch.eye(z.shape[1], dtype=z.dtype, device=z.device)
    return means, centred.T @ centred / max(len(z) - 1, 1) + RIDGE + eye


def definite(covariance: Tensor) -> Tensor:
    """Return the matrix if it is positive definite, else its symmetric part with eigenvalues raised to a bound."""
    values, vectors = torch.linalg.eigh((covariance + covariance.T) / 2)
    if float(values.min()) > RIDGE and torch.allclose(covariance, covariance.T, rtol=1e-3):
        return covariance
    mended: Tensor = (vectors * values.clamp(min=1)) @ vectors.T
    return mended


def regular(covariance: Tensor) -> Tensor:
    """Add a little of the mean variance in all directions, so that the matrix can be inverted."""
    d = len(covariance)
    return (1 - RIDGE) * covariance + RIDGE * covariance.trace() / d * torch.eye(
        d, dtype=covariance.dtype, device=covariance.device
    )


def discriminant(means: Tensor, covariance: Tensor, prior: Tensor) -> tuple[Tensor, Tensor]:
    """Return weight [classes, d] and bias [classes] of linear discriminant analysis."""
    weight = torch.linalg.solve(regular(covariance), means.T).T
    return weight, prior.to(means).log() - (means * weight).sum(1) / 2


class Fold:
    """Cross-entropy on one part of the data of mixtures fitted on the other.

    The covariance is linear in its share, so a basis in which both of its ends are diagonal serves all mixtures.
    """

    def __init__(
        self,
        own: tuple[Tensor, Tensor],
        shared: tuple[Tensor, Tensor],
        prior: Tensor,
        z: Tensor,
        y: Tensor,
    ):
        start, end = regular(shared[1]), regular(own[1])
        low = torch.linalg.cholesky(start)
        half = torch.linalg.solve_triangular(low, end - start, upper=False)
        whole = torch.linalg.solve_triangular(low, half.T, upper=False)
        self.stretch, basis = torch.linalg.eigh((whole + whole.T) / 2)
        basis = torch.linalg.solve_triangular(low.T, basis, upper=True)
        self.z, self.y, self.prior = z @ basis, y, prior.log()
        self.start, self.move = shared[0] @ basis, (own[0] - shared[0]) @ basis  # [classes, d]

    def losses(self, shares: Tensor) -> Tensor:
        """Return the loss for each pair of shares of means and covariance [pairs, 2]."""
        means = self.start + shares[:, 0, None, None] * self.move  # [pairs, classes, d]
        weight = means / (1 + shares[:, 1, None, None] * self.stretch)
        bias = self.prior - (means * weight).sum(2) / 2
        logits = self.z @ weight.transpose(1, 2) + bias[:, None]  # [pairs, n, classes]
        picked = self.y[None, :, None].expand(len(shares), -1, 1)
        losses: Tensor = -logits.log_softmax(2).gather(2, picked).mean((1, 2))
        return losses

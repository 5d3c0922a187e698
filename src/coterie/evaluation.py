"""The evaluation protocol: one set of views, parts and statistics for every method.

Views: personal (what a client would use now), global, adapted (after fine-tuning); after the last round, or when one
of them is the headline: received (as put together from what was sent, before local training), trained (after it), edge
(the model of the client's cluster or edge, the global one where there is none). Parts: test, val.
Statistics over clients: mean, std, worst decile; pooled over samples; mean over clusters.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch

from coterie.messages import ScoreAnswer, TrainAnswer
from coterie.method import ClientId

View = Literal["personal", "global", "received", "trained", "edge", "adapted"]
ON_REQUEST: tuple[Literal["received", "trained", "edge"], ...] = ("received", "trained", "edge")
ALONE = -1  # the cluster of a client that is in none


def statistics(
    hits: np.ndarray, total: np.ndarray, loss: np.ndarray, cluster: np.ndarray | None = None
) -> dict[str, float]:
    """Of clients with at least one sample; hits and total [clients, classes], loss [clients] summed.

    `clusters`, where there are any: the mean over clusters of the mean over their clients; clusters count alike.
    `nonfinite`, where there are any: clients whose models give NaN or infinity."""
    n = total.sum(1)
    seen = n > 0
    if not seen.any():
        return {}
    accuracy = hits.sum(1)[seen] / n[seen]
    worst = np.sort(accuracy)[: max(1, round(0.1 * len(accuracy)))]
    return {
        "mean": float(accuracy.mean()),
        "std": float(accuracy.std()),
        "worst10": float(worst.mean()),
        "pooled": float(hits.sum() / n.sum()),
        "loss": float(loss.sum() / n.sum()),
        "clients": int(seen.sum()),
        **_over_clusters(accuracy, None if cluster is None else cluster[seen]),
        **({"nonfinite": broken} if (broken := int((~np.isfinite(loss[seen])).sum())) else {}),
    }


def _over_clusters(accuracy: np.ndarray, cluster: np.ndarray | None) -> dict[str, float]:
    if cluster is None or not (cluster != ALONE).any():
        return {}
    means = [accuracy[cluster == c].mean() for c in np.unique(cluster[cluster != ALONE])]
    return {"clusters": float(np.mean(means)), "cluster_count": len(means)}


@dataclass(frozen=True)
class Evaluation:
    """Hits, totals and losses of all clients, by "view/part"."""

    clients: list[ClientId]
    newcomer: np.ndarray  # [clients] bool
    hits: dict[str, np.ndarray]  # [clients, classes]
    total: dict[str, np.ndarray]
    loss: dict[str, np.ndarray]  # [clients]
    cluster: np.ndarray | None = None  # [clients], ALONE for none; None if the method makes no clusters

    @staticmethod
    def of(
        answers: Sequence[ScoreAnswer], newcomers: set[ClientId], cluster_of: Mapping[ClientId, int] | None = None
    ) -> "Evaluation":
        keys = sorted({k for a in answers for k in a.scores})
        classes = next((len(s.hits) for a in answers for s in a.scores.values()), 0)
        hits = {k: np.zeros((len(answers), classes), np.int64) for k in keys}
        total = {k: np.zeros((len(answers), classes), np.int64) for k in keys}
        loss = {k: np.zeros(len(answers)) for k in keys}
        for i, a in enumerate(answers):
            for k, s in a.scores.items():
                hits[k][i], total[k][i], loss[k][i] = s.hits.numpy(), s.total.numpy(), s.loss
        clients = [a.client for a in answers]
        cluster = None if cluster_of is None else np.array([int(cluster_of.get(c, ALONE)) for c in clients])
        return Evaluation(clients, np.array([c in newcomers for c in clients]), hits, total, loss, cluster)

    def arrays(self) -> dict[str, np.ndarray]:
        """For the file; per-class counts are small, so they are kept whole."""
        out = {"clients": np.array(self.clients), "newcomer": self.newcomer}
        if self.cluster is not None:
            out["cluster"] = self.cluster
        for k in self.hits:
            out |= {f"{k}/hits": self.hits[k], f"{k}/total": self.total[k], f"{k}/loss": self.loss[k]}
        return out

    def summary(self) -> dict[str, dict[str, float]]:
        """view/part -> statistics; newcomers separately."""
        out = {}
        for mark, rows in (("", ~self.newcomer), ("newcomers/", self.newcomer)):
            for k in self.hits:
                cluster = None if self.cluster is None else self.cluster[rows]
                if stats := statistics(self.hits[k][rows], self.total[k][rows], self.loss[k][rows], cluster):
                    out[mark + k] = stats
        return out

    def headline(self, view: str = "personal") -> float | None:
        """Of this view, or of the personal models if there is none."""
        name = f"{view}/test" if f"{view}/test" in self.hits else "personal/test"
        return self.summary()[name]["mean"] if name in self.hits else None

    def nonfinite(self) -> int:
        """Clients whose personal models give NaN or infinity."""
        loss = self.loss.get("personal/test", np.zeros(0))
        return int((~np.isfinite(loss)).sum())


@dataclass(frozen=True)
class Watch:
    """The participants of one round, before and after their local training, on their test parts."""

    when: dict[str, tuple[np.ndarray, np.ndarray]]  # before, after -> hits, total [participants]

    @staticmethod
    def of(answers: Sequence[TrainAnswer]) -> "Watch":
        when = {}
        for name in ("before", "after"):
            rows = [s for a in answers if (s := getattr(a, name)) is not None]
            if rows:
                hits, total = [int(s.hits.sum()) for s in rows], [int(s.total.sum()) for s in rows]
                when[name] = (np.array(hits), np.array(total))
        return Watch(when)

    def summary(self) -> dict[str, dict[str, Any]]:
        """pooled: all hits over all samples; mean: over participants."""
        return {
            name: {
                "pooled": float(h.sum() / max(1, n.sum())),
                "mean": float((h / np.maximum(n, 1)).mean()),
                "hits": h.tolist(),
                "total": n.tolist(),
            }
            for name, (h, n) in self.when.items()
        }

    def headline(self) -> float | None:
        return float(self.summary()["before"]["mean"]) if "before" in self.when else None


def notes(answers: Sequence[TrainAnswer]) -> dict[str, float]:
    """The clients' own numbers, averaged over those who gave them."""
    out = {}
    for k in sorted({k for a in answers for k in a.note}):
        given = [a.note[k] for a in answers if k in a.note]
        out[k] = sum(given) / len(given)
    if updates := [a.update for a in answers if a.update is not None]:
        D = torch.stack(updates)  # [participants, P]
        each = D.norm(dim=1)
        out |= {"aun": float(D.mean(0).norm()), "mean_update": float(each.mean()), "largest_update": float(each.max())}
    return out

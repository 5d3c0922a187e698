"""How far the clients' models moved since the cloud last saw them, which says when they are stationary."""

from collections.abc import Sequence
from typing import Any

from coterie.core.context import ClientId
from coterie.core.method import Upload
from coterie.core.tree import Predicate, Tree, keep
from coterie.parts import model_bank as bank

Movement = dict[str, Any]  # last, a bank of the clients' models; mean_update and largest_update, norms


def start(w: Tree, ids: Sequence[ClientId], names: Predicate) -> Movement:
    """Return the movement with all clients at w; `names` are the entries that count."""
    return {"last": bank.fill(keep(w, names), ids), "mean_update": 0.0, "largest_update": 0.0}


def follow(moves: Movement, uploads: Sequence[Upload], names: Predicate) -> Movement:
    """Return the new models, the norm of the mean update and the largest norm of the clients that answered."""
    new = bank.put(moves["last"], {u.sender: keep(u.tree, names) for u in uploads})
    at = bank.rows(new, [u.sender for u in uploads])
    D = new["flat"][at] - moves["last"]["flat"][at]
    return {"last": new, "mean_update": float(D.mean(0).norm()), "largest_update": float(D.norm(dim=1).max())}


def stationary(moves: Movement, eps1: float, eps2: float) -> bool:
    """True if the mean update is small but some update is large: clients pull in different directions."""
    return bool(moves["mean_update"] < eps1 and moves["largest_update"] > eps2)

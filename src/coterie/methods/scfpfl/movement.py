"""How far the clients' models moved since the cloud last saw them: says when they are stationary."""

from collections.abc import Sequence

from coterie.core.method import ClientId, State, Upload
from coterie.core.tree import Predicate, Tree, keep
from coterie.parts import model_bank as bank


def start(w: Tree, ids: Sequence[ClientId], names: Predicate) -> State:
    """All clients at w; `names` are the entries that count."""
    return {"last": bank.fill(keep(w, names), ids), "mean_update": 0.0, "largest_update": 0.0}


def follow(moves: State, uploads: Sequence[Upload], names: Predicate) -> State:
    """Norm of the mean update and the largest norm of those who answered."""
    new = bank.put(moves["last"], {u.sender: keep(u.tree, names) for u in uploads})
    at = bank.rows(new, [u.sender for u in uploads])
    D = new["flat"][at] - moves["last"]["flat"][at]
    return {"last": new, "mean_update": float(D.mean(0).norm()), "largest_update": float(D.norm(dim=1).max())}


def stationary(moves: State, eps1: float, eps2: float) -> bool:
    """The mean update is small but some update is large: clients pull in different directions."""
    return bool(moves["mean_update"] < eps1 and moves["largest_update"] > eps2)

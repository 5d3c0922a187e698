"""The candidates that a client of Autopilot chooses among, and the members they are made of."""

CANDIDATES: dict[str, dict[str, float]] = {  # members of each candidate, with their shares
    "global": {"global": 1.0},
    "tuned": {"tuned": 1.0},
    "halfway": {"halfway": 1.0},
    "head": {"head": 1.0},
    "long-head": {"long-head": 1.0},
    "own": {"own": 1.0},
    "neighbours": {"global": 0.5, "near": 0.5},
    "head+neighbours": {"head": 0.5, "near": 0.5},
    "head+tuned": {"head": 0.5, "tuned": 0.5},
    "tuned+own": {"tuned": 0.5, "own": 0.5},
    "tuned+global": {"tuned": 0.5, "global": 0.5},
    "ensemble": {"global": 0.25, "head": 0.25, "tuned": 0.25, "near": 0.25},
}
HEADS = {"head": 10, "long-head": 30}  # steps of fitting
UNTRAINED = ("global", "head", "long-head", "neighbours", "head+neighbours")  # candidates without local training
UNINFORMED = ("head", "tuned", "global")  # before any scores, the first available one is used

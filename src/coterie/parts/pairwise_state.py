"""The server's state in methods that mix models by pairs of clients: a bank, a matrix, and the clients that answered.

The state is {"bank": ..., "similarity": [clients, clients] float64 in the order of the bank's ids,
"answered": [client]}.
"""

from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from coterie.core.context import ClientId, State
from coterie.parts import model_bank as bank


def opened(tree: Mapping[str, Tensor], clients: Sequence[ClientId]) -> State:
    """Return the initial state: all clients have the same model, and no similarity is known."""
    n = len(clients)
    return {"bank": bank.fill(tree, clients), "similarity": torch.zeros(n, n, dtype=torch.float64), "answered": []}


def received(kept: State, models: Mapping[ClientId, Mapping[str, Tensor]]) -> tuple[State, Tensor]:
    """Return a new state with these models put in (similarity is copied), and the rows of the models."""
    stored = bank.put(kept["bank"], models)
    more = len(stored["ids"]) - len(kept["similarity"])
    similarity = F.pad(kept["similarity"], (0, more, 0, more)) if more else kept["similarity"].clone()
    state = {**kept, "bank": stored, "similarity": similarity, "answered": sorted({*kept["answered"], *models})}
    return state, bank.rows(stored, list(models))

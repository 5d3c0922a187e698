"""The version of each client's private state that counts; the states themselves stay on the devices."""

from collections.abc import Sequence

import torch

from coterie.core.context import ClientId
from coterie.errors import CoterieError
from coterie.federation.identity.seats import Roster
from coterie.storage.client_states import Index


class StateVersions:
    """The round whose state counts, for every seat."""

    def __init__(self, places: int, roster: Roster):
        self.roster = roster
        self.rounds = torch.full((places,), -1, dtype=torch.int64)  # -1: the client has no state yet
        self.closed = 0  # last round that was closed

    def keep(self, round: int, clients: Sequence[ClientId]) -> None:
        """Let the states that these clients made in this round count."""
        self.rounds[list(clients)] = round
        self.closed = round

    def base(self, client: ClientId) -> int:
        """Return the round whose state the client starts from; -1 if it has none, or only that of a former holder."""
        version = self._version(client)
        return version if version > self.roster.emptied.get(client, -1) else -1

    def last_round(self, client: ClientId) -> int:
        """Return the last round in which the present holder of a seat may have made a state."""
        return max(self.closed, self._version(client))

    def index(self) -> Index:
        """Return the index for a checkpoint."""
        return Index(self.rounds.clone(), torch.zeros_like(self.rounds))

    def restore(self, index: Index | None) -> None:
        """Go back to the index of a checkpoint; None: to the start of the run."""
        if index is not None and len(index.version) != len(self.rounds):
            raise CoterieError(f"the checkpoint has {len(index.version)} clients, the run has {len(self.rounds)}")
        self.rounds = torch.full_like(self.rounds, -1) if index is None else index.version.clone()

    def _version(self, client: ClientId) -> int:
        return int(self.rounds[client]) if 0 <= client < len(self.rounds) else -1

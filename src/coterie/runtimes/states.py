"""Client state, kept apart from the server: in memory or on disk, versioned by round so that checkpoints are exact."""

import zlib
from abc import ABC, abstractmethod
from pathlib import Path

import numpy as np

from coterie import codec
from coterie.errors import CoterieError
from coterie.method import ClientId, State


class StateLostError(RuntimeError):
    """States that a cluster kept are gone with one of its machines; the newest checkpoint has what is needed."""


class Remote(ABC):
    """A client's state that lies somewhere in a cluster: jobs carry it as it is, and only files need it here."""

    @abstractmethod
    def fetch(self) -> State: ...


class Store:
    """Files `clients/<thousand>/<client>-<round>.safetensors`, one per client and version.

    `index` holds the round of each client's newest version (-1: none) and its checksum. A version is deleted only when
    no kept checkpoint refers to it. In memory mode files are written when a checkpoint is made, in disk mode at once.
    """

    def __init__(self, folder: Path, clients: int, disk: bool):
        self.folder, self.disk = folder / "clients", disk
        self.version = np.full(clients, -1, dtype=np.int64)
        self.checksum = np.zeros(clients, dtype=np.int64)
        self._held: dict[ClientId, State | Remote] = {}
        self._dirty: dict[ClientId, int] = {}
        self._superseded: list[tuple[int, Path]] = []  # (round of the newer version, file)

    def path(self, client: ClientId, version: int) -> Path:
        return self.folder / f"{client // 1000:04d}" / f"{client}-{version:06d}.safetensors"

    def get(self, client: ClientId) -> State | None:
        state = self.handle(client)
        return state.fetch() if isinstance(state, Remote) else state

    def handle(self, client: ClientId) -> State | Remote | None:
        """The state, or where in a cluster it lies."""
        if client in self._held:
            return self._held[client]
        if self.version[client] < 0:
            return None
        state = self._read(client)
        if not self.disk:
            self._held[client] = state
        return state

    def put(self, client: ClientId, state: State | Remote, round: int) -> None:
        if not state and self.version[client] < 0 and client not in self._held:
            return  # a method without client state
        if self.disk:
            self._write(client, state, round)
        else:
            self._held[client] = state
            self._dirty[client] = round

    def commit(self) -> None:
        """Everything put so far is on disk afterwards."""
        for client, round in self._dirty.items():
            self._write(client, self._held[client], round)
        self._dirty.clear()

    def restore(self, version: np.ndarray, checksum: np.ndarray) -> None:
        self.version, self.checksum = version.copy(), checksum.copy()
        self._held.clear()
        self._dirty.clear()

    def verify(self) -> None:
        """Raises if a state that the index names is missing or damaged."""
        for client in np.flatnonzero(self.version >= 0):
            self._blob(int(client))

    def collect(self, oldest_kept: int) -> None:
        """Delete versions that were superseded before the oldest kept checkpoint."""
        for round, path in self._superseded:
            if round <= oldest_kept:
                path.unlink(missing_ok=True)
        self._superseded = [(r, p) for r, p in self._superseded if r > oldest_kept]

    def sweep(self, kept: list[np.ndarray]) -> None:
        """After a crash: delete every file that no kept index refers to."""
        for path in self.folder.glob("*/*"):
            stem = path.name.removesuffix(".safetensors").split("-")
            if path.name.startswith(".") or not any(int(v[int(stem[0])]) == int(stem[1]) for v in kept):
                path.unlink(missing_ok=True)
        newest = kept[-1]
        for older in kept[:-1]:
            for client in np.flatnonzero((older >= 0) & (older != newest)):
                self._superseded.append((int(newest[client]), self.path(int(client), int(older[client]))))

    def _write(self, client: ClientId, state: State | Remote, round: int) -> None:
        blob = codec.dumps(state.fetch() if isinstance(state, Remote) else state)
        old = int(self.version[client])
        codec.write_atomic(self.path(client, round), blob, durable=False)
        if 0 <= old != round:
            self._superseded.append((round, self.path(client, old)))
        self.version[client], self.checksum[client] = round, zlib.crc32(blob)

    def _blob(self, client: ClientId) -> bytes:
        path = self.path(client, int(self.version[client]))
        try:
            blob = path.read_bytes()
        except OSError as e:
            raise CoterieError(f"the state of client {client} is missing: {path}") from e
        if zlib.crc32(blob) != self.checksum[client]:
            raise CoterieError(f"the state of client {client} is damaged: {path}")
        return blob

    def _read(self, client: ClientId) -> State:
        state: State = codec.loads(self._blob(client))
        return state

"""Client states of a simulation: in memory or on disk, versioned by round so that checkpoints are exact."""

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from coterie.core.context import ClientId, State
from coterie.core.states import register
from coterie.engine import codec
from coterie.engine.messages import Remote
from coterie.errors import CoterieError
from coterie.storage import atomic as disk

SUFFIX = ".state"


class StateLostError(RuntimeError):
    """Client states were lost with a machine of the cluster; the newest checkpoint still has them."""


@register
@dataclass(frozen=True)
class Index:
    """The valid version of each client's state: the round it was made in (-1: none), and its checksum."""

    version: Tensor  # [clients] int64
    checksum: Tensor  # [clients] int64


class ClientStates:
    """Files `clients/<thousand>/<client>-<round>.state`, one per client and version.

    A version is deleted only when no kept checkpoint refers to it. States kept in memory are written when a
    checkpoint is made, states kept on disk at once.
    """

    def __init__(self, folder: Path, clients: int, disk: bool):
        self.folder, self.disk = folder / "clients", disk
        self._version = np.full(clients, -1, dtype=np.int64)
        self._checksum = np.zeros(clients, dtype=np.int64)
        self._held: dict[ClientId, State | Remote] = {}
        self._unwritten: dict[ClientId, int] = {}  # clients whose newest state is not on disk yet, and its round
        self._unsynced: list[Path] = []
        self._superseded: list[tuple[int, Path]] = []  # (round of the newer version, file)

    def path(self, client: ClientId, version: int) -> Path:
        return self.folder / f"{client // 1000:04d}" / f"{client}-{version:06d}{SUFFIX}"

    def get(self, client: ClientId) -> State | None:
        """Return the client's state; None if it has none yet."""
        state = self.handle(client)
        return state.fetch() if isinstance(state, Remote) else state

    def handle(self, client: ClientId) -> State | Remote | None:
        """Return the state, or a reference to it in the cluster."""
        if client in self._held:
            return self._held[client]
        if self._version[client] < 0:
            return None
        state = self._read(client)
        if not self.disk:
            self._held[client] = state
        return state

    def put(self, client: ClientId, state: State | Remote, round: int) -> None:
        if not state and self._version[client] < 0 and client not in self._held:
            return  # a method without client state
        if self.disk:
            self._write(client, state, round)
        else:
            self._held[client] = state
            self._unwritten[client] = round

    def drop(self, client: ClientId) -> None:
        """Delete the client's state."""
        self._held.pop(client, None)
        self._unwritten.pop(client, None)
        self._version[client] = -1

    def save(self) -> Index:
        """Write all states to disk and return the index of the valid versions."""
        for client, round in self._unwritten.items():
            self._write(client, self._held[client], round)
        self._unwritten.clear()
        disk.sync([p for p in dict.fromkeys(self._unsynced) if p.exists()])
        self._unsynced.clear()
        return Index(torch.from_numpy(self._version.copy()), torch.from_numpy(self._checksum.copy()))

    def restore(self, index: Index | None, older: Sequence[Index] = ()) -> None:
        """Go back to an index (None: to the start); raise CoterieError if one of its states is missing or damaged.

        `older` are the indexes of other kept checkpoints. Files that none of them names are deleted.
        """
        n = len(self._version)
        if index is None:
            index = Index(torch.full((n,), -1, dtype=torch.int64), torch.zeros(n, dtype=torch.int64))
        if len(index.version) != n:
            raise CoterieError(f"the checkpoint has {len(index.version)} clients, the run has {n}")
        self._version, self._checksum = index.version.numpy().copy(), index.checksum.numpy().copy()
        self._held.clear()
        self._unwritten.clear()
        for client in np.flatnonzero(self._version >= 0):
            self._blob(int(client))
        self._sweep([*(i.version.numpy() for i in older), self._version])

    def look(self, index: Index) -> None:
        """Read the states of an index, changing no file."""
        self._version, self._checksum = index.version.numpy().copy(), index.checksum.numpy().copy()

    def forget(self, oldest_kept: int) -> None:
        """Delete versions that were superseded before the oldest kept checkpoint."""
        for round, path in self._superseded:
            if round <= oldest_kept:
                path.unlink(missing_ok=True)
        self._superseded = [(r, p) for r, p in self._superseded if r > oldest_kept]

    def _sweep(self, kept: list[np.ndarray]) -> None:
        """Delete every file that no kept index refers to, as a crash may leave them."""
        named = {self.path(int(c), int(v[c])) for v in kept for c in np.flatnonzero(v >= 0)}
        for path in self.folder.glob("*/*"):
            if path not in named and (path.name.startswith(".") or path.suffix == SUFFIX):
                path.unlink(missing_ok=True)
        newest = kept[-1]
        for older in kept[:-1]:
            for client in np.flatnonzero((older >= 0) & (older != newest)):
                self._superseded.append((int(newest[client]), self.path(int(client), int(older[client]))))

    def _write(self, client: ClientId, state: State | Remote, round: int) -> None:
        blob = codec.pack(state.fetch() if isinstance(state, Remote) else state)
        old = int(self._version[client])
        path = self.path(client, round)
        if not self.folder.exists():
            self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        disk.write_atomic(path, blob, durable=False, mode=0o600)
        self._unsynced.append(path)
        if 0 <= old != round:
            self._superseded.append((round, self.path(client, old)))
        self._version[client], self._checksum[client] = round, zlib.crc32(blob)

    def _blob(self, client: ClientId) -> bytearray:
        path = self.path(client, int(self._version[client]))
        try:
            blob = bytearray(path.read_bytes())
        except OSError as e:
            raise CoterieError(f"the state of client {client} is missing: {path}") from e
        if zlib.crc32(blob) != self._checksum[client]:
            raise CoterieError(f"the state of client {client} is damaged: {path}")
        return blob

    def _read(self, client: ClientId) -> State:
        state: State = codec.unpack(self._blob(client))
        return state

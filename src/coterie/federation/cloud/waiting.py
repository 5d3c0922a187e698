"""How many clients a run needs, how long the cloud waits for them, and its pauses while too few are there."""

import logging
import math
import time
from collections.abc import Callable
from dataclasses import dataclass

from coterie.core.context import ClientId
from coterie.errors import CoterieError
from coterie.federation.cloud.liveness import Liveness
from coterie.federation.cloud.membership import Membership
from coterie.runtimes.base import Interrupted

_FIRST_PAUSE, _LONGEST_PAUSE = 1.0, 30.0  # seconds before a round is repeated; doubled with every repetition
log = logging.getLogger("coterie.cloud")


@dataclass(frozen=True)
class WaitingRules:
    """How many clients the cloud waits for, and how long."""

    min_clients: int = 1  # quorum: clients connected before a round, and answers that count after it
    deadline: float = 600.0  # seconds for the answers of a round
    stopped: Callable[[], bool] = lambda: False  # True once a stop was requested
    required: frozenset[ClientId] = frozenset()  # clients that must be connected before every round
    seconds: float = math.inf  # longest pause of a run that has begun


class QuorumError(CoterieError):
    """Too few clients for too long; the command line exits with code 3."""


class Waiting:
    """Waits for clients before rounds, and for a while before a round is repeated."""

    def __init__(self, rules: WaitingRules, membership: Membership, liveness: Liveness):
        self.rules, self.membership, self.liveness = rules, membership, liveness
        self.paused = ""  # reason of the present pause; empty while the run goes on
        self._paused_since: float | None = None
        self._repeats = 0  # attempts at the present round that did not count
        self._next_attempt = 0.0  # time before which the round is not repeated

    def for_quorum(self) -> None:
        """Wait until a round can start. A run that was resumed also waits a moment for the clients it had before.

        Raises QuorumError if that takes longer than the rules allow, Interrupted if a stop was requested, and
        CoterieError if a node that is required was refused.
        """
        rules, membership = self.rules, self.membership
        if not membership.begun:
            log.info("waiting for %s clients", rules.min_clients)
        while (left := self._next_attempt - time.monotonic()) > 0:
            self._check()
            time.sleep(min(0.3, left))
        since, pause = time.monotonic(), 0.02
        while True:
            self._check()
            connected, needed = membership.participants, rules.min_clients
            lacking = f"{connected} of {needed} clients are connected"
            self.liveness.work(lacking if connected < needed else "before the next round", membership.missing())
            membership.update()
            if rules.required and membership.refused:
                raise CoterieError(f"some clients cannot take part: {self.liveness.errors[-1]}")
            enough = membership.participants >= rules.min_clients and rules.required <= membership.connected
            expecting = membership.expecting()
            if enough and (membership.begun or not expecting):
                break
            if membership.begun and not expecting:
                self._pause(f"{membership.participants} of at least {rules.min_clients} clients are connected", since)
            time.sleep(pause)
            pause = min(0.3, 1.5 * pause)
        membership.begun = True
        if not self._repeats:
            self._resume()
        self.liveness.work("")

    def accept(self) -> None:
        """End the pauses of a round that counts."""
        self._repeats = 0
        self._resume()

    def repeat(self, why: str) -> None:
        """Pause before the round is repeated; `for_quorum` waits for the end of the pause."""
        self._repeats += 1
        self._next_attempt = time.monotonic() + min(_LONGEST_PAUSE, _FIRST_PAUSE * 2 ** (self._repeats - 1))
        self._pause(why, time.monotonic())

    def _pause(self, why: str, since: float) -> None:
        """Show the reason of a pause; the log gets one line per pause."""
        self._paused_since = self._paused_since or since
        if not self.paused:
            limit = "" if math.isinf(self.rules.seconds) else f" for at most {self.rules.seconds:g} s"
            self.liveness.problem(f"paused, waiting{limit}: {why}")
        self.paused = self.liveness.doing = why
        self.liveness.changed()

    def _check(self) -> None:
        if self.rules.stopped():
            raise Interrupted
        if self._paused_since is not None and time.monotonic() - self._paused_since > self.rules.seconds:
            raise QuorumError(f"too few clients for {self.rules.seconds:g} s: {self.paused}")

    def _resume(self) -> None:
        if self.paused:
            log.info("enough clients are connected, the run goes on")
        self.paused, self._paused_since = "", None

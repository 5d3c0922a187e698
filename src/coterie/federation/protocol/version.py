"""The version of what hosts of a federation say to each other. Cloud, edges and devices need the same number.

The version of the package does not count: hosts with different packages and the same number work together, as long as
the method of the run has the same code on both (plan.py compares a digest).

Raise the number with every change after which an older program would misunderstand a newer one or the other way round:

- a message (coterie/messages.py, messages.py here) or a field of the plan is added, removed or means something else;
- a setting of runs or federations is added, removed or means something else, because the plan carries them all;
- codec.py writes other bytes, or transport/wire.py another head or body (grpc_wire.py has a version of its own);
- a device, edge or cloud answers in another order, or expects an answer it did not expect before.

What must never change is how a plan begins its way: a `hello` with a PlanText whose JSON has the fields `protocol` and
`coterie`. From these the other side can tell which versions met, and say so.
"""

from importlib.metadata import version
from typing import Any

from coterie.errors import CoterieError

PROTOCOL = 6


def check_protocol(plan: Any) -> None:
    """Refuse a plan of another protocol, before anything else in it is looked at."""
    found = plan.get("protocol") if isinstance(plan, dict) else None
    if found != PROTOCOL or type(found) is not int:
        cloud = str(plan.get("coterie", "of unknown version"))[:40] if isinstance(plan, dict) else "of unknown version"
        number = f"protocol {found}" if type(found) is int else "no known protocol"
        raise CoterieError(
            f"the cloud speaks {number} (Coterie {cloud}), this host protocol {PROTOCOL} "
            f"(Coterie {version('coterie')}); both must have the same protocol"
        )

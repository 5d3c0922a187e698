"""The version of the messages between the hosts of a federation; cloud, edges and devices need the same number.

The version of the package does not matter: hosts with different versions of Coterie work together if they have the same
protocol number and the same code of the run's method (plan.py compares a digest).

Raise the number with every change that makes older and newer programs misunderstand each other:

- a message (engine/messages.py or messages.py here) or a field of the plan is added or removed, or changes its meaning;
- a setting of runs or partitions is added or removed, or changes its meaning, because the plan contains all settings;
- engine/codec.py writes different bytes (coterie.proto has a version of its own);
- a device, edge or cloud answers in a different order, or expects an answer that it did not expect before.

The beginning of a plan must never change: a `hello` with a PlanText whose JSON object has the fields `protocol` and
`coterie`. They let a host with a different protocol report both versions.
"""

from importlib.metadata import version
from typing import Any

from coterie.errors import CoterieError

PROTOCOL = 6


def check_protocol(plan: Any) -> None:
    """Raise CoterieError if a plan has a different protocol; its other fields are not read."""
    number = plan.get("protocol") if isinstance(plan, dict) else None
    if number != PROTOCOL or type(number) is not int:
        cloud = str(plan.get("coterie", "of unknown version"))[:40] if isinstance(plan, dict) else "of unknown version"
        spoken = f"protocol {number}" if type(number) is int else "no known protocol"
        raise CoterieError(
            f"the cloud speaks {spoken} (Coterie {cloud}), this host protocol {PROTOCOL} "
            f"(Coterie {version('coterie')}); both must have the same protocol"
        )

"""Isolation of faulty uploads: an error in a method's hook excludes only the sender whose upload causes it.

A round is a pure step, so it can be computed again without some of its answers until it succeeds.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

from coterie.core.context import ClientId, State
from coterie.core.method import Method
from coterie.engine.combining import Combiner
from coterie.engine.round import Edges, RoundAnswers, RoundPlan, RoundResult, close
from coterie.errors import CoterieError

log = logging.getLogger("coterie.cloud")
T = TypeVar("T")
Group = frozenset[ClientId]  # clients whose uploads are inseparable: a single one, or those that an edge has merged


class MethodFailedError(CoterieError):
    """A hook of the method raised an error whichever sender was excluded."""


@dataclass(frozen=True)
class Contained(Generic[T]):
    """The result of a computation, and the senders that it excludes."""

    result: T
    left_out: tuple[Group, ...] = ()
    certain: bool = True  # False: excluding a different sender would have helped too
    error: Exception | None = None  # error of the computation with all senders


def contain(groups: Sequence[Group], compute: Callable[[Group], T]) -> Contained[T]:
    """Run `compute` with all senders; if it raises, find the senders that cause the error and run it without them.

    Senders are excluded one at a time, in the given order. If several exclusions cure the error, the first one is used
    and marked as uncertain. If none does, all senders that raise on their own are excluded. If these are all senders,
    or excluding them does not help, the error does not depend on a sender and is raised.
    """
    try:
        return Contained(compute(frozenset()))
    except Exception as e:
        error = e
    everybody = frozenset[ClientId]().union(*groups)

    def attempt(left_out: Group) -> Contained[T] | None:
        try:
            return Contained(compute(left_out), error=error)
        except Exception as e:
            log.debug("still %s without clients %s", e, sorted(left_out))
            return None

    cures = [(group, result) for group in groups if (result := attempt(group)) is not None]
    if cures:
        group, result = cures[0]
        return replace(result, left_out=(group,), certain=len(cures) == 1)
    alone = [group for group in groups if attempt(everybody - group) is None]
    if 0 < len(alone) < len(groups) and (result := attempt(frozenset[ClientId]().union(*alone))) is not None:
        return replace(result, left_out=tuple(alone))
    raise error


def close_contained(
    method: Method,
    server: State,
    edges: Edges,
    plan: RoundPlan,
    answers: RoundAnswers,
    probe: Callable[[RoundResult], None] = lambda result: None,
    combiner: Combiner | None = None,
) -> RoundResult:
    """Close the round without the senders that make `close`, or `probe` of its result, raise an error."""
    groups = [frozenset({r.client}) for r in plan.direct if r.client in answers.trained]
    if answers.summed is not None:
        groups = [frozenset(answers.summed.clients)]
    groups += [
        frozenset(answers.merged[task.edge.id].senders)
        for task in plan.edges
        if task.edge.id in answers.merged and answers.merged[task.edge.id].senders
    ]

    def compute(left_out: Group) -> RoundResult:
        result = close(method, server, edges, plan, _without(answers, left_out, ""), combiner)
        probe(result)
        return result

    title = method.card.title or type(method).__name__
    try:
        contained = contain(groups, compute)
    except Exception as e:
        raise MethodFailedError(
            f"{title} failed in round {plan.round}, whoever is left out: {type(e).__name__}: {e}"
        ) from e
    if not contained.left_out:
        return contained.result
    error = contained.error
    log.error("%s failed in round %s and works without some clients", title, plan.round, exc_info=error)
    doubtful = set(contained.result.doubtful)
    reasons: dict[ClientId, str] = {}
    for group in contained.left_out:
        why = f"{title} failed on the upload: {type(error).__name__}: {error}"
        if len(group) > 1:
            why = f"{title} failed on the merged upload of clients {sorted(group)}: {type(error).__name__}: {error}"
        if len(group) > 1 or not contained.certain:
            doubtful |= group
        reasons |= dict.fromkeys(group, " ".join(why[:400].split()))
    refused = {**contained.result.refused, **reasons}
    return replace(
        contained.result,
        refused=refused,
        reasons=dict(sorted({**contained.result.reasons, **reasons}.items())),
        failed=sorted({*contained.result.failed, *reasons}),
        doubtful=frozenset(doubtful),
    )


def _without(answers: RoundAnswers, left_out: Group, why: str) -> RoundAnswers:
    if not left_out:
        return answers
    return replace(
        answers,
        trained={i: a for i, a in answers.trained.items() if i not in left_out},
        merged={e: m for e, m in answers.merged.items() if not left_out & set(m.senders)},
        summed=None if answers.summed is None or left_out & set(answers.summed.clients) else answers.summed,
        refused={**answers.refused, **dict.fromkeys(left_out, why)},
    )

"""The combiner that the settings of a run ask for."""

from coterie.config import RunSettings
from coterie.engine.combining import Combiner
from coterie.engine.server_optimiser import ServerOptimiser


def combiner_of(settings: RunSettings) -> Combiner | None:
    """Return the combiner of a run; None if the method gets the single uploads."""
    moves = () if settings.server_optimizer is None else (ServerOptimiser(settings.server_optimizer),)
    return Combiner(moves=moves) if moves else None

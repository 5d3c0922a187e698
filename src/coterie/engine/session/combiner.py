"""The combiner that the settings of a run ask for."""

from coterie.config import RunSettings
from coterie.engine.combining import Combiner
from coterie.engine.server_optimiser import ServerOptimiser
from coterie.privacy.noised_sum import NoisedSum
from coterie.privacy.setting import privacy_setting


def combiner_of(settings: RunSettings, secret: bool = False) -> Combiner | None:
    """Return the combiner of a run; None if the method gets the single uploads. `secret`: no noise is repeatable."""
    moves = () if settings.server_optimizer is None else (ServerOptimiser(settings.server_optimizer),)
    noised = NoisedSum(settings.dp, secret) if settings.dp and privacy_setting(settings.dp).unit == "client" else None
    return Combiner(noised, moves) if moves or noised else None

"""The combiner that the settings of a run ask for."""

from coterie.config import RunSettings
from coterie.data.federation import Federation
from coterie.engine.combining import Combiner
from coterie.engine.server_optimiser import ServerOptimiser
from coterie.errors import CoterieError
from coterie.privacy.noised_sum import NoisedSum
from coterie.privacy.secure_sum.setting import SecureSum
from coterie.privacy.setting import privacy_setting


def combiner_of(settings: RunSettings, federation: Federation, secret: bool = False) -> Combiner | None:
    """Return the combiner of a run; None if the method gets the single uploads. `secret`: no noise is repeatable."""
    moves = () if settings.server_optimizer is None else (ServerOptimiser(settings.server_optimizer),)
    noised = NoisedSum(settings.dp, secret) if settings.dp and privacy_setting(settings.dp).unit == "client" else None
    secure = None if settings.secure is None else SecureSum(settings.secure, _largest(federation))
    if noised and secure:
        raise CoterieError(
            f"dp = {settings.dp} cannot be combined with secure = {settings.secure}: its noise is central"
        )
    return Combiner(secure or noised, moves) if secure or noised or moves else None


def _largest(federation: Federation) -> int | None:
    """Return the samples of the largest client at any time; None on a host that knows its own data only."""
    if not federation.knows_all_clients:
        return None
    return max(int(federation.sizes("train", t).max()) for t in federation.timeline.rounds)

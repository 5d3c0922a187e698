"""The combiner and the cap of weights that the settings of a run ask for."""

from coterie.config import RunSettings
from coterie.core.method import Method
from coterie.data.federation import Federation
from coterie.engine.combining import Combiner
from coterie.engine.robust import RobustEstimate
from coterie.engine.server_optimiser import ServerOptimiser
from coterie.errors import CoterieError
from coterie.privacy.noised_sum import NoisedSum
from coterie.privacy.secure_sum.setting import SecureSum
from coterie.privacy.setting import privacy_setting

WEIGHT_CAP = 10.0  # multiple of the median, for a federation, where the numbers of samples cannot be checked


def combiner_of(settings: RunSettings, method: Method, federation: Federation, secret: bool = False) -> Combiner | None:
    """Return the combiner of a run; None if the method gets the single uploads. `secret`: no noise is repeatable."""
    moves = () if settings.server_optimizer is None else (ServerOptimiser(settings.server_optimizer),)
    sends = bool(method.schema("up").entries)  # False for Local-Only, which has nothing to combine
    central = settings.dp is not None and privacy_setting(settings.dp).unit == "client"
    noised = NoisedSum(settings.dp or "", secret) if central and sends else None
    secure = None if settings.secure is None else SecureSum(settings.secure, _largest(federation))
    if noised and secure:
        raise CoterieError(
            f"dp = {settings.dp} cannot be combined with secure = {settings.secure}: its noise is central"
        )
    robust = RobustEstimate(settings.robust) if settings.robust is not None and sends else None
    if robust and (noised or secure):
        other = f"dp = {settings.dp}" if noised else f"secure = {settings.secure}"
        raise CoterieError(f"robust = {settings.robust} cannot be combined with {other}, which is for a sum of uploads")
    return Combiner(secure or noised or robust, moves) if secure or noised or robust or moves else None


def _largest(federation: Federation) -> int | None:
    """Return the samples of the largest client at any time; None on a host that knows its own data only."""
    if not federation.knows_all_clients:
        return None
    return max(int(federation.sizes("train", t).max()) for t in federation.timeline.rounds)


def weight_cap_of(settings: RunSettings, federation: Federation) -> float | None:
    """Return the largest number of samples that counts, as a multiple of the round's median; None without a cap."""
    if settings.weight_cap is not None:
        return settings.weight_cap or None
    unchecked = not federation.knows_all_clients or settings.attack is not None
    return WEIGHT_CAP if unchecked else None

"""Ablations and controls of FedPC and of its mended version: the methods with other defaults."""

from dataclasses import replace

from coterie.methods.fedpc.mended import FedPCMended
from coterie.methods.fedpc.settings import FedPCMendedSettings, FedPCSettings
from coterie.methods.fedpc.text import FedPC
from coterie.parts.variants import with_defaults


class FedPCJ1(FedPC):
    """One group: no clustering."""

    Settings = with_defaults(FedPCSettings, J=1)
    card = replace(FedPC.card, title="FedPC J=1")


class FedPCNoProto(FedPC):
    """Prototypes teach nothing."""

    Settings = with_defaults(FedPCSettings, gamma=0.0)
    card = replace(FedPC.card, title="FedPC no prototype loss")


class FedPCNoMixing(FedPC):
    """Groups learn separately."""

    Settings = with_defaults(FedPCSettings, inter="none")
    card = replace(FedPC.card, title="FedPC no mixing")


class FedPCMean(FedPC):
    """Groups are averaged with equal weights: one global extractor."""

    Settings = with_defaults(FedPCSettings, inter="mean")
    card = replace(FedPC.card, title="FedPC mean")


class FedPCRandom(FedPC):
    """Random groups of the same sizes, which show what the clustering itself is worth."""

    Settings = with_defaults(FedPCSettings, grouping="random")
    card = replace(FedPC.card, title="FedPC random groups")


class FedPCMendedJ1(FedPCMended):
    """One group: no clustering."""

    Settings = with_defaults(FedPCMendedSettings, J=1)
    card = replace(FedPCMended.card, title="FedPC (mended, J=1)")


class FedPCMendedNoProto(FedPCMended):
    """Prototypes teach nothing."""

    Settings = with_defaults(FedPCMendedSettings, gamma=0.0, rehearsal=0.0)
    card = replace(FedPCMended.card, title="FedPC (mended, no prototype loss)")


class FedPCMendedNoMixing(FedPCMended):
    """Groups learn separately."""

    Settings = with_defaults(FedPCMendedSettings, inter="none")
    card = replace(FedPCMended.card, title="FedPC (mended, no mixing)")


class FedPCMendedMean(FedPCMended):
    """Groups are averaged with equal weights: one global extractor."""

    Settings = with_defaults(FedPCMendedSettings, inter="mean")
    card = replace(FedPCMended.card, title="FedPC (mended, mean)")


class FedPCMendedRandom(FedPCMended):
    """Random groups of the same sizes, which show what the clustering itself is worth."""

    Settings = with_defaults(FedPCMendedSettings, grouping="random")
    card = replace(FedPCMended.card, title="FedPC (mended, random groups)")

"""Ablations and controls of FedPC: the method with other defaults."""

from coterie.core.method import replace
from coterie.methods.fedpc.method import FedPC
from coterie.methods.fedpc.settings import FedPCSettings
from coterie.parts.variants import with_defaults


class FedPCJ1(FedPC):
    """One group: no clustering."""

    Settings = with_defaults(FedPCSettings, J=1)
    card = replace(FedPC.card, title="FedPC J=1")


class FedPCNoProto(FedPC):
    """Prototypes teach nothing: neither a pull towards them nor a rehearsal."""

    Settings = with_defaults(FedPCSettings, gamma=0.0, rehearsal=0.0)
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
    """Random groups of the same sizes: what the clustering itself is worth."""

    Settings = with_defaults(FedPCSettings, grouping="random")
    card = replace(FedPC.card, title="FedPC random groups")

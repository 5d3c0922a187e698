"""FedPC: clients grouped by class prototypes, extractors and prototypes mixed across similar groups."""

from coterie.methods.fedpc.method import FedPC
from coterie.methods.fedpc.settings import FedPCSettings
from coterie.methods.fedpc.variants import FedPCJ1, FedPCMean, FedPCNoMixing, FedPCNoProto, FedPCRandom

__all__ = ["FedPC", "FedPCJ1", "FedPCMean", "FedPCNoMixing", "FedPCNoProto", "FedPCRandom", "FedPCSettings"]

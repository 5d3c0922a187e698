"""FedCPMD: every client keeps one layer of its own choice; clients with the same layer form a cluster."""

from coterie.methods.fedcpmd.method import FedCPMD
from coterie.methods.fedcpmd.settings import FedCPMDSettings
from coterie.methods.fedcpmd.variants import (
    FedCPMDAuto,
    FedCPMDClassifier,
    FedCPMDFull,
    FedCPMDOnlyCluster,
    FedCPMDOnlyDecoupling,
    FedCPMDOracle,
    FedCPMDRandom,
)

__all__ = [
    "FedCPMD",
    "FedCPMDAuto",
    "FedCPMDClassifier",
    "FedCPMDFull",
    "FedCPMDOnlyCluster",
    "FedCPMDOnlyDecoupling",
    "FedCPMDOracle",
    "FedCPMDRandom",
    "FedCPMDSettings",
]

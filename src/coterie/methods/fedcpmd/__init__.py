"""FedCPMD: every client keeps one layer of its own choice, found by votes."""

from coterie.methods.fedcpmd.code import FedCPMDCode
from coterie.methods.fedcpmd.mended import FedCPMDMended
from coterie.methods.fedcpmd.settings import FedCPMDCodeSettings, FedCPMDMendedSettings, FedCPMDSettings
from coterie.methods.fedcpmd.text import FedCPMD
from coterie.methods.fedcpmd.variants import (
    FedCPMDAuto,
    FedCPMDClassifier,
    FedCPMDCodeAuto,
    FedCPMDCodeClassifier,
    FedCPMDCodeOracle,
    FedCPMDCodeRandom,
    FedCPMDFull,
    FedCPMDMendedAuto,
    FedCPMDMendedClassifier,
    FedCPMDMendedOracle,
    FedCPMDMendedRandom,
    FedCPMDOnlyCluster,
    FedCPMDOnlyDecoupling,
    FedCPMDOracle,
    FedCPMDRandom,
)

__all__ = [
    "FedCPMD",
    "FedCPMDAuto",
    "FedCPMDClassifier",
    "FedCPMDCode",
    "FedCPMDCodeAuto",
    "FedCPMDCodeClassifier",
    "FedCPMDCodeOracle",
    "FedCPMDCodeRandom",
    "FedCPMDCodeSettings",
    "FedCPMDFull",
    "FedCPMDMended",
    "FedCPMDMendedAuto",
    "FedCPMDMendedClassifier",
    "FedCPMDMendedOracle",
    "FedCPMDMendedRandom",
    "FedCPMDMendedSettings",
    "FedCPMDOnlyCluster",
    "FedCPMDOnlyDecoupling",
    "FedCPMDOracle",
    "FedCPMDRandom",
    "FedCPMDSettings",
]

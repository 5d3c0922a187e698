"""SC-FPFL: clients clustered by their predictions, edges mixed in the Fourier domain, an agent at every client."""

from coterie.methods.scfpfl.mended import SCFPFLMended
from coterie.methods.scfpfl.settings import SCFPFLMendedSettings, SCFPFLSettings
from coterie.methods.scfpfl.text import SCFPFL
from coterie.methods.scfpfl.variants import (
    SCFPFLClusterOnly,
    SCFPFLFourierOnly,
    SCFPFLMendedClusterOnly,
    SCFPFLMendedFourierOnly,
    SCFPFLMendedNoAgent,
    SCFPFLMendedNoKL,
    SCFPFLNoAgent,
    SCFPFLNoKL,
)

__all__ = [
    "SCFPFL",
    "SCFPFLClusterOnly",
    "SCFPFLFourierOnly",
    "SCFPFLMended",
    "SCFPFLMendedClusterOnly",
    "SCFPFLMendedFourierOnly",
    "SCFPFLMendedNoAgent",
    "SCFPFLMendedNoKL",
    "SCFPFLMendedSettings",
    "SCFPFLNoAgent",
    "SCFPFLNoKL",
    "SCFPFLSettings",
]

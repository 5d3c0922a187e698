"""SC-FPFL: clients clustered by their predictions, edges mixed in the Fourier domain, an agent at every client."""

from coterie.methods.scfpfl.method import SCFPFL
from coterie.methods.scfpfl.settings import SCFPFLSettings
from coterie.methods.scfpfl.variants import SCFPFLClusterOnly, SCFPFLFourierOnly, SCFPFLNoAgent, SCFPFLNoKL

__all__ = ["SCFPFL", "SCFPFLClusterOnly", "SCFPFLFourierOnly", "SCFPFLNoAgent", "SCFPFLNoKL", "SCFPFLSettings"]

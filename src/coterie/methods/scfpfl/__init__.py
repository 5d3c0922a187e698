"""SC-FPFL: clients clustered by their predictions, edges mixed in the Fourier domain, an agent at every client."""

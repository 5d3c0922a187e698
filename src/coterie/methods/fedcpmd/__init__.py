"""FedCPMD: every client keeps one layer of its own choice, found by votes."""

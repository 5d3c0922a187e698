"""FedGMH: the server trains classifier heads on the clients' mean features; each client keeps a whole model."""

"""ECS-FL: one model for all clients, averaged over devices that are selected by how their models moved."""

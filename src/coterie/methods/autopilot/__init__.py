"""Autopilot: the federation trains one model, and each client chooses the model it uses."""

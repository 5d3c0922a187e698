"""Autopilot: the federation trains one model, and each client chooses the model it uses."""

from coterie.methods.autopilot.candidates import CANDIDATES
from coterie.methods.autopilot.method import Autopilot, AutopilotSettings

__all__ = ["CANDIDATES", "Autopilot", "AutopilotSettings"]

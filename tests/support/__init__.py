"""Helpers that tests share."""

from pathlib import Path

TESTS = Path(__file__).parents[1]
ROOT = TESTS.parent

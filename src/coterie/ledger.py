"""Bytes, counted where values cross a link, from the payload itself."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

Part = Callable[[str], str]


def weigh(tree: Mapping[str, Tensor], part: Part) -> dict[str, int]:
    """Bytes of a payload by part; booleans weigh one bit each."""
    total: dict[str, int] = {}
    for name, v in tree.items():
        size = (v.numel() + 7) // 8 if v.dtype == torch.bool else v.numel() * v.element_size()
        total[part(name)] = total.get(part(name), 0) + size
    return total


class Ledger:
    """Totals per link ("device-cloud", "device-edge", "edge-cloud"), direction ("up", "down") and part."""

    def __init__(self, part: Part):
        self.part = part
        self.totals: dict[str, dict[str, dict[str, int]]] = {}
        self._round: dict[str, dict[str, dict[str, int]]] = {}

    def count(self, link: str, direction: str, tree: Mapping[str, Tensor], times: int = 1) -> int:
        """Write down `times` copies of a payload; returns the bytes of one."""
        sizes = weigh(tree, self.part)
        for book in (self.totals, self._round):
            page = book.setdefault(link, {}).setdefault(direction, {})
            for part, size in sizes.items():
                page[part] = page.get(part, 0) + size * times
        return sum(sizes.values())

    def close_round(self) -> dict[str, Any]:
        """The bytes of the round that ends."""
        page, self._round = self._round, {}
        return page

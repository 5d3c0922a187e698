"""Declared bytes: the sizes of payloads, counted where they cross a link."""

from collections.abc import Iterable, Mapping

Page = dict[str, dict[str, dict[str, int]]]  # link -> "up", "down" -> heading -> bytes

DEVICE_CLOUD, DEVICE_EDGE, EDGE_CLOUD = "device-cloud", "device-edge", "edge-cloud"


def add_bytes(page: Page, link: str, direction: str, sizes: Mapping[str, int]) -> None:
    """Add the bytes of one payload to a page, by heading."""
    line = page.setdefault(link, {}).setdefault(direction, {})
    for part, size in sizes.items():
        line[part] = line.get(part, 0) + size


def total(pages: Iterable[Page]) -> Page:
    """Return the sum of several pages."""
    out: Page = {}
    for page in pages:
        for link, directions in page.items():
            for direction, sizes in directions.items():
                add_bytes(out, link, direction, sizes)
    return out


def summed(sizes: Iterable[Mapping[str, int]]) -> dict[str, int]:
    """Return the sum of several payloads, by heading."""
    out: dict[str, int] = {}
    for one in sizes:
        for part, size in one.items():
            out[part] = out.get(part, 0) + size
    return out

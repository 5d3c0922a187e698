"""Where runs go when nobody says."""

import time
from pathlib import Path


def fresh_folder(name: str, root: Path = Path("runs")) -> Path:
    """runs/NAME-DATE-TIME, not there yet."""
    plain = "".join(c if c.isalnum() or c in "-_." else "-" for c in name.split("/")[-1])
    base = root / f"{plain}-{time.strftime('%Y%m%d-%H%M%S')}"
    path, n = base, 1
    while path.exists():
        n += 1
        path = base.with_name(f"{base.name}-{n}")
    return path

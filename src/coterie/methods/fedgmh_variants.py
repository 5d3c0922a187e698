"""The ablations of the FedGMH paper (Table 5): FedGMH with other defaults.

The average has no mask to wait for, so it acts from a client's first participation on.
"""

from typing import Literal

from coterie.methods.fedgmh import FedGMH, FedGMHSettings


class OneHeadSettings(FedGMHSettings):
    heads: Literal["per_label", "one"] = "one"


class AverageSettings(FedGMHSettings):
    write: Literal["mask", "average"] = "average"


class OneAverageSettings(OneHeadSettings):
    write: Literal["mask", "average"] = "average"


class FedGMHo(FedGMH):
    """One head trained on all labels, written in by the mask."""

    Settings = OneHeadSettings
    title = "GMH-o"


class FedGMHa(FedGMH):
    """Per-label heads, averaged with the client's own instead of masked."""

    Settings = AverageSettings
    title = "GMH-a"


class FedGMHoa(FedGMH):
    """One head, averaged."""

    Settings = OneAverageSettings
    title = "GMH-oa"

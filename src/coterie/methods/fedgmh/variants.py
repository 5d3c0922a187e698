"""The ablations of the FedGMH paper (Table 5): FedGMH with other defaults.

The average has no mask to wait for, so it acts from a client's first participation.
"""

from dataclasses import replace

from coterie.methods.fedgmh.settings import FedGMHSettings
from coterie.methods.fedgmh.text import FedGMH
from coterie.parts.variants import with_defaults


class FedGMHo(FedGMH):
    """One head trained on all labels, written in by the mask."""

    Settings = with_defaults(FedGMHSettings, heads="one", criticality="product")
    card = replace(FedGMH.card, title="GMH-o")


class FedGMHa(FedGMH):
    """Per-label heads, averaged with the client's own instead of masked."""

    Settings = with_defaults(FedGMHSettings, write="average")
    card = replace(FedGMH.card, title="GMH-a")


class FedGMHoa(FedGMH):
    """One head, averaged."""

    Settings = with_defaults(FedGMHSettings, heads="one", write="average")
    card = replace(FedGMH.card, title="GMH-oa")

"""The ablations of the FedGMH paper (Table 5): FedGMH with other defaults.

The average has no mask to wait for, so it acts from a client's first participation.
"""

from coterie.methods.fedgmh.text import FedGMH
from coterie.parts.variants import variant

FedGMHo = variant(
    FedGMH, "FedGMHo", "GMH-o", "One head trained on all labels, written in by the mask.", heads="one",
    criticality="product",
)  # fmt: skip
FedGMHa = variant(
    FedGMH, "FedGMHa", "GMH-a", "Heads per label, averaged with the client's own instead of masked.", write="average"
)
FedGMHoa = variant(FedGMH, "FedGMHoa", "GMH-oa", "One head, averaged.", heads="one", write="average")

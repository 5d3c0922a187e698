"""FedGMH: the server keeps one head per label, and clients write what is critical to them into their own head."""

from coterie.methods.fedgmh.method import FedGMH
from coterie.methods.fedgmh.settings import FedGMHSettings
from coterie.methods.fedgmh.variants import FedGMHa, FedGMHo, FedGMHoa

__all__ = ["FedGMH", "FedGMHSettings", "FedGMHa", "FedGMHo", "FedGMHoa"]

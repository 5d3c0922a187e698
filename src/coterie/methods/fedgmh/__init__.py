"""FedGMH: the server trains classifier heads on the clients' mean features; each client keeps a whole model."""

from coterie.methods.fedgmh.mended import FedGMHMended
from coterie.methods.fedgmh.settings import FedGMHMendedSettings, FedGMHSettings
from coterie.methods.fedgmh.text import FedGMH
from coterie.methods.fedgmh.variants import FedGMHa, FedGMHo, FedGMHoa

__all__ = ["FedGMH", "FedGMHMended", "FedGMHMendedSettings", "FedGMHSettings", "FedGMHa", "FedGMHo", "FedGMHoa"]

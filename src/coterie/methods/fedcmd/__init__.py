from coterie.methods.fedcmd.method import FedCMD, FedCMDSettings

__all__ = ["FedCMD", "FedCMDSettings"]

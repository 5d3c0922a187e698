from coterie.methods.cd2pfed.method import CD2pFed, CD2pFedSettings

__all__ = ["CD2pFed", "CD2pFedSettings"]

"""Coterie as a Flower app: a ServerApp and a ClientApp that run on an unmodified SuperLink and SuperNodes.

The ServerApp is the cloud of a federation, and a SuperNode is a device; only the link between them is Flower's. The
modules link, server_app and client_app need Flower (`coterie[flower]`); project does not.
"""

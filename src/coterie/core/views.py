"""The views: which model of a client is scored."""

from typing import Literal, get_args

View = Literal["personal", "global", "received", "trained", "edge", "adapted"]
VIEWS: tuple[View, ...] = get_args(View)
# views that are scored after the last round, or if one of them is the headline
RequestedView = Literal["received", "trained", "edge"]
ON_REQUEST: tuple[RequestedView, ...] = get_args(RequestedView)

# Rules for the model that a client uses (train/rule_of_use.py).
Use = Literal["received", "trained", "best", "guarded"]

# Models that Method.model makes. A newcomer is a client that has never taken part; `watched` is what the setting
# `watch` scores before the local training of every round.
ModelView = Literal["personal", "newcomer", "watched", "received", "trained", "edge"]

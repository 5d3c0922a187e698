"""Secure aggregation: a server learns the sum of its clients' uploads and nothing about a single one.

The protocol is that of Bonawitz et al., CCS 2017, on a sparse graph of neighbours as in Bell et al., CCS 2020. `client`
and `server` are pure functions over the messages in `messages`; `shamir`, `primitives` and `neighbours` hold their
building blocks, and `fixed_point` the numbers that are summed. All primitives come from the package cryptography.
"""

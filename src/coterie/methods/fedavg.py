"""FedAvg. McMahan, Moore, Ramage, Hampson, Agüera y Arcas, AISTATS 2017 (arXiv 1602.05629).

Everybody trains a copy of one model; the server averages the copies by sample counts. All hooks are the defaults.
Its personal model is the global one; `trained` is FedAvg followed by local training.
"""

from coterie.core.method import Card, Method


class FedAvg(Method):
    card = Card("FedAvg", "McMahan et al., AISTATS 2017, arXiv 1602.05629", 2017, "G", certainty="B")

"""FedAvg. McMahan, Moore, Ramage, Hampson, Agüera y Arcas, AISTATS 2017 (arXiv 1602.05629).

Participants train copies of one model; the server averages the copies by sample counts. All hooks are the defaults.
The personal model is the global one; the view `trained` is FedAvg followed by local training.
"""

from coterie.core.method import Card, Method


class FedAvg(Method):
    card = Card("FedAvg", "McMahan et al., AISTATS 2017, arXiv 1602.05629", 2017, "G", certainty="B")

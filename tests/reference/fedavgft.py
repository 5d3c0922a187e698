"""FedAvg + fine-tuning and LP-FT: rounds are FedAvg's; fine-tuning is a view, so the trained copies are compared in
tests/test_methods_global_baselines.py."""

from reference import About, Case, Result, World
from reference.fedavg import reference as fedavg

ABOUT = {
    "fedavg-ft": About("FL-bench's and PFLlib's fine-tuning", ("fine-tuned with the run's rate and batch",)),
    "lp-ft": About("paper's equations", ("the federation's model stands for the pre-trained one",)),
}


def reference(world: World, **settings: float) -> Result:
    return fedavg(world)


CASES = [Case("fedavg-ft", reference), Case("lp-ft", reference)]

"""Write docs/parity.md from the references: `python tests/reference/table.py`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from coterie.methods import find, method_names
from reference import TOLERANCE, abouts, cases

PAGE = Path(__file__).parents[2] / "docs" / "parity.md"
INTRODUCTION = f"""# Agreement with papers and authors' code

Every method is written a second time in `tests/reference/`, in plain PyTorch, from the paper's equations or after the
authors' public code. `tests/methods/test_parity.py` runs both versions for three rounds on six clients of unequal size,
half of them in each round, with short last batches, on an MLP and on a small CNN with batch norm, from the same initial
weights and with the same batches. It compares the weights of server and clients up to {TOLERANCE:.0e}, and the clients'
predictions, in which differences of weights add up, up to five times that. A test also checks that changed methods fail
the comparison.

"Authors' code" means that the reference does what that code does with these settings. "Paper's equations" means that no
code of the authors was found, or that it was not followed. The letter is the certainty on the method's page: A, checked
against the authors' code; B, checked against other code; P, written from the paper; C, reconstructed from published
descriptions. Departures are those of the default settings; a setting in brackets removes one.

`python tests/reference/table.py` writes this page, and a test checks that it is up to date.

| method | | agrees with | settings compared | departures that remain |
|---|---|---|---|---|
"""
NOT_IMPLEMENTED = """
## Named in the papers and not implemented

The five papers reproduced here cite these methods as related work. A method is added if its published description
determines it.

| method | cited as | reason |
|---|---|---|
| FedCRAC | Li et al., IEEE Transactions on Mobile Computing 24(1), 2025 | the paper was not accessible; the authors' \
code retrains the classifier of the previous round and drops the averaged one, and whether that is meant is open |
| FedSeProto | Lai et al., ECAI 2024 | the paper was not accessible, and no code was found |
| FedUC | Ma et al., IEEE Transactions on Mobile Computing 23(10), 2024 | the paper was not accessible, and no code \
was found |
| FediOS | Gao et al., arXiv 2311.18559 | only the abstract was accessible, and no code was found: dimensions of the \
projections, the combination of both features and the losses are open |
| SnapCFL | Cheng et al., IEEE Transactions on Mobile Computing 24(6), 2025 | only the abstract was accessible, and no \
code was found: the two-sample test and the constraint on selection are open |
"""


def page() -> str:
    rows, tried = [], cases()
    for name, about in sorted(abouts().items()):
        if name not in method_names():
            continue
        card = find(name).card
        settings = "; ".join(dict.fromkeys(_settings(c) for c in tried if c.method == name))
        departures = "; ".join(about.departures) or "none"
        rows.append(f"| {card.title} (`{name}`) | {card.certainty} | {about.agrees} | {settings} | {departures} |")
    return INTRODUCTION + "\n".join(rows) + "\n" + NOT_IMPLEMENTED


def _settings(case) -> str:  # type: ignore[no-untyped-def]
    both = {**case.settings, **case.run}
    return ", ".join(f"{k} = {v}" for k, v in both.items()).replace("|", "\\|") or "defaults"


if __name__ == "__main__":
    PAGE.write_text(page())

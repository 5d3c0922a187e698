"""Personal models of a run as modules with preprocessing, and as files."""

from pathlib import Path

from torch import nn

from coterie.engine.personal_models import SavedRun
from coterie.export.personal_model import Predictor, as_module, describe_model, run_fingerprint, write_model


def client_module(saved: SavedRun, client: int | str) -> nn.Module:
    """Return a client's model as the client uses it, in evaluation mode."""
    number = saved.session.federation.number(client)
    return as_module(saved.session.method_of(number), *saved.adapted(number))


def client_predictor(saved: SavedRun, client: int | str) -> Predictor:
    """Return a client's model with the run's preprocessing, in evaluation mode."""
    number, module = saved.session.federation.number(client), client_module(saved, client)
    run = run_fingerprint(saved.session)
    return Predictor(module, describe_model(saved.session, number, module, saved.checkpoint.round, run)).eval()


def export_model(model: Predictor, path: Path) -> str:
    """Write a personal model as a safetensors file; return code that loads the file."""
    write_model(path, model.network, model.about)
    given = ""
    if model.about.own_model is not None:
        name = model.about.own_model.rpartition(":")[2].rpartition(".")[2]
        given = f", model={name})  # {name}: your own"
    return f"import coterie\nmodel = coterie.load_model({str(path)!r}{given or ')'}"

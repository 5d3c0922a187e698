"""Personal models from a run's folder."""

from pathlib import Path

from torch import nn

from coterie.core.method import ClientData, Extras, Method
from coterie.core.tree import Tree, mean
from coterie.engine.edge_steps import preview
from coterie.engine.session import Session, client_states
from coterie.errors import CoterieError
from coterie.export.personal_model import Predictor, as_module, described, in_use, write
from coterie.results.run import Run
from coterie.storage.checkpoint import Checkpoint, read
from coterie.storage.client_states import ClientStates
from coterie.storage.run_folder import checkpoints


class Saved:
    """A run as its newest checkpoint left it; the folder is only read."""

    def __init__(self, run: Run):
        run.refuse_devices()
        self.session: Session = run.session()
        self.method = self.session.method
        files = checkpoints(run.path)
        if not files:
            raise CoterieError(f"{run.path / 'checkpoints'} holds no checkpoint yet")
        last = files[-1].with_name(f"{run.last_round:06d}.state")
        if run.finished and files[-1] != last:
            raise CoterieError(f"{last} is missing; `coterie run --resume {run.path}` recomputes it")
        self.checkpoint: Checkpoint = read(files[-1], type(self.method).__name__)
        self.states: ClientStates = client_states(self.session, run.path)
        self.states.look(self.checkpoint.clients)

    def _given(self, client: int | str) -> tuple[Method, ClientData, Tree]:
        """What a client's hooks are given before the next round."""
        number = self.session.federation.number(client)
        saved = self.checkpoint
        shared, own = preview(self.method, saved.server, saved.edges, [number], saved.round + 1)[number]
        return self.session.method_of(number), self.session.federation.data(number), {**shared, **own}

    def personal(self, client: int | str) -> tuple[Tree, Extras]:
        """Parameters and extras of a client's personal model."""
        return self._model(client, adapt=False)

    def adapted(self, client: int | str) -> tuple[Tree, Extras]:
        """The same after the fine-tuning that comes before use, if the method has some."""
        return self._model(client, adapt=True)

    def _model(self, client: int | str, adapt: bool) -> tuple[Tree, Extras]:
        method, data, download = self._given(client)
        state, rule = self.states.get(data.client), self.session.clients().rule
        return in_use(method, rule, state, download, data, self.checkpoint.round + 1, adapt)

    def module(self, client: int | str) -> nn.Module:
        """A client's model as it is used."""
        number = self.session.federation.number(client)
        return as_module(self.session.method_of(number), *self.adapted(number))

    def plain(self) -> bool:
        """Is a personal model just the network with other parameters?"""
        return type(self.method).predict is Method.predict


def personal_trees(run: Run) -> tuple[Session, dict[int, Tree]]:
    """Parameters of every client's personal model at the newest checkpoint; newcomers are left out."""
    saved = Saved(run)
    return saved.session, {int(i): saved.personal(i)[0] for i in saved.method.ctx.clients}


def mean_model(path: Path) -> Tree:
    """The global model of a run, or else the mean of its clients' personal models."""
    saved = Saved(Run(path))
    whole = saved.method.global_model(saved.checkpoint.server)
    if whole is not None:
        return {k: whole[k].clone() for k in saved.method.ctx.w0}
    if not saved.plain():
        raise CoterieError(
            f"{path} has no global model, and a model of {saved.method.card.title} is more than its network; "
            "it cannot be started from"
        )
    names = saved.method.ctx.w0
    return mean([{k: saved.personal(i)[0][k] for k in names} for i in saved.method.ctx.clients])


def personal_module(run: Run, client: int | str) -> nn.Module:
    return Saved(run).module(client)


def predictor(run: Run, client: int | str) -> Predictor:
    """A client's model with the run's preprocessing."""
    saved = Saved(run)
    number, module = saved.session.federation.number(client), saved.module(client)
    return Predictor(module, described(saved.session, number, module, saved.checkpoint.round, run.path.name)).eval()


def export(run: Run, client: int | str, path: Path) -> str:
    """Write the personal model as safetensors; returns code that loads the file."""
    model = predictor(run, client)
    write(path, model.network, model.about)
    given = ""
    if model.about.own_model is not None:
        name = model.about.own_model.rpartition(":")[2].rpartition(".")[2]
        given = f", model={name})  # {name}: your own"
    return f"import coterie\nmodel = coterie.load_model({str(path)!r}{given or ')'}"

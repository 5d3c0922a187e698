"""Personal models of a run as trees, read from its newest checkpoint. The run's folder is only read."""

from pathlib import Path

import torch

from coterie.config import RunSettings
from coterie.core.context import ClientData, State
from coterie.core.method import Client, Method, Model, Start
from coterie.core.tree import Tree, clone, mean
from coterie.core.views import ModelView, Use
from coterie.engine.codec import moved
from coterie.engine.edge_steps import preview
from coterie.engine.session import Session, rebuild
from coterie.errors import CoterieError
from coterie.runtimes.registry import runtime_kind
from coterie.storage.checkpoint import Checkpoint, load_checkpoint
from coterie.storage.client_states import ClientStates
from coterie.storage.run_folder import checkpoints, read_events, read_settings
from coterie.train.clients import client_state
from coterie.train.optimisers import Optimiser
from coterie.train.rule_of_use import model_used
from coterie.train.trainer import train


def model_in_use(
    method: Method,
    rule: Optimiser,
    state: State | None,
    download: Tree,
    data: ClientData,
    round: int,
    adapt: bool = True,
    use: Use = "received",
) -> Model:
    """Return parameters and extras of the model that a client uses before this round.

    That is the personal model, fine-tuned first if the method adapts before use. A client without a state has never
    trained.
    """
    view: ModelView = "newcomer" if state is None else "personal"
    with torch.no_grad():
        device = method.ctx.device
        stored = moved(client_state(method, state, data), device, {})
        model = method.model(view, Client(stored.state, download, data, round))
        assert model is not None
        model = model_used(method, use, stored.used, Model(*moved(tuple(model), device, {})), data)
    start = Start(clone(model[0]), dict(model[1]))
    phases = method.adapt() if adapt else []
    trained = train(method.ctx, rule, phases, start, data, round)[0] if phases else start
    return Model(trained.params, trained.extras)


def refuse_devices(path: Path) -> None:
    """Raise CoterieError if the personal models of the run in `path` are on the devices of a federation."""
    if runtime_kind((read_settings(path).get("engine") or {}).get("runtime", "local")).states_stay_on_devices:
        raise CoterieError(
            f"the personal models of {path} are on the devices of the federation, each in model.safetensors "
            "of its state folder; `coterie predict` works there"
        )


class SavedRun:
    """A run as its newest checkpoint left it: the session, the server's state and the clients' states."""

    def __init__(self, path: Path, session: Session):
        refuse_devices(path)
        self.path, self.session, self.method = path, session, session.method
        events, files = read_events(path), checkpoints(path)
        if not files:
            raise CoterieError(f"{path / 'checkpoints'} holds no checkpoint yet")
        last_round = int(events[-1]["round"]) if events else 0
        finished = last_round >= int(read_settings(path)["settings"]["rounds"]) or (events and events[-1].get("ended"))
        last = files[-1].with_name(f"{last_round:06d}.state")
        if finished and files[-1] != last:
            raise CoterieError(f"{last} is missing; `coterie run --resume {path}` recomputes it")
        self.checkpoint: Checkpoint = load_checkpoint(files[-1], type(self.method).__name__)
        self.states: ClientStates = session.states(path)
        self.states.look(self.checkpoint.clients)

    def personal(self, client: int | str) -> Model:
        """Return parameters and extras of a client's personal model."""
        return self._model(client, adapt=False)

    def adapted(self, client: int | str) -> Model:
        """Return the personal model after the fine-tuning before use, if the method has one."""
        return self._model(client, adapt=True)

    def _model(self, client: int | str, adapt: bool) -> Model:
        number, saved = self.session.federation.number(client), self.checkpoint
        shared, own = preview(self.method, saved.server, saved.edges, [number], saved.round + 1)[number]
        method, data = self.session.method_of(number), self.session.federation.data(number, saved.round)
        state, rule = self.states.get(number), self.session.clients().rule
        return model_in_use(method, rule, state, {**shared, **own}, data, saved.round + 1, adapt, self.session.use)

    def personal_trees(self) -> dict[int, Tree]:
        """Return the parameters of every client's personal model; newcomers are left out."""
        return {int(i): self.personal(i)[0] for i in self.method.ctx.clients}

    def mean_model(self) -> Tree:
        """Return the global model, or the mean of the clients' personal models where the method has no global model."""
        names = self.method.ctx.w0
        whole = self.method.global_model(self.checkpoint.server)
        if whole is not None:
            return {k: whole[k].clone() for k in names}
        if type(self.method).predict is not Method.predict:
            raise CoterieError(
                f"{self.path} has no global model, and a model of {self.method.card.title} is more than its network; "
                "it cannot be started from"
            )
        return mean([{k: params[k] for k in names} for params in self.personal_trees().values()])


def initial_values(settings: RunSettings) -> Tree | None:
    """Return the values that a run with the setting `warm_start` begins with; None if it draws them from the seed."""
    if settings.warm_start is None:
        return None
    path = Path(settings.warm_start)
    refuse_devices(path)
    return SavedRun(path, rebuild(path)).mean_model()

"""A stranger arrives after a run has ended, or at a running federation: a personal model by the method's own rule.

Nobody else trains and the run's folder is only read. The stranger is a client that no round has seen: it is sent what
the server would send to a newcomer, and fine-tunes by the method's adaptation (or, where it has none, by the loss of
its outputs). On its own validation data it keeps the fine-tuned model or the one it was sent, whichever is better.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from coterie.core.method import Batch, ClientData, Extras, Method, Model, Phase, Split, Start
from coterie.core.tree import Tree
from coterie.data import target_types as targets
from coterie.data.arrays import convert_items
from coterie.data.split import draw_parts
from coterie.engine.edge_steps import preview
from coterie.engine.personal_models import model_in_use
from coterie.engine.session import Session
from coterie.errors import CoterieError
from coterie.export.personal_model import About, PersonalModel, Predictor, Welcome, as_module
from coterie.storage.checkpoint import Checkpoint, read
from coterie.storage.run_folder import checkpoints
from coterie.train.clients import newcomer_phases
from coterie.train.scoring import score
from coterie.train.trainer import train

EPOCHS = 5  # of fine-tuning at least, where the method has no adaptation: one is too short for batch norm's statistics
ALONE = 100  # epochs of local training at most, with which the model is compared


def welcome(
    session: Session,
    path: Path,
    x: Any,
    y: Any = None,
    x_test: Any = None,
    y_test: Any = None,
    name: str = "stranger",
) -> Welcome:
    """Make a personal model for a newcomer from the newest checkpoint of the run in `path`."""
    files = checkpoints(path)
    if not files:
        raise CoterieError(f"{path / 'checkpoints'} holds no checkpoint yet")
    saved = read(files[-1], type(session.method).__name__)
    about = About.of(session, session.federation.clients[0], saved.round, path.name)
    about = _items_of(session, about, name, x)
    data, test = _split(session, about, x, y, x_test, y_test)
    method, rule = session.method, session.clients().rule
    round, said = saved.round + 1, []
    shared, own = preview(method, saved.server, saved.edges, [data.client], round)[data.client]
    try:
        with torch.no_grad():
            received = model_in_use(method, rule, None, {**shared, **own}, data, round, adapt=False)
        models: dict[str, Model] = {"received": received}
        if len(data.train):
            phases = method.adapt() or newcomer_phases(method, max(method.ctx.epochs, EPOCHS))
            adapted, _ = train(method.ctx, rule, phases, Start(*received), data, round)
            models["adapted"] = Model(adapted.params, adapted.extras)
    except CoterieError:
        raise
    except Exception as e:  # a method's hook that takes samples for granted
        few = f"{len(data.train)} labelled training samples"
        raise CoterieError(f"{about.title} cannot make a model from {few} ({type(e).__name__}: {e})") from e
    kept = _kept(method, models, data.val)
    if not len(data.train):
        said.append("there are no labels, so this is the model that the method has for newcomers, without adaptation")
    elif not len(data.val):
        said.append("there are too few samples for a validation part, so the adapted model was taken without a choice")
    elif kept == "received":
        said.append("adaptation did not help on the validation part, so this is the model as it was received")
    scores = _scores(session, saved, models, kept, data, test) if test is not None else {}
    if test is not None and method.global_model(saved.server) is None:
        said.append(f"{about.title} has no global model to compare with")
    module = as_module(method, *models[kept])
    about = about.calling(session, module) if isinstance(module, PersonalModel) else about
    sizes = {"train": len(data.train), "val": len(data.val), "test": 0 if test is None else len(test)}
    return Welcome(Predictor(module, about).eval(), sizes, scores, kept, tuple(said))


def cloud_session(path: Path) -> Session | None:
    """Return the session of a federation's cloud; None if the folder is not a cloud's."""
    if not (path / "cloud.json").exists():
        return None
    from coterie.federation.cloud.program import open_session, reopen

    return open_session(*reopen(path))


def _items_of(session: Session, about: About, name: str, x: Any) -> About:
    """The stranger's description: upright pictures, and in a federation whatever type its own items have."""
    update: dict[str, Any] = {"turn": 0.0}
    if session.federation.identity.get("partition") == "own":  # as devices with data of their own
        form = convert_items("the data", x)
        if form.dtype != torch.int64 and about.items.type != "int64":
            update["type"] = str(form.dtype).removeprefix("torch.")
    return about.model_copy(update={"client": name, "items": about.items.model_copy(update=update)})


def _split(session: Session, about: About, x: Any, y: Any, x_test: Any, y_test: Any) -> tuple[ClientData, Split | None]:
    """The stranger's samples, prepared as the run's, as training, validation and test parts."""
    fed, items = session.federation, about.items
    if y is None and (x_test is None or y_test is None):
        raw = items.raw(x)  # says what is wrong with the items
        none = Split(items.ready(raw[:0]), _labels(session, about, np.zeros(0, np.int64)))
        seen = Split(items.ready(raw), none.y) if session.method.unlabelled else none
        return _client(session, seen, none), None
    if y is None:
        raise CoterieError("the test part has labels and the other samples have none; give y too")
    if (x_test is None) != (y_test is None):
        raise CoterieError("give both x_test and y_test, or neither")
    raw, labels = items.raw(x), _labels(session, about, np.asarray(y))
    if len(raw) != len(labels):
        raise CoterieError(f"there are {len(raw)} samples and {len(labels)} labels")
    own_test = x_test is None
    if own_test and len(raw) < 2:
        raise CoterieError("one sample cannot be both learned from and tested on; give more, or x_test and y_test")
    strata, _ = fed.task.strata(labels)
    part = draw_parts(np.zeros(len(raw), np.int64), strata, fed.settings, own_test, fed.seed)
    splits = [Split(items.ready(raw[at]), labels[at]) for k in range(3) for at in [torch.from_numpy(part == k)]]
    if "val" in session.method.needs and not len(splits[1]):
        raise CoterieError(
            f"{about.title} chooses by validation data, and {len(raw)} samples are too few for a validation part"
        )
    if not own_test:
        more = items.raw(x_test, "the test part")
        splits[2] = Split(items.ready(more), _labels(session, about, np.asarray(y_test), "the test part"))
        if len(more) != len(splits[2].y):
            raise CoterieError(f"the test part has {len(more)} samples and {len(splits[2].y)} labels")
    return _client(session, splits[0], splits[1]), splits[2]


def _labels(session: Session, about: About, y: np.ndarray, name: str = "the data") -> Tensor:
    if y.ndim == 0:
        raise CoterieError(f"labels of {name} must be one for each sample, and this is a single value")
    if not len(y):
        dataset = session.federation.dataset
        return dataset.y[:0]
    return targets.targets_like(name, y, about.task, about.classes, about.outputs)


def _client(session: Session, train: Split, val: Split) -> ClientData:
    fed = session.federation
    return ClientData(len(fed.clients), train, val, fed.num_classes, fed.public())


def _kept(method: Method, models: dict[str, Model], val: Split) -> str:
    """The one with the lower loss on validation data; the adapted one where there are none."""
    if "adapted" not in models or not len(val):
        return list(models)[-1]
    loss = {k: score(method, *model, val).loss for k, model in models.items()}
    return "received" if loss["received"] <= loss["adapted"] or not np.isfinite(loss["adapted"]) else "adapted"


def _scores(
    session: Session, saved: Checkpoint, models: dict[str, Model], kept: str, data: ClientData, test: Split
) -> dict[str, dict[str, float]]:
    method, task = session.method, session.method.ctx.task

    def measured(model: Model, shared: bool = False) -> dict[str, float]:
        counts = score(method, *model, test, shared=shared).counts
        found = task.measured({k: v[None].numpy() for k, v in counts.items()})
        return {k: float(v[0]) for k, v in found.items()}

    out = {"personal": measured(models[kept]), **{k: measured(m) for k, m in models.items()}}
    if (whole := method.global_model(saved.server)) is not None:
        out["global"] = measured(Model(whole), shared=True)
    if len(data.train):
        out["local"] = _alone(session, data, test)
    return out


def _alone(session: Session, data: ClientData, test: Split) -> dict[str, float]:
    """Training from the initial model on the stranger's samples alone, for the epochs that a client of the run had."""
    method, s = session.method, session.settings
    ctx = method.ctx
    epochs = float(min(ALONE, max(1.0, s.rounds * s.join * s.epochs)))

    def loss(params: Tree, batch: Batch, extras: Extras) -> Tensor:
        return ctx.loss(params, batch)

    phases: Sequence[Phase] = [Phase(loss, epochs=epochs)]
    trained, _ = train(ctx, session.clients().rule, phases, Start(ctx.w0), data, 1)
    counts = score(method, trained.params, {}, test, shared=True).counts
    found = ctx.task.measured({k: v[None].numpy() for k, v in counts.items()})
    return {k: float(v[0]) for k, v in found.items()}

"""A personal model for a newcomer: a client that joins after a run has ended, or while a federation runs.

No other client trains, and the run's folder is only read. The newcomer receives the model that the server would send to
it, and fine-tunes it by the method's adaptation (or, where the method has none, by the loss of the outputs). It keeps
the fine-tuned model or the received one, whichever is better on its own validation data.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from coterie.core.context import Batch, ClientData, Extras, Split
from coterie.core.method import Method, Model, Phase, Start
from coterie.core.tasks import Task
from coterie.core.tree import Tree
from coterie.data import target_types as targets
from coterie.data.arrays import convert_items
from coterie.data.dataset import Ints
from coterie.data.frames import target_values
from coterie.data.split import draw_parts
from coterie.data.table import measure_rows, own_scale
from coterie.engine.edge_steps import preview
from coterie.engine.personal_models import model_in_use
from coterie.engine.session import Session, check_unchanged
from coterie.errors import CoterieError
from coterie.export.personal_model import (
    About,
    PersonalModel,
    Predictions,
    Predictor,
    as_module,
    run_fingerprint,
    write_model,
)
from coterie.storage.checkpoint import Checkpoint, load_checkpoint
from coterie.storage.run_folder import checkpoints
from coterie.train.clients import newcomer_phases
from coterie.train.scoring import score_model
from coterie.train.trainer import train

if TYPE_CHECKING:
    import pandas as pd

_EPOCHS = 5  # least epochs of fine-tuning without an adaptation; one is too short for batch norm's statistics
_LOCAL_EPOCHS = 100  # most epochs of the local training that the model is compared with


@dataclass(frozen=True)
class Welcome:
    """The model of a newcomer, compared with others."""

    model: Predictor
    samples: dict[str, int]  # number of samples in train, val and test
    scores: dict[str, dict[str, float]]  # model -> metric -> value on the test part; empty without a test part
    kept: str  # the model that was chosen: received or adapted
    said: tuple[str, ...]  # remarks for the newcomer

    def table(self) -> "pd.DataFrame":
        """Return the scores, one row per model."""
        import pandas as pd  # slow to import

        return pd.DataFrame(self.scores).T.rename_axis("model")

    def predict(self, x: Any) -> Predictions:
        """Return the model's predictions for raw items."""
        return self.model.predict(x)

    def save(self, path: str | Path) -> None:
        """Write the model as a file for `coterie predict`."""
        write_model(Path(path), self.model.network, self.model.about)


def welcome_newcomer(
    session: Session,
    path: Path,
    x: Any,
    y: Any = None,
    x_test: Any = None,
    y_test: Any = None,
    name: str = "newcomer",
) -> Welcome:
    """Make a personal model for a newcomer from the newest checkpoint of the run in `path`."""
    files = checkpoints(path)
    if not files:
        raise CoterieError(f"{path / 'checkpoints'} holds no checkpoint yet")
    saved = load_checkpoint(files[-1], type(session.method).__name__)
    about = About.of(session, session.federation.clients[0], saved.round, run_fingerprint(session))
    about = _items_of(session, about, name, x)
    if (table := about.items.table) is not None:
        y = target_values(x, table, "the data") if y is None and not isinstance(x, np.ndarray | dict) else y
    about, data, test = _split(session, about, x, y, x_test, y_test)
    method, rule = session.method, session.clients().rule
    round, remarks = saved.round + 1, []
    shared, own = preview(method, saved.server, saved.edges, [data.client], round)[data.client]
    try:
        with torch.no_grad():
            received = model_in_use(method, rule, None, {**shared, **own}, data, round, adapt=False)
        models: dict[str, Model] = {"received": received}
        if len(data.train):
            phases = method.adapt() or newcomer_phases(method, max(method.ctx.epochs, _EPOCHS))
            adapted, _ = train(method.ctx, rule, phases, Start(*received), data, round)
            models["adapted"] = Model(adapted.params, adapted.extras)
    except CoterieError:
        raise
    except Exception as e:  # a hook of a method that fails without samples
        count = f"{len(data.train)} labelled training samples"
        raise CoterieError(f"{about.title} cannot make a model from {count} ({type(e).__name__}: {e})") from e
    chosen = _better(method, models, data.val)
    if not len(data.train):
        remarks.append("there are no labels, so this is the method's model for newcomers, without adaptation")
    elif not len(data.val):
        remarks.append("there are too few samples for a validation part, so the adapted model is taken as it is")
    elif chosen == "received":
        remarks.append("adaptation did not help on the validation part, so this is the model as it was received")
    scores = _scores(session, saved, models, chosen, data, test) if test is not None else {}
    if test is not None and method.global_model(saved.server) is None:
        remarks.append(f"{about.title} has no global model to compare with")
    module = as_module(method, *models[chosen])
    about = about.calling(session, module) if isinstance(module, PersonalModel) else about
    sizes = {"train": len(data.train), "val": len(data.val), "test": 0 if test is None else len(test)}
    return Welcome(Predictor(module, about).eval(), sizes, scores, chosen, tuple(remarks))


def cloud_session(path: Path) -> Session | None:
    """Return the session of a federation's cloud; None if the folder is not a cloud's."""
    if not (path / "cloud.json").exists():
        return None
    from coterie.federation.cloud.program import open_session, reopen

    session = open_session(*reopen(path))
    check_unchanged(session, path)
    return session


def _items_of(session: Session, about: About, name: str, x: Any) -> About:
    """Return the description of the newcomer's items: not rotated, and in a federation of their own type."""
    update: dict[str, Any] = {"turn": 0.0}
    devices = session.federation.identity.get("partition") == "own"  # each client is a device with its own data
    if devices and about.items.table is None:
        form = convert_items("the data", x)
        if form.dtype != torch.int64 and about.items.type != "int64":
            update["type"] = str(form.dtype).removeprefix("torch.")
    return about.model_copy(update={"client": name, "items": about.items.model_copy(update=update)})


def _split(
    session: Session, about: About, x: Any, y: Any, x_test: Any, y_test: Any
) -> tuple[About, ClientData, Split | None]:
    """Return the newcomer's samples as training, validation and test parts, prepared as in the run.

    The description has the newcomer's own scales of a table if every client has its own.
    """
    fed, items = session.federation, about.items
    if y is None and (x_test is None or y_test is None):
        raw = items.raw(x)  # raises if the items do not fit
        about = _scaled(session, about, raw, np.arange(len(raw)))
        items = about.items
        none = Split(items.ready(raw[:0]), _labels(session, about, np.zeros(0, np.int64)))
        seen = Split(items.ready(raw), none.y) if session.method.unlabelled else none
        return about, _client(session, seen, none), None
    if y is None:
        raise CoterieError("the test part has labels and the other samples do not; give y too")
    if (x_test is None) != (y_test is None):
        raise CoterieError("give both x_test and y_test, or neither")
    raw, labels = items.raw(x), _labels(session, about, np.asarray(y))
    if len(raw) != len(labels):
        raise CoterieError(f"there are {len(raw)} samples and {len(labels)} labels")
    own_test = x_test is None
    if own_test and len(raw) < 2:
        raise CoterieError("one sample cannot be used for both training and testing; give more, or x_test and y_test")
    strata, _ = fed.task.strata(labels)
    part = draw_parts(np.zeros(len(raw), np.int64), strata, fed.settings, own_test, fed.seed)
    about = _scaled(session, about, raw, np.flatnonzero(part == 0))
    items = about.items
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
    return about, _client(session, splits[0], splits[1]), splits[2]


def _scaled(session: Session, about: About, raw: Tensor, rows: Ints) -> About:
    """Return the description with the scales of these training rows if every client has its own (scaling = client)."""
    table = about.items.table
    if table is None or session.federation.settings.scaling != "client":
        return about
    own = own_scale(table, measure_rows(table, raw, rows))
    return about.model_copy(update={"items": about.items.model_copy(update={"table": own})})


def _labels(session: Session, about: About, y: np.ndarray, name: str = "the data") -> Tensor:
    if y.ndim == 0:
        raise CoterieError(f"labels of {name} must have one value for each sample, not a single value")
    if not len(y):
        dataset = session.federation.dataset
        return dataset.y[:0]
    labels = targets.targets_like(name, y, about.task, about.classes, about.outputs)
    return labels if about.items.table is None else about.items.table.scale_targets(labels)


def _client(session: Session, train: Split, val: Split) -> ClientData:
    fed = session.federation
    return ClientData(len(fed.clients), train, val, fed.num_classes, fed.public())


def _better(method: Method, models: dict[str, Model], val: Split) -> str:
    """Return the model with the lower loss on validation data, or the adapted model without such data."""
    if "adapted" not in models or not len(val):
        return list(models)[-1]
    loss = {k: score_model(method, *model, val).loss for k, model in models.items()}
    return "received" if loss["received"] <= loss["adapted"] or not np.isfinite(loss["adapted"]) else "adapted"


def _scores(
    session: Session, saved: Checkpoint, models: dict[str, Model], kept: str, data: ClientData, test: Split
) -> dict[str, dict[str, float]]:
    method, task = session.method, session.method.ctx.task

    def measured(model: Model, shared: bool = False) -> dict[str, float]:
        counts = score_model(method, *model, test, shared=shared).counts
        return _metrics(task, counts)

    out = {"personal": measured(models[kept]), **{k: measured(m) for k, m in models.items()}}
    if (whole := method.global_model(saved.server)) is not None:
        out["global"] = measured(Model(whole), shared=True)
    if len(data.train):
        out["local"] = _local_scores(session, data, test)
    return out


def _local_scores(session: Session, data: ClientData, test: Split) -> dict[str, float]:
    """Return the scores of local training on the newcomer's samples, for the epochs that a client of the run had."""
    method, s = session.method, session.settings
    ctx = method.ctx
    epochs = float(min(_LOCAL_EPOCHS, max(1.0, s.rounds * s.join * s.epochs)))

    def loss(params: Tree, batch: Batch, extras: Extras) -> Tensor:
        return ctx.loss(params, batch)

    phases: Sequence[Phase] = [Phase(loss, epochs=epochs)]
    trained, _ = train(ctx, session.clients().rule, phases, Start(ctx.w0), data, 1)
    return _metrics(ctx.task, score_model(method, trained.params, {}, test, shared=True).counts)


def _metrics(task: Task, counts: Mapping[str, Tensor]) -> dict[str, float]:
    """Return the metrics of one client's counts."""
    return {k: float(v[0]) for k, v in task.measured({k: v[None].numpy() for k, v in counts.items()}).items()}

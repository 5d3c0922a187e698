"""Every method sends what it declares; an upload that is anything else is refused before it is aggregated."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from torch import Tensor

from coterie.core.method import Method, Moment, Upload
from coterie.core.schema import Schema
from coterie.core.tree import Tree
from coterie.engine import codec
from coterie.errors import CoterieError
from coterie.methods import find, method_names
from coterie.testing import Bench, open_loop

FIVE = ("fedcpmd", "fedpc", "fedgmh", "ecs-fl", "sc-fpfl")  # methods with edges; their own tests check their schemas
VARIANTS: dict[str, dict[str, Any]] = {  # settings that change the entries
    "feddyn scaled": {"scale_alpha": True},
    "fednh with scale": {"learn_scale": True},
    "fedrod with hyper-network": {"hyper": True},
    "lg-fedavg after a warm round": {"warm_rounds": 1},
    "cd2-pfed with all channels private": {"p_max": 1.0, "ramp": 0.5},
    "fedap from the start": {"warm": 0.0},
    "pfedsim from the start": {"rho": 0.0},
    "fedcmd with a short election": {"rho": 0.3},
    "floco with places": {"tau": 1, "endpoints": 3},
}
RUNS: dict[str, dict[str, Any]] = {"fedproto weighted by samples": {"weighting": "samples"}}
BASELINES = [n for n in method_names() if not n.startswith(FIVE)]
CASES = [*BASELINES, *VARIANTS, *RUNS]


@dataclass(frozen=True)
class Sent:
    """An upload, its moment, and the other uploads of its round."""

    now: Moment
    upload: Upload
    round: tuple[Upload, ...]


@cache
def played(case: str) -> tuple[Method, list[Sent]]:
    """Check every download of a short run; return the method and all uploads."""
    name = case.split()[0]
    session = Bench(find(name), VARIANTS.get(case, {})).session(newcomers=1, **RUNS.get(case, {}))
    method, sent = session.method, []
    aggregate, down, deliver = method.aggregate, method.down, method.deliver

    def checked_down(server: Any, ids: Any, round: int) -> Any:
        found = down(server, ids, round)
        for i in ids:
            method.schema("down", Moment(server, i, round)).check(found.to(i), f"the download of {i} in round {round}")
            method.schema("down").check(found.to(i), f"the download of {i} in round {round}, in general")
        return found

    def checked_deliver(server: Any, ids: Any, round: int) -> Any:
        found = deliver(server, ids, round)
        for i in ids:
            method.schema("down").check(found.to(i), f"what {i} is scored with in round {round}")
        return found

    def kept_aggregate(server: Any, uploads: Any, round: int) -> Any:
        before = codec.deep_copy(server)
        sent.extend(Sent(Moment(before, u.sender, round), u, tuple(uploads)) for u in uploads)
        return aggregate(server, uploads, round)

    for hook, spy in (("aggregate", kept_aggregate), ("down", checked_down), ("deliver", checked_deliver)):
        setattr(method, hook, spy)
    with TemporaryDirectory() as folder:
        loop = open_loop(session, Path(folder))
        loop.run()
        loop.folder.close()
    assert sent
    for hook in ("aggregate", "down", "deliver"):
        delattr(method, hook)
    return method, sent


def one_of_each(sent: list[Sent]) -> list[Sent]:
    """Return the first upload with each set of entries and shapes."""
    found: dict[Any, Sent] = {}
    for s in sent:
        found.setdefault(tuple((k, tuple(v.shape)) for k, v in s.upload.tree.items()), s)
    return list(found.values())


@pytest.mark.parametrize("case", CASES)
def test_every_payload_has_exactly_the_declared_entries(case: str) -> None:
    method, sent = played(case)
    for s in sent:
        tree, exact = s.upload.tree, method.schema("up", s.now)
        exact.check(tree, "the upload")
        method.schema("up").check(tree, "the upload, in general")
        assert exact.entries.keys() == tree.keys()
        assert exact.nbytes(labels=lengths(exact, tree).get("labels", 0)) == sum(exact.parts(tree).values())
        for k, entry in exact.entries.items():
            general = method.schema("up").entries[k]
            assert (entry.dtype, entry.kind, entry.part) == (general.dtype, general.kind, general.part)


def lengths(schema: Schema, tree: Tree) -> dict[str, int]:
    return {
        word: n
        for k, e in schema.entries.items()
        for word, n in zip(e.shape, tree[k].shape, strict=True)
        if isinstance(word, str)
    }


def spoiled(schema: Schema, name: str, v: Tensor) -> Iterator[tuple[str, Tensor | None]]:
    """Yield every malformed version of this entry; None: the entry is missing."""
    entry = schema.entries[name]
    yield "dropped", None
    yield "one axis more", v[None]
    longer = [n + 1 if i == len(v.shape) - 1 else n for i, n in enumerate(v.shape)]
    if v.ndim:
        yield "longer", torch.zeros(longer, dtype=v.dtype)
    other = torch.float64 if v.dtype == torch.float32 else torch.float32
    yield "another type", v.to(other)
    if not v.numel() or v.dtype == torch.bool:
        return
    if v.is_floating_point():
        for word, bad in (("nan", torch.nan), ("infinite", torch.inf), ("huge", 1e30), ("very negative", -1e30)):
            yield word, changed(v, bad)
        return
    info = torch.iinfo(v.dtype)
    for bad in {int(entry.low) - 1, int(entry.high) + 1, info.min, info.max}:
        if info.min <= bad <= info.max and not entry.low <= bad <= entry.high:
            yield f"a {bad}", changed(v, bad)
    if entry.distinct and v.numel() > 1:
        yield "the same twice", changed(v, v.flatten()[-1].item())


def changed(v: Tensor, first: float) -> Tensor:
    out = v.clone()
    out.view(-1)[0] = first
    return out


@pytest.mark.parametrize("case", CASES)
def test_a_malformed_upload_is_refused(case: str) -> None:
    method, sent = played(case)
    for s in one_of_each(sent):
        schema, tree = method.schema("up", s.now), s.upload.tree
        wrong: list[tuple[str, Tree]] = [("an entry more", {**tree, "not-declared": torch.zeros(1)})]
        for name, v in tree.items():
            for what, bad in spoiled(schema, name, v):
                rest = {k: x for k, x in tree.items() if k != name}
                wrong.append((f"{name}: {what}", rest if bad is None else {**rest, name: bad}))
        for what, bad_tree in wrong:
            with pytest.raises(CoterieError) as caught:
                schema.check(bad_tree, "the upload of client 1")
            said = str(caught.value)
            assert said.startswith("the upload of client 1 ") and "\n" not in said, what


def extreme(schema: Schema, tree: Tree, high: bool) -> Tree:
    """Return the tree with the largest or smallest values that pass the check."""
    out: Tree = {}
    for k, v in tree.items():
        entry = schema.entries[k]
        if v.dtype == torch.bool:
            out[k] = torch.full_like(v, high)
        elif entry.distinct:
            ids = torch.arange(int(entry.low), int(entry.high) + 1, dtype=v.dtype)
            out[k] = (ids[len(ids) - len(v) :] if high else ids[: len(v)]).clone()
        else:
            out[k] = torch.full_like(v, entry.high if high else entry.low)
            if v.is_floating_point():  # the nearest float32 may be outside the bounds
                out[k] = out[k] * (1 - 1e-6)
    return out


@pytest.mark.parametrize("high", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_no_upload_that_passes_the_check_breaks_the_server(case: str, high: bool) -> None:
    """If one client sends the most extreme values allowed, the server's state is still finite."""
    method, sent = played(case)
    for s in one_of_each(sent):
        schema = method.schema("up", s.now)
        bad = extreme(schema, s.upload.tree, high)
        schema.check(bad, "the upload")
        for others in (s.round, ()):
            uploads = [u for u in others if u.sender != s.now.client]
            uploads.append(Upload(bad, {}, s.now.client, s.upload.samples))
            uploads.sort(key=lambda u: u.sender)
            server = method.aggregate(codec.deep_copy(s.now.server), uploads, s.now.round)
            assert numbers(server, absent=method.card.title in ("FedProto", "FedPAC"))
            down = method.down(server, method.ctx.clients, s.now.round + 1)
            for i in method.ctx.clients:
                declared = method.schema("down", Moment(server, i, s.now.round + 1))
                assert declared.entries.keys() == down.to(i).keys()
                assert numbers(down.to(i), absent=method.card.title in ("FedProto", "FedPAC"))


def numbers(value: Any, absent: bool) -> bool:
    """True if all numbers are finite; with `absent`, NaN may mark absent values."""
    floats = [t for t in codec.tensors_of(value) if t.is_floating_point()]
    return all(bool((torch.isfinite(t) | (t.isnan() & absent)).all()) for t in floats)

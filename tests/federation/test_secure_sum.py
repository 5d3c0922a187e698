"""Secure sums in a federation: no single upload reaches the cloud, whoever drops out or lies."""

import gc
import logging
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("grpc", reason="a federation needs the extra federation")

from coterie.engine import codec
from coterie.engine.messages import SendRequest
from coterie.engine.session import make_loop
from coterie.errors import CoterieError
from coterie.federation.cloud.secure_sum import new_session
from coterie.federation.device import DeviceHandler
from coterie.federation.device_sum import SumMember, secure_sum_of
from coterie.federation.identity import authority
from coterie.federation.identity.signatures import NodeFiles, check_signed
from coterie.federation.protocol.messages import DeviceJob, OfferedKeys, SignedKeys, SumAnswer, SumRequest
from coterie.federation.replay import ReplayRuntime
from coterie.privacy.secure_sum.messages import IncomingShares, MaskedWords, NeighbourKeys, SumTerms, Survivors
from coterie.storage.run_folder import Folder
from support.in_process_link import RUN, Federation, HandLink, federation

STEPS: dict[str, type] = {"keys": SumTerms, "shares": OfferedKeys, "masked": IncomingShares, "unmask": Survivors}
ELSEWHERE = (HandLink, DeviceHandler, types.ModuleType, types.FunctionType, type)  # not of the cloud
SECURE: dict[str, Any] = {"secure": "sum(t=2)", "join": 1.0, "clients": 5, "rounds": 2, "eval_every": 9, "watch": False}


def device(f: Federation, i: int) -> DeviceHandler:
    return f.device_link(i).handlers[f"device-{i}"].__self__  # type: ignore[attr-defined, no-any-return]


def certified(folder: Path, *names: str) -> dict[str, NodeFiles]:
    certs = authority.init(folder, [])
    for name in names:
        authority.add_node(certs.root, name)
    return {n: NodeFiles(certs.key(n), certs.certificate(n), certs.ca) for n in names}


@contextmanager
def secure_federation(folder: Path, method: str = "fedavg", **more: Any) -> Iterator[Federation]:
    with federation(folder, method, **{**SECURE, **more}) as f:
        files = certified(folder / "certs", *(f"device-{i}" for i in f.session.federation.clients))
        for i in f.session.federation.clients:
            device(f, i).use_certificate(files[f"device-{i}"])
        f.runtime.secure, f.runtime.ca = secure_sum_of(f.session), files["device-0"].ca
        f.runtime.files = files  # type: ignore[attr-defined]
        yield f


def at_step(f: Federation, i: int, step: str, act: Callable[[Any], None], round: int = 1) -> None:
    """Call a function before a device answers a step of a round."""
    link, name = f.device_link(i), f"device-{i}"
    honest = link.handlers[name]

    def handle(kind: str, t: int, shared: Any, own: Any) -> Any:
        if kind == "sum" and t == round and isinstance(codec.unpack(own).request.ask, STEPS[step]):
            act(own)
        return honest(kind, t, shared, own)

    link.handlers[name] = handle


def gone(own: Any) -> None:
    raise CoterieError("this device was switched off")


def run(f: Federation) -> list[dict[str, Any]]:
    events = []
    f.loop.start()
    for _ in range(f.session.settings.rounds):
        f.loop.step()
        events.append(f.loop.event)
    return events


def simulated_again(f: Federation, events: list[dict[str, Any]], folder: Path) -> Any:
    folder.mkdir()
    states = f.session.states(folder)
    runtime = ReplayRuntime(f.session.clients(), states, {e["round"]: set(e["failed"]) for e in events})
    loop = make_loop(f.session, Folder(folder), runtime)
    try:
        loop.run()
    finally:
        loop.folder.close()
    return loop.server


def tensors_behind(*roots: object) -> list[torch.Tensor]:
    """Return all tensors that the cloud's objects lead to; its link leads to the devices of this process."""
    seen, found, todo = set[int](), list[torch.Tensor](), list[object](roots)
    while todo:
        thing = todo.pop()
        if id(thing) in seen or isinstance(
            thing, HandLink | DeviceHandler | types.ModuleType | types.FunctionType | type
        ):
            continue
        seen.add(id(thing))
        if isinstance(thing, torch.Tensor):
            found.append(thing)
        todo += gc.get_referents(thing)
    return found


@pytest.mark.parametrize("method", ["fedavg", "fedrep"])
def test_a_federation_has_the_bits_of_the_simulation(tmp_path: Path, method: str) -> None:
    with secure_federation(tmp_path, method) as f:
        events = run(f)
        assert all(e["failed"] == [] and e["combined"]["secure_sum"]["clients"] == 5 for e in events)
        assert codec.equal(f.loop.server, simulated_again(f, events, tmp_path / "again"))
        up = events[0]["bytes"]["device-cloud"]["up"]
        words = f.runtime.secure.words(f.session.method).count  # type: ignore[union-attr]
        assert up["masked"] == 5 * 4 * words and 0 < up["keys"] < 5 * 2000


@pytest.mark.parametrize("step", STEPS)
def test_a_device_that_drops_out_at_any_step_is_not_missed(tmp_path: Path, step: str) -> None:
    with secure_federation(tmp_path) as f:
        at_step(f, 1, step, gone)
        events = run(f)
        assert events[0]["failed"] == ([] if step == "unmask" else [1]) and events[1]["failed"] == []
        if step != "unmask":
            assert "this device was switched off" in events[0]["reasons"][1]
        assert codec.equal(f.loop.server, simulated_again(f, events, tmp_path / "again"))


@pytest.mark.parametrize("step", ["masked", "unmask"])
def test_a_sum_that_fails_late_ends_the_round_and_the_next_one_counts(tmp_path: Path, step: str) -> None:
    with secure_federation(tmp_path) as f:
        for i in range(3):
            at_step(f, i, step, gone)
        f.loop.start()
        before = codec.deep_copy(f.loop.server)
        f.loop.step()
        assert f.loop.event["failed"] == [0, 1, 2, 3, 4] and codec.equal(f.loop.server, before)
        assert "combined" not in f.loop.event or not f.loop.event["combined"]
        f.loop.step()
        assert f.loop.event["failed"] == [] and not codec.equal(f.loop.server, before)
        assert not f.runtime.quarantine.offenders


def test_no_single_upload_is_in_messages_memory_logs_or_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    uploads: list[bytes] = []
    words: list[bytes] = []
    received: list[bytes] = []
    hold = SumMember.hold

    def recording(self: SumMember, run: str, request: Any, answer: Any) -> Any:
        trained = {k: v for k, v in answer.upload.items() if not torch.equal(v, request.shared[k])}
        uploads.extend(v.numpy().tobytes() for v in trained.values() if v.numel() > 8)
        self_words = secure.words(method).encode(request.shared, answer.upload, answer.samples)
        words.append(self_words[2:].tobytes())
        return hold(self, run, request, answer)

    monkeypatch.setattr(SumMember, "hold", recording)
    caplog.set_level(logging.DEBUG)
    with secure_federation(tmp_path, join=1.0) as f:
        secure, method = f.runtime.secure, f.session.method
        assert secure is not None
        for name, honest in list(f.link.handlers.items()):

            def spy(kind: str, t: int, shared: Any, own: Any, honest: Any = honest) -> Any:
                answer = honest(kind, t, shared, own)
                received.append(bytes(answer))
                return answer

            f.link.handlers[name] = spy
        run(f)
        held = [t.detach().contiguous().numpy().tobytes() for t in tensors_behind(f.runtime, f.loop)]
        assert len(held) > 4
        assert not set(held) & set(uploads)
    assert len(uploads) >= 10 and len(received) > 40
    everywhere = b"".join(received) + caplog.text.encode()
    for path in (tmp_path / "run").rglob("*"):
        everywhere += path.read_bytes() if path.is_file() else b""
    for secret in (*uploads, *words):
        assert secret[:64] not in everywhere and secret[-64:] not in everywhere


def test_a_device_that_reveals_wrong_shares_is_counted_and_the_sum_is_right(tmp_path: Path) -> None:
    with secure_federation(tmp_path) as f:

        def lying(answer: Any) -> Any:
            if isinstance(answer, SumAnswer) and hasattr(answer.give, "shares"):
                return replace(answer, give=replace(answer.give, shares=torch.zeros_like(answer.give.shares)))
            return answer

        f.link.spoil["device-3"] = lying
        events = run(f)
        assert codec.equal(f.loop.server, simulated_again(f, events, tmp_path / "again"))
        assert f.runtime.quarantine.offenders["device-3"].refusals >= 1


def test_an_edge_refuses_a_run_with_secure_sums(tmp_path: Path) -> None:
    with federation(tmp_path, "fedavg", edges=1, **SECURE) as f:
        f.runtime.membership.update()
        assert f.runtime.membership.connected == set()
        assert any("devices behind an edge cannot take part" in e for e in f.runtime.liveness.errors)


# ---- a cloud that lies -----------------------------------------------------------------------------------------------
class Trained:
    """A device that has trained round 1 and holds its upload, and a cloud's messages to it."""

    def __init__(self, f: Federation):
        f.loop.start()
        self.f, self.me = f, device(f, 0)
        self.jobs: list[DeviceJob] = []
        for step in STEPS:
            at_step(f, 0, step, lambda own: self.jobs.append(codec.unpack(bytearray(own))))
        f.loop.step()

    def ask(self, ask: Any, round: int = 1) -> Any:
        return self.me.answer("sum", round, DeviceJob(RUN, -1, SumRequest(0, round, ask)))


def test_a_device_gives_its_upload_to_nobody_and_masks_a_round_once(tmp_path: Path) -> None:
    with secure_federation(tmp_path) as f:
        t = Trained(f)
        assert [type(j.request.ask) for j in t.jobs] == list(STEPS.values())  # type: ignore[union-attr]
        with pytest.raises(CoterieError, match="nothing was announced"):
            t.me.answer("send", 1, DeviceJob(RUN, -1, SendRequest(0, 1)))
        with pytest.raises(CoterieError, match="there is no upload of round 1"):
            t.ask(f.runtime.secure.terms(new_session(RUN, 1)))  # type: ignore[union-attr]
        with pytest.raises(CoterieError, match="there is no upload of round 2"):
            t.ask(f.runtime.secure.terms(new_session(RUN, 2)), 2)  # type: ignore[union-attr]
        member = t.me._sums
        held = replace_held(f, member)
        with pytest.raises(CoterieError, match="the upload of round 1 was part of a secure sum already"):
            member._spend(held)


def replace_held(f: Federation, member: SumMember) -> Any:
    from coterie.core.method import Upload
    from coterie.engine.messages import TrainRequest
    from coterie.federation.device_sum import HeldSum

    member.held = HeldSum(RUN, TrainRequest(0, 1, f.session.method.ctx.w0), Upload(f.session.method.ctx.w0, samples=9))
    return member.held


def test_a_device_refuses_terms_that_are_not_those_of_the_plan(tmp_path: Path) -> None:
    with secure_federation(tmp_path, secure="sum(t=4)") as f:
        t = Trained(f)
        member = t.me._sums
        replace_held(f, member)
        honest = f.runtime.secure.terms(new_session(RUN, 1))  # type: ignore[union-attr]
        for terms in (replace(honest, least=2), replace(honest, share=0.0), replace(honest, session="other/1/x")):
            with pytest.raises(CoterieError, match="not those of the plan"):
                t.ask(terms)
        assert isinstance(t.ask(honest).give, SignedKeys)
        with pytest.raises(CoterieError, match='step "masked" after "keys"'):
            t.ask(IncomingShares((), torch.zeros(0, 82, dtype=torch.uint8)))


def test_a_device_refuses_invented_clients(tmp_path: Path) -> None:
    with secure_federation(tmp_path) as f:
        t = Trained(f)
        member, me = t.me._sums, t.me
        terms = f.runtime.secure.terms(new_session(RUN, 1))  # type: ignore[union-attr]
        strangers = certified(tmp_path / "other", *(f"device-{i}" for i in range(5)))
        own = f.runtime.files  # type: ignore[attr-defined]

        def offer(files: Callable[[int], NodeFiles]) -> OfferedKeys:
            signed = {}
            for i in range(1, 5):
                other = SumMember(tmp_path / "x", files(i))
                replaced = replace_held(f, other)
                other.held = replace(replaced, request=replace(replaced.request, client=i))
                given = other.answer(f.session, DeviceJob(RUN, -1, SumRequest(i, 1, terms))).give
                assert isinstance(given, SignedKeys)
                signed[i] = given
            keys = tuple(replace(s.keys, committed=s.keys.committed[:0]) for s in signed.values())
            neighbours = NeighbourKeys(torch.ones(5, dtype=torch.bool), keys)
            return OfferedKeys(neighbours, {i: s.certificate for i, s in signed.items()})

        def asked(made: OfferedKeys) -> Any:
            replace_held(f, member)
            t.ask(terms)
            return t.ask(made)

        with pytest.raises(CoterieError, match="not signed by this federation's authority"):
            asked(offer(lambda i: strangers[f"device-{i}"]))
        with pytest.raises(CoterieError, match="two clients of a secure sum have the certificate of device-1"):
            asked(offer(lambda i: own["device-1"]))  # type: ignore[arg-type, return-value]
        with pytest.raises(CoterieError, match="have the certificate of device-0"):
            asked(offer(lambda i: own["device-0"]))  # type: ignore[arg-type, return-value]
        good = offer(lambda i: own[f"device-{i}"])  # type: ignore[arg-type, return-value]
        first = good.neighbours.keys[0]
        swapped = replace(first, mask=good.neighbours.keys[1].cipher)
        changed = replace(good, neighbours=replace(good.neighbours, keys=(swapped, *good.neighbours.keys[1:])))
        with pytest.raises(CoterieError, match="the signature of device-1 is wrong"):
            asked(changed)
        assert not isinstance(asked(good).give, MaskedWords) and me.files is not None


def test_a_certificate_that_is_not_one_of_a_node_signs_nothing(tmp_path: Path) -> None:
    files = certified(tmp_path / "certs", "north")["north"]
    root = authority.Certs(tmp_path / "certs")
    assert check_signed(files.der(), files.ca, b"text", files.sign(b"text")) == "north"
    with pytest.raises(CoterieError, match="the signature of north is wrong"):
        check_signed(files.der(), files.ca, b"other", files.sign(b"text"))
    server = NodeFiles(root.server_key, root.server, root.ca)
    with pytest.raises(CoterieError, match="is not one of a node"):
        check_signed(server.der(), root.ca, b"text", server.sign(b"text"))
    with pytest.raises(CoterieError, match="cannot be read"):
        check_signed(b"rubbish", root.ca, b"text", b"")

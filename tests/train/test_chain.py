"""A local training or a scoring as one call of the kernels gives PyTorch's result up to rounding."""

import os
import subprocess
import sys
import sysconfig
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import coterie
from coterie.core import tree as T
from coterie.core.context import Context
from coterie.core.method import Phase, TaskLoss
from coterie.core.net import Net
from coterie.core.tasks import Classification, EventCount, MultiLabel, Regression, Task
from coterie.core.tree import Tree
from coterie.models.zoo import ZOO
from coterie.parts.gradient import clipped
from coterie.storage.run_folder import EVENTS, read_log, read_settings
from coterie.train import native
from coterie.train.chain import tape
from coterie.train.chain.natives import Natives
from coterie.train.chain.program import Program, Pull, StepRule
from coterie.train.native.library import open_library, usable_instructions
from coterie.train.optimisers import Optimiser

pytestmark = pytest.mark.skipif(not native.available(), reason=native.native_status())


def picture_chain() -> nn.Module:
    """Every kind of layer on pictures of odd sizes: strides, groups, dilation, padding, both norms, three pools."""
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, stride=2, padding=1, bias=False), nn.GroupNorm(2, 8), nn.ReLU(inplace=True),
        nn.Conv2d(8, 12, (1, 3), groups=4, dilation=(1, 2)), nn.BatchNorm2d(12), nn.ReLU(),
        nn.AvgPool2d(3, 2, 1, count_include_pad=False), nn.MaxPool2d(3, 2, 1), nn.Flatten(),
        nn.Linear(48, 20), nn.BatchNorm1d(20), nn.ReLU(), nn.Linear(20, 5),
    )  # fmt: skip


def signal_chain() -> nn.Module:
    return nn.Sequential(
        nn.Conv1d(2, 5, 4, stride=3), nn.BatchNorm1d(5), nn.ReLU(), nn.AvgPool1d(2), nn.Conv1d(5, 7, 2, padding=1),
        nn.MaxPool1d(2), nn.AdaptiveAvgPool1d(2), nn.Flatten(), nn.Linear(14, 5),
    )  # fmt: skip


def adaptive_chain() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 5, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d((2, 3)), nn.Conv2d(5, 9, 2),
        nn.GroupNorm(3, 9), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(9, 5),
    )  # fmt: skip


class Case:
    """A model with data, trained by the kernels and by PyTorch."""

    def __init__(
        self,
        module: nn.Module,
        shape: tuple[int, ...],
        n: int = 23,
        batch: int = 5,
        trains: Callable[[str], bool] = T.everything,
        task: Task | None = None,
        instructions: str | None = None,
        seed: int = 0,
    ):
        draw = torch.Generator().manual_seed(seed)
        self.x = torch.randn(n, *shape, generator=draw)
        self.net = Net(module, self.x[:1].repeat(2, *[1] * len(shape)))
        self.tree = self.net.state()
        self.trained = frozenset(k for k in self.net.trainable if trains(k))
        example = torch.randn(3, *shape, generator=draw)
        watched = {k: v.clone().requires_grad_(k in self.trained) for k, v in self.tree.items()}
        with native.switched_off(), self.net.train_mode():
            links = tape.chain_of(self.net, watched, example)
        self.task = task or Classification(links[-1].after[0])
        library = open_library(instructions)
        self.program = Program(library, links, self.tree, self.net.constants(), self.task)
        with native.switched_off():
            self.scoring = Program(
                library, tape.chain_of(self.net, dict(self.tree), example), self.tree, self.net.constants(), self.task
            )
        outputs = self.task.outputs
        if isinstance(self.task, Regression):
            self.y = torch.poisson(torch.rand(n, outputs, generator=draw) * 3, generator=draw)
        elif isinstance(self.task, MultiLabel):
            self.y = torch.randint(2, (n, outputs), generator=draw).float()
        else:
            self.y = torch.randint(outputs, (n,), generator=draw)
        self.order = torch.stack([torch.randperm(n, generator=draw) for _ in range(2)])
        self.spans = (*range(0, n, batch), n)
        self.reference = {k: v + 0.1 * torch.randn(v.shape, generator=draw) for k, v in self.tree.items()}

    def rates(self, lr: float) -> list[float]:
        return [lr / (1 + 0.1 * i) for i in range(2 * (len(self.spans) - 1) - 1)]  # the last epoch is cut short

    def native(self, rule: StepRule, lr: float, decay: float = 0.0, pull: float = 0.0) -> tuple[Tree, float]:
        tree = T.clone(self.tree)
        towards = Pull(pull, self.reference, frozenset(self.net.trainable)) if pull else None
        decays = dict.fromkeys(self.trained, decay) if decay else {}
        loss = self.program.train(
            rule, decays, self.trained, tree, self.x, self.y, self.order, self.spans, self.rates(lr), towards
        )
        assert loss is not None
        return tree, loss

    def pytorch(
        self, optimiser: Callable[[Any], torch.optim.Optimizer], lr: float, clip: float = 0.0, pull: float = 0.0
    ) -> tuple[Tree, float]:
        tree, total, batches = T.clone(self.tree), 0.0, len(self.spans) - 1
        leaves = [tree[k].requires_grad_() for k in sorted(self.trained)]
        steps = optimiser(leaves)
        with self.net.train_mode(), native.switched_off():
            for i, rate in enumerate(self.rates(lr)):
                rows = self.order[i // batches][self.spans[i % batches] : self.spans[i % batches + 1]]
                loss = self.task.loss(self.net(tree, self.x[rows]), self.y[rows])
                if pull:
                    loss = loss + pull / 2 * T.sqdist(tree, self.reference, self.net.trainable)
                slopes = torch.autograd.grad(loss, leaves, allow_unused=True)
                for leaf, slope in zip(leaves, clipped(slopes, clip) if clip else slopes, strict=True):
                    leaf.grad = slope
                for group in steps.param_groups:
                    group["lr"] = rate
                steps.step()
                total += float(loss.detach())
        return {k: v.detach() for k, v in tree.items()}, total

    def agree(
        self,
        rule: StepRule = StepRule(),  # noqa: B008
        optimiser: Any = torch.optim.SGD,
        lr: float = 0.05,
        decay: float = 0.0,
        pull: float = 0.0,
        **options: Any,
    ) -> None:
        mine, loss = self.native(rule, lr, decay, pull)
        theirs, total = self.pytorch(
            lambda leaves: optimiser(leaves, lr=lr, weight_decay=decay, **options), lr, rule.clip, pull
        )
        assert loss == pytest.approx(total, rel=1e-4)
        for k, v in theirs.items():
            assert torch.allclose(mine[k], v, 1e-4, 2e-5), k
            assert k in self.trained or k in self.net.fixed or torch.equal(mine[k], self.tree[k]), k
        assert any(not torch.equal(mine[k], self.tree[k]) for k in self.trained)
        with native.switched_off(), torch.no_grad():
            expected = self.net(theirs, self.x)
        found = self.scoring.outputs_of(theirs, self.x)
        assert found is not None and torch.allclose(found, expected, 1e-4, 1e-4)


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "mlp": (lambda: ZOO["mlp"]((64,), 10), (64,)),
    "odd widths": (lambda: ZOO["mlp"]((7,), 3, hidden=[33, 5]), (7,)),
    "logistic": (lambda: ZOO["logistic"]((9,), 4), (9,)),
    "batch norm": (lambda: ZOO["mlp-bn"]((8,), 10), (8,)),
    "lenet5": (lambda: ZOO["lenet5"]((1, 28, 28), 10), (1, 28, 28)),
    "lenet5 without norm": (lambda: ZOO["lenet5-nobn"]((1, 17, 19), 10), (1, 17, 19)),
    "pictures": (picture_chain, (3, 14, 17)),
    "signals": (signal_chain, (2, 50)),
    "adaptive": (adaptive_chain, (1, 9, 7)),
}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("instructions", usable_instructions())
def test_every_layer_trains_and_scores_as_in_pytorch(name: str, instructions: str) -> None:
    torch.manual_seed(3)
    make, shape = MODELS[name]
    Case(make(), shape, n=24, batch=8, instructions=instructions).agree()


@pytest.mark.parametrize(("n", "batch"), [(1, 5), (4, 1), (5, 5), (17, 16), (40, 40)])
def test_a_client_of_one_sample_a_batch_of_one_and_odd_batches(n: int, batch: int) -> None:
    torch.manual_seed(3)
    Case(*[f() if callable(f) else f for f in MODELS["mlp"]], n=n, batch=batch).agree()  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("rule", "optimiser", "options"),
    [
        (StepRule(momentum=0.9), torch.optim.SGD, {"momentum": 0.9}),
        (StepRule(momentum=0.9, nesterov=True), torch.optim.SGD, {"momentum": 0.9, "nesterov": True, "decay": 0.01}),
        (StepRule(), torch.optim.SGD, {"decay": 0.1}),
        (StepRule(1), torch.optim.Adam, {"lr": 0.01, "decay": 0.1}),
        (StepRule(1, beta1=0.8, beta2=0.9, eps=1e-4), torch.optim.Adam, {"lr": 0.01, "betas": (0.8, 0.9), "eps": 1e-4}),
        (StepRule(2), torch.optim.AdamW, {"lr": 0.01, "decay": 0.1}),
        (StepRule(clip=0.3), torch.optim.SGD, {}),
        (StepRule(clip=0.3, momentum=0.5), torch.optim.SGD, {"momentum": 0.5, "pull": 0.5, "decay": 0.01}),
        (StepRule(), torch.optim.SGD, {"pull": 0.5}),
    ],
    ids=str,
)
def test_every_optimiser_and_option(rule: StepRule, optimiser: Any, options: dict[str, Any]) -> None:
    torch.manual_seed(3)
    Case(ZOO["mlp"]((20,), 6, hidden=[11]), (20,)).agree(rule, optimiser, **options)


@pytest.mark.parametrize("part", ["fc", "block", "block2.bn", "block1.conv.weight", "classifier.bias"])
def test_frozen_layers_keep_their_values_and_the_others_move_as_in_pytorch(part: str) -> None:
    torch.manual_seed(3)
    Case(ZOO["lenet5"]((1, 16, 16), 10), (1, 16, 16), n=24, batch=8, trains=lambda k: part in k).agree()


@pytest.mark.parametrize("task", [Regression(3), EventCount(3), MultiLabel(3)], ids=lambda t: t.name)
def test_losses_of_numbers_and_labels(task: Task) -> None:
    torch.manual_seed(3)
    Case(ZOO["mlp"]((6,), 3), (6,), task=task).agree(lr=0.02)


@settings(max_examples=25)
@given(
    st.integers(1, 40),
    st.integers(1, 40),
    st.integers(2, 20),
    st.integers(1, 30),
    st.integers(1, 9),
    st.integers(0, 99),
)
def test_any_sizes(inputs: int, hidden: int, outputs: int, n: int, batch: int, seed: int) -> None:
    torch.manual_seed(seed)
    Case(ZOO["mlp"]((inputs,), outputs, hidden=[hidden]), (inputs,), n=n, batch=batch, seed=seed).agree()


@settings(max_examples=15)
@given(st.data())
@pytest.mark.long
def test_any_convolution(data: st.DataObject) -> None:
    number = lambda a, b: data.draw(st.integers(a, b))  # noqa: E731
    groups, kernel, dilation = number(1, 3), (number(1, 4), number(1, 4)), number(1, 2)
    shape = (groups * number(1, 3), number(7, 12), number(7, 12))
    conv = nn.Conv2d(
        shape[0], groups * number(1, 4), kernel, number(1, 3), number(0, 2), dilation, groups, bias=bool(number(0, 1))
    )
    torch.manual_seed(number(0, 99))
    features = conv(torch.zeros(1, *shape)).numel()
    Case(nn.Sequential(conv, nn.ReLU(), nn.Flatten(), nn.Linear(features, 4)), shape, n=7, batch=3).agree()


def test_scores_do_not_depend_on_the_other_items_of_a_pass() -> None:
    torch.manual_seed(3)
    case = Case(ZOO["lenet5"]((1, 16, 16), 10), (1, 16, 16), n=70, batch=8)
    whole = case.scoring.outputs_of(case.tree, case.x)
    alone = [case.scoring.outputs_of(case.tree, case.x[i : i + 1].contiguous()) for i in range(70)]
    assert whole is not None and torch.equal(whole, torch.cat([a for a in alone if a is not None]))


def test_counts_and_loss_are_those_of_the_task() -> None:
    torch.manual_seed(3)
    case = Case(ZOO["mlp"]((8,), 5), (8,), n=50)
    outputs = case.scoring.outputs_of(case.tree, case.x)
    found = case.scoring.score(case.tree, case.x, case.y)
    assert outputs is not None and found is not None
    counts = case.task.count(outputs, case.y)
    assert torch.equal(found[0], counts["hits"]) and torch.equal(found[1], counts["total"])
    assert found[2] == pytest.approx(float(F.cross_entropy(outputs, case.y, reduction="sum")), rel=1e-6)


def test_targets_out_of_range_and_single_values_are_left_to_pytorch() -> None:
    case = Case(ZOO["mlp"]((8,), 5), (8,))
    case.y[3] = 5
    tree = T.clone(case.tree)
    args = (StepRule(), {}, case.trained, tree, case.x, case.y, case.order, case.spans, case.rates(0.1))
    assert case.program.train(*args) is None
    assert all(torch.equal(v, case.tree[k]) for k, v in tree.items())
    assert case.scoring.score(case.tree, case.x, case.y) is None
    norm = Case(ZOO["mlp-bn"]((8,), 5), (8,), n=6, batch=5)  # its last batch has one item
    tree = T.clone(norm.tree)
    assert norm.program.train(
        StepRule(), {}, norm.trained, tree, norm.x, norm.y, norm.order, norm.spans, norm.rates(0.1)
    ) is None  # fmt: skip


def test_a_diverging_training_ends_in_numbers_that_are_not_finite() -> None:
    case = Case(ZOO["mlp"]((8,), 5), (8,))
    case.x[0, 0] = torch.nan
    tree, loss = case.native(StepRule(), 0.1)
    assert loss != loss and not T.finite(tree)


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x) + x)  # type: ignore[no-any-return]


class Branching(Residual):
    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x) if x.mean().item() > 0 else x)  # type: ignore[no-any-return]


class Counting(Residual):
    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x) if len(x) > 2 else x)  # type: ignore[no-any-return]


class Tied(Residual):
    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(self.a(x)))  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("module", "why"),
    [
        (Residual(), "Tensor.add"),
        (Branching(), "axes|Tensor.item"),
        (Counting(), "number of items"),
        (Tied(), "used twice"),
        (nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Linear(4, 3)), "random"),
        (nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 3)), "tanh"),
    ],
    ids=lambda v: type(v).__name__ if isinstance(v, nn.Module) else "",
)
def test_a_model_that_is_no_known_chain_is_named_with_the_reason(module: nn.Module, why: str) -> None:
    net = Net(module, torch.randn(2, 4))
    with native.switched_off(), net.train_mode(), pytest.raises(tape.NoChainError, match=why):
        tape.chain_of(net, net.state(), torch.randn(3, 4))


@pytest.mark.long
@pytest.mark.parametrize("method", ["fedavg", "fedprox", "ditto", "fedrep", "fedper"])
def test_runs_have_the_same_bits_for_any_number_of_workers_and_agree_with_pytorch(
    tmp_path: Path, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, workers in (("one", 1), ("two", 2), ("off", 1)):
        if name == "off":
            monkeypatch.setenv("COTERIE_NATIVE", "0")
        coterie.run(method, data="digits", clients=6, rounds=3, epochs=1, seed=1, workers=workers, out=tmp_path / name)
    rows = {n: read_log(tmp_path / n / EVENTS).rows for n in ("one", "two", "off")}
    assert rows["one"] == rows["two"]
    engines = {n: read_settings(tmp_path / n)["engine"] for n in rows}
    assert engines["one"]["native"] and not engines["one"]["by_pytorch"]
    assert not engines["off"]["native"] and "switched off" in engines["off"]["by_pytorch"][0]
    for mine, theirs in zip(rows["one"], rows["off"], strict=True):
        assert mine.keys() == theirs.keys()


def test_threads_share_a_program() -> None:
    torch.manual_seed(3)
    case = Case(ZOO["lenet5"]((1, 16, 16), 10), (1, 16, 16), n=40, batch=8)
    wanted, found = case.native(StepRule(), 0.05)[0], {}

    def work(i: int) -> None:
        found[i] = [case.native(StepRule(), 0.05)[0] for _ in range(5)]

    threads = [threading.Thread(target=work, args=(i,)) for i in range(3)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    for trees in found.values():
        assert all(torch.equal(tree[k], v) for tree in trees for k, v in wanted.items())


# ---- which phases ----------------------------------------------------------------------------------------------------
def context(rule: Optimiser = Optimiser(), **more: Any) -> tuple[Context, Natives]:  # noqa: B008
    net = Net(ZOO["mlp"]((8,), 5), torch.randn(2, 8))
    ctx = Context(net, net.state(), (0,), Classification(5), 1, join=1.0, epochs=1.0, batch=4, lr=0.1, seed=0, **more)
    return ctx, Natives(rule)


def test_a_phase_says_what_keeps_it_from_the_kernels() -> None:
    ctx, natives = context()
    assert natives.why_not(ctx, Phase(TaskLoss(ctx))) == ""
    assert "its loss is its own" in natives.why_not(ctx, Phase(lambda p, b, e: ctx.loss(p, b)))
    assert "a step of its own" in natives.why_not(ctx, Phase(TaskLoss(ctx), batches_per_step=2))
    assert "update rule" in natives.why_not(ctx, Phase(update=lambda p, b, e, r: p))
    other, _ = context()
    assert "different model" in natives.why_not(ctx, Phase(TaskLoss(other)))
    augmented, _ = context(augment="jitter")
    assert "augmented" in natives.why_not(augmented, Phase(TaskLoss(augmented)))
    for rule, why in (
        (Optimiser("rmsprop"), "rmsprop"),
        (Optimiser("sgd", options=(("dampening", 0.1),)), "dampening"),
        (Optimiser(keep=True), "opt_state"),
    ):
        assert why in Natives(rule).why_not(ctx, Phase(TaskLoss(ctx)))


def test_a_program_that_is_wrong_is_noticed_by_the_check(monkeypatch: pytest.MonkeyPatch) -> None:
    ctx, natives = context()
    assert isinstance(natives.program(ctx, frozenset(ctx.net.trainable), torch.randn(2, 8)), Program)
    real = Program.train
    ctx, natives = context()

    def wrong(self: Program, rule: StepRule, decays: Any, trained: Any, tree: Tree, *rest: Any) -> float | None:
        out = real(self, rule, decays, trained, tree, *rest)
        tree["fc1.weight"].mul_(1.001)
        return out

    monkeypatch.setattr(Program, "train", wrong)
    assert "differs from PyTorch" in str(natives.program(ctx, frozenset(ctx.net.trainable), torch.randn(2, 8)))


# ---- sanitisers ------------------------------------------------------------------------------------------------------
@pytest.mark.long
def test_sanitisers_find_nothing(tmp_path: Path) -> None:
    """Run the tests of this file with kernels built with AddressSanitizer and UndefinedBehaviorSanitizer."""
    folder = Path(native.__file__).parent
    target = tmp_path / "_kernels.so"
    flags = ["-g", "-O1", "-std=gnu11", "-ffp-contract=fast", "-fno-math-errno", "-fPIC", "-shared", "-w", "-Wno-psabi"]
    flags += ["-fsanitize=address,undefined", "-fno-sanitize=alignment", "-fno-sanitize-recover=undefined"]
    command = ["gcc", *flags, "-DISA=baseline", "-DISA_BASELINE", f"-I{sysconfig.get_paths()['include']}"]
    command += [str(folder / "kernels.c"), str(folder / "module.c"), "-o", str(target), "-lm"]
    try:
        built = subprocess.run(command, capture_output=True, text=True)
        asan, cxx = (
            subprocess.run(["gcc", f"-print-file-name={name}"], capture_output=True, text=True).stdout.strip()
            for name in ("libasan.so", "libstdc++.so")
        )
    except FileNotFoundError:
        pytest.skip("no GCC")
    if built.returncode or not Path(asan).exists():
        pytest.skip(f"no sanitisers: {built.stderr[:200]}")
    script = tmp_path / "check.py"
    script.write_text(
        "import sys, pytest\n"
        "import coterie.train.native.library as library\n"
        "library._path = lambda: sys.argv[1]\n"
        "sys.exit(pytest.main(['-q', '-s', '-p', 'no:cacheprovider', '-m', 'not long', *sys.argv[2:]]))\n"
    )
    tests = [str(Path(__file__)), str(Path(__file__).with_name("test_native.py"))]
    preload = f"{asan} {cxx}"  # PyTorch throws exceptions, which the sanitiser intercepts
    environment = {**os.environ, "LD_PRELOAD": preload, "ASAN_OPTIONS": "detect_leaks=0", "COTERIE_NATIVE": "baseline"}
    done = subprocess.run(
        [sys.executable, str(script), str(target), *tests], capture_output=True, text=True, env=environment
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]

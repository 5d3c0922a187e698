"""Decide which phases and scores the compiled kernels compute, and why not the others."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from coterie.core import tree as T
from coterie.core.context import Context
from coterie.core.method import Method, Phase, task_loss
from coterie.core.net import Net
from coterie.core.tree import Tree
from coterie.train import native
from coterie.train.chain.program import OPTIMISERS, Program, StepRule
from coterie.train.chain.tape import BLOCK, NORM, NoChainError, chain_of
from coterie.train.native.op import TRAIN
from coterie.train.optimisers import Optimiser

CHECKED = 5  # items of the batch that is compared with PyTorch
STEP_AGREES = 1e-3  # largest difference to PyTorch's step, relative to the largest movement of the entry
RATE = 0.1
# fields of a phase that the kernels obey, or whose use keeps a phase from them; any other one does too
KNOWN = {
    "loss", "trains", "epochs", "steps", "stream", "batches_per_step", "update", "every_epoch", "clip", "lr",
    "weight_decay",
}  # fmt: skip

Found = Program | str  # a program, or the reason why the kernels cannot train


@dataclass
class Natives:
    """The programs of a run in this process."""

    rule: Optimiser
    _programs: WeakKeyDictionary[Net, dict[Any, Found]] = field(default_factory=WeakKeyDictionary, repr=False)

    def __reduce__(self) -> Any:
        return Natives, (self.rule,)  # programs hold addresses of this process

    def why_not(self, ctx: Context, phase: Phase) -> str:
        """Return why a phase is trained by PyTorch, whatever its model; empty if the kernels may train it."""
        if phase.update is not None:
            return "it has an update rule of its own"
        if phase.every_epoch is not None or phase.batches_per_step > 1:
            return "it has a step of its own"
        unusual = (f.name for f in fields(phase) if f.name not in KNOWN and getattr(phase, f.name) != f.default)
        if (name := next(unusual, None)) is not None:
            return f"it sets {name}"
        loss = task_loss(phase.loss)
        if loss is None:
            return f"its loss is its own ({getattr(phase.loss, '__qualname__', type(phase.loss).__name__)})"
        if loss.ctx is not ctx or not computes_plainly(ctx):
            return "its loss belongs to a different model"
        if ctx.augment:
            return "batches are augmented"
        if ctx.class_weights or ctx.own_loss is not None:
            return "class weights are set" if ctx.class_weights else "the loss is a function of the user"
        if ctx.device.type != "cpu":
            return "the kernels run on the processor"
        found = native_rule(self.rule, None)
        return found if isinstance(found, str) else ""

    def program(self, ctx: Context, trained: frozenset[str], example: Tensor) -> Found:
        """Return the program that trains these entries of the model on items like `example`, or a reason."""
        return self._found(ctx, (trained, tuple(example.shape[1:])), trained, example)

    def scoring(self, ctx: Context, example: Tensor) -> Found:
        """Return the program of the model in evaluation mode, or a reason."""
        return self._found(ctx, (None, tuple(example.shape[1:])), None, example)

    def _found(self, ctx: Context, key: Any, trained: frozenset[str] | None, example: Tensor) -> Found:
        known = self._programs.setdefault(ctx.net, {})
        if key not in known:
            known[key] = _program(ctx, trained, example)
        return known[key]

    def described(self, method: Method, example: Tensor) -> list[str]:
        """Return the work of the first round with phases that PyTorch's operations do, and why: one sentence each."""
        ctx = method.ctx
        phases = next((p for t in range(0 if method.opening() else 1, 4) if (p := method.phases(t))), [])
        out = []
        for i, phase in enumerate(phases, 1):
            why = self.why_not(ctx, phase)
            if not why:
                loss = task_loss(phase.loss)
                assert loss is not None
                trained = frozenset(k for k in ctx.net.trainable if phase.trains(loss.name(k)))
                found = self.program(ctx, trained, example)
                why = found if isinstance(found, str) else ""
            if why:
                out.append(f"phase {i} is trained by PyTorch's operations: {why}")
        found = self.scoring(ctx, example) if scores_plainly(method, False) else "its predictions are its own"
        return [*out, f"models are scored by PyTorch's operations: {found}"] if isinstance(found, str) else out


def computes_plainly(ctx: Context) -> bool:
    """True if outputs and losses of the context are those of the model and the task, and no subclass changes them."""
    same = all(getattr(type(ctx), name) is getattr(Context, name) for name in ("forward", "loss", "loss_of"))
    return same and type(ctx.net).forward is Net.forward and ctx.net.half is None


def scores_plainly(method: Method, shared: bool) -> bool:
    """True if the outputs of the method's models are those of the model alone."""
    cls = type(method)
    if not computes_plainly(method.ctx):
        return False
    return cls.predict_global is Method.predict_global if shared else cls.predict is Method.predict


def native_rule(rule: Optimiser, clip: float | None) -> StepRule | str:
    """Return the optimiser as the kernels take it, or why they do not."""
    options = dict(rule.options)
    if rule.make is not None or rule.kind not in OPTIMISERS:
        return f"the optimiser {rule.kind} has no native code"
    if rule.keep:
        return "optimisers keep their memory (opt_state = keep)"
    known = {"nesterov"} if rule.kind == "sgd" else {"betas", "eps"}
    if more := options.keys() - known:
        return f"the option {min(more)} of {rule.kind} has no native code"
    beta1, beta2 = options.get("betas", (0.9, 0.999))
    momentum = rule.momentum if rule.kind == "sgd" else 0.0
    nesterov = bool(options.get("nesterov", False))
    if nesterov and not momentum:
        return "nesterov needs momentum"  # PyTorch raises an error
    number = OPTIMISERS[rule.kind]
    return StepRule(number, momentum, nesterov, beta1, beta2, options.get("eps", 1e-8), 0.0 if clip is None else clip)


def _program(ctx: Context, trained: frozenset[str] | None, example: Tensor) -> Found:
    library = native.kernels()
    if library is None:
        return native.native_status()
    if not (example.dtype is torch.float32 and example.is_cpu):
        return "items are not float32"
    draw = torch.Generator().manual_seed(7)
    items = torch.randn(CHECKED, *example.shape[1:], generator=draw)
    try:
        with native.switched_off():
            if trained is None:
                net_mode = ctx.net.training
                ctx.net.training = False
                ctx.net.module.eval()
                try:
                    links = chain_of(ctx.net, dict(ctx.w0), items)
                finally:
                    ctx.net.training = net_mode
                    ctx.net.module.train(net_mode)
            else:
                tree = {k: v.clone().requires_grad_(k in trained) for k, v in ctx.w0.items()}
                with ctx.net.train_mode():
                    links = chain_of(ctx.net, tree, items)
            if trained is None and any(link.mode == TRAIN and link.kind in (BLOCK, NORM) for link in links):
                raise NoChainError("its norms use the statistics of the batch in evaluation too")
            program = Program(library, links, ctx.w0, ctx.net.constants(), ctx.task)
            _check(ctx, program, trained, items, draw)
    except NoChainError as e:
        return str(e)
    except Exception as e:  # the model of a user may fail in any way on random items
        return f"it could not be tried ({type(e).__name__})"
    return program


def _check(ctx: Context, program: Program, trained: frozenset[str] | None, x: Tensor, draw: torch.Generator) -> None:
    """Compare outputs or one step with PyTorch; raise NoChainError if they differ by more than rounding."""
    if trained is None:
        with torch.no_grad():
            expected = ctx.net(ctx.w0, x)
        found = program.outputs_of(ctx.w0, x)
        if found is None or not torch.allclose(found, expected, STEP_AGREES, STEP_AGREES, equal_nan=True):
            raise NoChainError("its outputs differ from PyTorch's")
        return
    if program.classes:
        y = torch.randint(ctx.task.outputs, (len(x),), generator=draw)
    else:
        y = torch.randint(2, (len(x), ctx.task.outputs), generator=draw).float()
    mine, theirs = T.clone(ctx.w0), T.clone(ctx.w0)
    names = [k for k in program.names if k in trained]
    leaves = [theirs[k].requires_grad_() for k in names]
    with ctx.net.train_mode(), torch.enable_grad():
        loss = ctx.task.loss(ctx.net(theirs, x), y)
        slopes = torch.autograd.grad(loss, leaves) if leaves else ()
    with torch.no_grad():
        for leaf, slope in zip(leaves, slopes, strict=True):
            leaf.sub_(slope, alpha=RATE)
    order = torch.arange(len(x))[None]
    total = program.train(StepRule(), {}, trained, mine, x, y, order, (0, len(x)), (RATE,))
    close = total is not None and torch.allclose(
        torch.tensor(total), loss.detach(), STEP_AGREES, STEP_AGREES, equal_nan=True
    )
    largest = max((float(s.abs().max()) for s in slopes), default=0.0) * RATE
    for k in program.names:
        if k in mine:
            moved = theirs[k].detach()
            scale = largest if k in trained else float(moved.abs().max())
            close = close and torch.allclose(mine[k], moved, 1e-5, STEP_AGREES * scale + 1e-7, equal_nan=True)
    if not close:
        raise NoChainError("its first step differs from PyTorch's")


def plain_tree(params: Mapping[str, Tensor], tag: str) -> Tree:
    """Return the model that a tag marks, under plain names; the tensors are the same objects."""
    return T.tagged(tag, params) if tag else dict(params)

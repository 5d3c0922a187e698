"""FedGMH: the server trains heads on the clients' mean features; clients write them into heads of their own."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from reference import PAPER, About, Case, Result, World, class_means, copied, features, head, head_tree

ABOUT = About(
    f"{PAPER} (`reading = paper`), authors' code (`reading = code`), our change (`fedgmh-mended`)",
    ("labels are sent in an opening round; the paper does not say how the server knows them",),
)
ALL = {
    "reading": "paper", "heads": "per_label", "write": "mask", "written": "critical", "criticality": "product",
    "mask_scope": "head", "first_psi": "none", "received_share": 0.5, "score": "own", "decay_on": "round",
    "server_batch": 0, "server_steps": 1, "eta_h": 0.5, "beta": 0.4,
}  # fmt: skip


def reference(world: World, **given) -> Result:  # type: ignore[no-untyped-def]
    s = {**ALL, **given}
    apart = s.get("init") == "independent"
    own = {i: world.start(i + 1) if apart else world.module() for i in world.clients}
    count = world.classes if s["heads"] == "per_label" else 1
    heads = [copied(head(world.start(-1 - k) if apart else world.module())) for k in range(count)]
    labels = {i: world.train_part(i)[1].unique().tolist() for i in world.clients}
    masks: dict[int, list[Tensor]] = {}
    joined = dict.fromkeys(world.clients, 0)

    def written(i: int) -> nn.Module:
        """The client's model with the received head written into its own."""
        model = copied(own[i])
        mine, got = [p.data for p in head(model).parameters()], _received(world, i, s, heads, own[i], labels[i])
        for k, (p, g) in enumerate(zip(mine, got, strict=True)):
            if s["write"] == "whole":
                new = g
            elif s["write"] == "average":
                new = (1 - s["received_share"]) * p + s["received_share"] * g
            elif i in masks:
                new = torch.where(masks[i][k], g, p) if s["written"] == "critical" else torch.where(masks[i][k], p, g)
            else:
                new = g if s["first_psi"] == "ones" else p
            list(head(model).parameters())[k].data = new.clone()
        return model

    for t in range(1, world.rounds + 1):
        sent: list[tuple[Tensor, int, int]] = []
        start = {i: written(i) for i in world.sampled(t)}
        for i, model in start.items():
            before = [p.detach().clone() for p in head(model).parameters()]
            pace = joined[i] if s["decay_on"] == "participation" else t - 1
            opt = torch.optim.SGD(model.parameters(), world.lr * world.lr_decay**pace)
            for x, y in world.batches(t, i):
                opt.zero_grad()
                F.cross_entropy(model(x), y).backward()
                opt.step()
            masks[i] = _critical(before, [p.data for p in head(model).parameters()], s)
            own[i], joined[i] = model, joined[i] + 1
            x, y = world.train_part(i)
            sent += [(mean, k, i) for k, mean in class_means(features(model, x), y).items()]
        _train(heads, sent, labels, s)
    clients = {i: written(i) if s["score"] == "received" else own[i] for i in world.clients}
    names = list(head_tree(world.module()))
    stacks = [torch.stack([list(h.parameters())[k].data for h in heads]) for k in range(2)]
    stacks = [t[0] for t in stacks] if s["heads"] == "common" else stacks
    return Result(clients, server={"heads": dict(zip(names, stacks, strict=True))})


def _received(world: World, i: int, s: dict, heads: list[nn.Linear], own: nn.Module, labels: list[int]) -> list[Tensor]:
    if s["heads"] == "one":
        return [p.data for p in heads[0].parameters()]
    if s["heads"] == "common":
        out = [p.data.clone() for p in head(own).parameters()]
        for mine, theirs in zip(out, heads[0].parameters(), strict=True):
            mine[labels] = theirs.data[labels]
        return out
    y = world.train_part(i)[1]
    share = {k: float((y == k).sum()) / len(y) for k in labels}
    return [sum(share[k] * list(heads[k].parameters())[n].data for k in labels) for n in range(2)]  # type: ignore[misc]


def _critical(before: list[Tensor], after: list[Tensor], s: dict) -> list[Tensor]:
    if s["criticality"] == "square":  # the authors' code, with its thresholds
        out = []
        for a, b in zip(before, after, strict=True):
            score = (b - a) ** 2 * b
            flat = score.flatten().sort(descending=True).values
            bar = flat[max(int(s["beta"] * len(flat)), 1) - 1]
            if bar <= 1e-10:
                bar = flat[flat > 1e-20][-1] if (flat > 1e-20).any() else torch.tensor(torch.inf)
            out.append(score >= bar)
        return out
    scores = [((b - a) * b).abs() for a, b in zip(before, after, strict=True)]
    groups = [scores] if s["mask_scope"] == "head" else [[c] for c in scores]
    masks = []
    for group in groups:
        flat = torch.cat([c.flatten() for c in group])
        mask = torch.zeros(len(flat), dtype=torch.bool)
        mask[flat.topk(int(s["beta"] * len(flat) + 1e-9)).indices] = True
        for part, c in zip(mask.split([c.numel() for c in group]), group, strict=True):
            masks.append(part.reshape(c.shape))
    return masks


def _train(heads: list[nn.Linear], sent: list[tuple[Tensor, int, int]], labels: dict[int, list[int]], s: dict) -> None:
    """SGD of each head on the mean features it is to see."""
    for number, h in enumerate(heads):
        seen = [v for v in sent if s["heads"] != "per_label" or v[1] == number]
        opt = torch.optim.SGD(h.parameters(), s["eta_h"])
        size = s["server_batch"] or max(len(seen), 1)
        for _ in range(s["server_steps"]):
            for a in range(0, len(seen), size):
                z, y, who = zip(*seen[a : a + size], strict=True)
                logits = h(torch.stack(z))
                if s["heads"] == "common":  # among the labels of its sender
                    held = torch.stack([torch.isin(torch.arange(len(h.bias)), torch.tensor(labels[i])) for i in who])
                    logits = logits.masked_fill(~held, -torch.inf)
                opt.zero_grad()
                F.cross_entropy(logits, torch.tensor(y)).backward()
                opt.step()


def mended(world: World, **given) -> Result:  # type: ignore[no-untyped-def]
    """One common head, averaged into the client's own."""
    return reference(world, heads="common", write="average", **given)


RUN = {"rounds": 4, "lr_decay": 0.9}
CODE = {
    "reading": "code", "written": "others", "criticality": "square", "mask_scope": "tensor", "first_psi": "ones",
    "received_share": 1.0, "score": "received", "decay_on": "participation", "server_batch": 1,
}  # fmt: skip
MENDED = {"received_share": 0.5, "server_steps": 3, "server_batch": 0, "eta_h": 0.5}
AVERAGE = {k: v for k, v in ALL.items() if k != "beta"} | {"write": "average"}
CASES = [
    Case("fedgmh-mended", mended, MENDED, RUN),
    Case("fedgmh", reference, ALL, RUN),
    Case("fedgmh", reference, ALL | {"init": "independent"}, RUN, tag="independent", long=("cnn",)),
    Case("fedgmh", reference, ALL | CODE, RUN, tag="code", long=("cnn",)),
    Case("fedgmh-o", reference, ALL | {"heads": "one"}, RUN, long=("cnn",)),
    Case("fedgmh-a", reference, AVERAGE, RUN, long=("cnn",)),
    Case("fedgmh-oa", reference, AVERAGE | {"heads": "one"}, RUN, long=("cnn",)),
]

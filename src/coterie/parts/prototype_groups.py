"""The server's side of groups with a body and prototypes each (FedPC): who belongs where, and what groups exchange."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor

from coterie import tree as T
from coterie.errors import CoterieError
from coterie.method import ClientId, Download, EdgeId, Settings, State, Upload
from coterie.parts.clustering import Missing, canonical, prototype_groups
from coterie.parts.prototype_messages import pack
from coterie.parts.prototypes import GroupMap, Prototypes, group_means, group_weights, masked_mix
from coterie.parts.similarity import mix
from coterie.rng import key
from coterie.tree import Tree


class GroupSettings(Settings):
    """How clients are grouped, and how groups learn from each other."""

    J: int | None = Field(None, ge=1, description="number of groups; empty: chosen by silhouette")
    J_max: int = Field(10, ge=2, description="largest number of groups to choose from")
    pca: Annotated[float, Field(gt=0)] | Annotated[int, Field(ge=1)] | Literal["none"] = Field(
        0.95, description="share of variance, or number of components"
    )
    missing: Missing = Field("zero", description="absent classes in the clustering")
    grouping: Literal["prototypes", "random"] = Field("prototypes", description="random: same sizes, as a control")
    sim_map: GroupMap = Field("clip", description="cosines of groups to weights")
    inter: Literal["adaptive", "mean", "none"] = Field("adaptive", description="mixing across groups")


def check_groups(groups: int | None, clients: int) -> None:
    if groups is not None and groups > clients:
        raise CoterieError(f"J = {groups} groups cannot be made of {clients} clients; set J to at most {clients}")


def first_groups(sets: Prototypes, hp: GroupSettings, seed: int) -> Tensor:
    """Labels [n] of the clients that sent these sets [n, classes, d]."""
    n, pca = len(sets.mask), None if hp.pca == "none" else hp.pca
    labels = prototype_groups(sets, hp.J and min(hp.J, n), key(seed, "groups"), hp.J_max, pca, hp.missing)
    return labels if hp.grouping == "prototypes" else random_groups(labels, sets.value, seed)


def inter_weights(sets: Prototypes, hp: GroupSettings) -> Tensor:
    """rho [j, j]: by similarity, 1/J everywhere, or the identity."""
    n = len(sets.mask)
    if hp.inter == "adaptive":
        return group_weights(sets, hp.sim_map)
    return torch.eye(n).double() if hp.inter == "none" else torch.full((n, n), 1 / n, dtype=torch.float64)


def alone(body: Tree, classes: int, width: int) -> tuple[State, Tree, Prototypes]:
    """Before anybody is grouped: one body for all, no prototypes."""
    nothing = Prototypes(torch.zeros(1, classes, width), torch.zeros(1, classes, dtype=torch.bool))
    return {"groups": {}, "largest": 0}, T.stack([body]), nothing


def seated(
    server: State, labels: Tensor, answered: Sequence[ClientId], clients: Sequence[ClientId], sets: Prototypes
) -> tuple[State, Tree, Prototypes]:
    """Everybody in a group, those that did not answer in the largest; groups start with one body and own prototypes."""
    count, largest = int(labels.max()) + 1, int(labels.bincount().argmax())
    groups = dict.fromkeys(clients, largest) | dict(zip(answered, labels.tolist(), strict=True))
    body = T.stack([T.row(server["body"], 0)] * count)
    return {"groups": groups, "largest": largest}, body, group_means(sets, labels, count)


def mixed(server: State, body: Tree, sets: Prototypes, rho: Tensor) -> State:
    """All groups from the same snapshot: bodies [j, ...] and prototypes [j, classes, d] mixed by rho [j, j]."""
    new = masked_mix(rho, sets)
    return {**server, "rho": rho, "body": mix(rho, body), "value": new.value, "mask": new.mask}


def written(server: State, uploads: Sequence[Upload], prototypes: Prototypes) -> tuple[State, Tree, Prototypes]:
    """The snapshot: what the groups sent, in the rows of those that did; the others keep theirs."""
    at = torch.tensor([u.sender for u in uploads])
    sent = T.stack([T.keep(u.tree, server["body"].__contains__) for u in uploads])
    body = {k: v.index_copy(0, at, sent[k]) for k, v in server["body"].items()}
    return server, body, Prototypes(*(server[k].index_copy(0, at, new) for k, new in prototypes._asdict().items()))


def download(server: State, ids: Sequence[ClientId]) -> Download:
    """To each group its body and its prototypes with their class ids; to strangers what the largest group gets."""
    sets = map(Prototypes, server["value"], server["mask"])
    to = {j: {k: v[j] for k, v in server["body"].items()} | pack(own) for j, own in enumerate(sets)}
    return Download(edge=to, each={i: to[server["largest"]] for i in ids if i not in server["groups"]})


def classes_sent(server: State, client: ClientId) -> int:
    """How many prototypes this client would be sent."""
    return int(server["mask"][server["groups"].get(client, server["largest"])].sum())


def by_group(groups: Mapping[ClientId, int]) -> dict[EdgeId, list[ClientId]]:
    """Members of each group, both in order."""
    out: dict[EdgeId, list[ClientId]] = {j: [] for j in sorted(set(groups.values()))}
    for client in sorted(groups):
        out[groups[client]].append(client)
    return out


def random_groups(labels: Tensor, content: Tensor, seed: int) -> Tensor:
    """Groups of the same sizes as labels [n] but dealt at random, as a control.

    The draw is a hash of each client's own content [n, ...], so that it does not depend on the clients' numbers.
    """
    sizes = torch.bincount(labels).sort(descending=True).values
    drawn = [key(seed, "random-groups", row.numpy().tobytes().hex()) for row in content]
    order = sorted(range(len(labels)), key=drawn.__getitem__)
    out = torch.empty_like(labels)
    out[order] = torch.repeat_interleave(torch.arange(len(sizes)), sizes)
    return canonical(out)

"""A FedCPMD cluster server: bodies mixed for each member by how alike personal layers are.

Its state holds the last known personal layers, the bodies of the last participants, and for each member the weights by
which its own body is mixed from them: bodies are made when they are sent, so that memory grows with participants.
"""

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from coterie.core import tree as T
from coterie.core.context import ClientId, State
from coterie.core.method import Upload
from coterie.core.tree import Tree
from coterie.methods.fedcpmd.settings import Unsampled
from coterie.parts.similarity import SimilarityMap, cosine, cosine_rows, map_similarity, mix, normalise_rows

PHI = "x:phi"  # entry of a client's layer, for the similarity
NEARLY_ONE = 0.9999  # a client is no more like itself than this
Layers = dict[ClientId, Tensor]  # last known personal layer of each member, flat
Rows = tuple[dict[ClientId, Tensor], dict[str, float]]  # weights per member, and what the log says of Phi


def flat_layer(tree: Mapping[str, Tensor], names: Sequence[str]) -> Tensor:
    """One layer as rows weight||bias [out, in + 1]."""
    return torch.cat([tree[k].flatten(1) if tree[k].ndim > 1 else tree[k][:, None] for k in names], 1)


def known_layers(before: Layers, uploads: Sequence[Upload]) -> Layers:
    """Return the last known layers after these uploads."""
    return {**before, **{u.sender: u.tree[PHI] for u in uploads if PHI in u.tree}}


def mixing_rows(
    phi: Layers,
    members: Sequence[ClientId],
    participants: Sequence[ClientId],
    mean: Tensor,
    by_rows: bool,
    how: SimilarityMap,
    log: bool = False,
) -> Rows:
    """Return each known member's weights over the participants: equation (12), Algorithm 3, lines 10 and 11."""
    if not phi:  # nothing to compare by: all alike
        return {i: torch.full_like(mean, 1 / len(mean)) for i in members}, {}
    known, now = torch.stack(list(phi.values())), torch.stack([phi[j] for j in participants])
    Phi = similarity(known, now, by_rows, how)
    weights = weights_of(_weight(Phi, log), list(phi), list(participants), mean).float()
    return dict(zip(phi, weights, strict=True)), spread(Phi, list(phi), list(participants))


def similarity(known: Tensor, participants: Tensor, rows: bool, how: SimilarityMap) -> Tensor:
    """Phi [known, participants] of personal layers [n, out, in + 1], equation (13)."""
    return map_similarity(
        cosine_rows(known, participants) if rows else cosine(known.flatten(1), participants.flatten(1)), how
    )


def _weight(phi: Tensor, log: bool) -> Tensor:
    """The weight of a similarity: itself, or -log(1 - s) as in pFedSim."""
    return -torch.log1p(-phi.clamp(0, NEARLY_ONE)) if log else phi


def weights_of(phi: Tensor, known: Sequence[ClientId], participants: Sequence[ClientId], mean: Tensor) -> Tensor:
    """Rows of equation (12). A member without similarity keeps its own body if it took part, else it gets the mean."""
    own = torch.tensor([[float(i == j) for j in participants] for i in known], dtype=phi.dtype)
    return normalise_rows(phi, torch.where(own.any(1, keepdim=True), own, mean.to(phi)))


def spread(phi: Tensor, known: Sequence[ClientId], participants: Sequence[ClientId]) -> dict[str, float]:
    """Mean and deviation of Phi between different members."""
    others = phi[torch.tensor([[i != j for j in participants] for i in known])]
    return {"mean": float(others.mean()), "std": float(others.std(correction=0))} if len(others) else {}


def layerwise(
    w: Tree, uploads: Sequence[Upload], weights: Callable[[Sequence[Upload]], Sequence[float] | None]
) -> Tree:
    """Each entry of the model averaged over those who sent it, equation (2); what nobody sent stays."""
    out = dict(w)
    for k in dict.fromkeys(k for u in uploads for k in u.tree if ":" not in k):
        have = [u for u in uploads if k in u.tree]
        out |= T.mean([{k: u.tree[k]} for u in have], weights(have))
    return out


def shared_bodies(
    w: Tree,
    sent: Mapping[ClientId, Tree],
    rows: Mapping[ClientId, Tensor],
    ids: Sequence[ClientId],
) -> dict[ClientId, Tree]:
    """The shared part of these clients' models: each entry mixed over the last participants that share it.

    `sent` are their models without personal parts, `rows` the weights over them of each client that they know; an entry
    that nobody sent, or that only clients without any weight sent, is that of w, and so is all of an unknown client.
    """
    out = {i: dict(w) for i in ids}
    known = [i for i in ids if i in rows]
    if not known:
        return out
    weights = torch.stack([rows[i] for i in known])  # [known, participants]
    for k in w:
        have = [at for at, tree in enumerate(sent.values()) if k in tree]
        share = weights[:, have]
        if not have or not w[k].is_floating_point():
            continue
        total = share.sum(1, keepdim=True)
        stacked = torch.stack([tree[k] for tree in sent.values() if k in tree])
        mixed = mix(share / total.clamp(min=1e-12), {k: stacked})[k]
        for at, i in enumerate(known):
            if float(total[at]) > 0:
                out[i][k] = mixed[at]
    return out


def renewed(
    state: State, start: Tree, bodies: Sequence[Tree], mean: Tensor, rows: Mapping[ClientId, Tensor], how: Unsampled
) -> State:
    """Return the state after a round with these participants' bodies.

    `rows` are the weights of the members that are mixed by similarity, `mean` those of all others. With `keep` the
    others stay where they were, so their bodies are computed now.
    """
    stacked = T.stack(bodies)
    if how != "keep":
        return {**state, "bodies": stacked, "mean": mean, "rows": dict(rows)}
    made = mix(torch.stack(list(rows.values())), stacked)
    before = {i: row for i, row in state.get("rows", {}).items() if i not in rows}
    if before:
        kept = mix(torch.stack(list(before.values())), state["bodies"])
        made = {k: torch.cat([kept[k], v]) for k, v in made.items()}
    eye = torch.eye(len(before) + len(rows))
    start = state.get("start") or T.clone(start)
    return {**state, "bodies": made, "start": start, "rows": dict(zip([*before, *rows], eye, strict=True))}


def bodies_of(state: State, start: Tree, ids: Sequence[ClientId]) -> dict[ClientId, Tree]:
    """B_i of these members; before the first round of a cluster (or, under keep, of a member) what the cloud gave."""
    known = [i for i in ids if "bodies" in state and (i in state["rows"] or "mean" in state)]
    out = {i: state.get("start", start) for i in ids}
    if known:
        weights = torch.stack([state["rows"].get(i, state.get("mean")) for i in known])
        mixed = mix(weights, state["bodies"])
        out |= {i: {k: v[r] for k, v in mixed.items()} for r, i in enumerate(known)}
    return out

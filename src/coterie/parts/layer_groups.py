"""Groups of a model's entries that belong together."""

from coterie.core.layers import Layout, Names
from coterie.errors import CoterieError


def last_layers(layout: Layout, count: int) -> Names:
    """Return the names of the last `count` layers.

    A batch norm between two of them belongs to the earlier one. Recurrent layers, embeddings and attention count as one
    layer each; layers that take no part in a prediction belong to the body.
    """
    weighted = layout.weighted or layout.layers
    if count <= 0:
        return Names()
    if count > len(weighted):
        return layout.groups["all"]
    first = layout.layers.index(weighted[-count])
    if count == len(weighted) and all(layout.kinds[name] == "bn" for name in layout.layers[:first]):
        return layout.groups["all"]
    return Names(n for layer in layout.layers[first:] for n in layout.groups[f"layer:{layer}"])


def union_of_groups(layout: Layout, setting: str, text: str) -> Names:
    """Return the names of several groups, separated by commas; raise CoterieError if the text or a group is empty."""
    chosen = [part.strip() for part in text.split(",") if part.strip()]
    for name in chosen:
        if not layout.group(name):
            needed = "; set lora_rank, such as lora_rank = 8" if name.startswith("lora") else ""
            raise CoterieError(f"{setting} = {text} names the group {name}, and the model has no such layers{needed}")
    if not chosen:
        raise CoterieError(f'{setting} = "{text}" names no group of layers')
    return Names(n for name in chosen for n in layout.groups[name])

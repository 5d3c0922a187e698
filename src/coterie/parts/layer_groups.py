"""Groups of a model's entries that belong together."""

from coterie.core.layers import Layout, Names


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

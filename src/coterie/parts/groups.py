"""Which entries of a model belong together."""

from coterie.models.layers import Layout, Names


def last_layers(layout: Layout, count: int) -> Names:
    """Names of the last `count` layers; batch norms between two of them go with the earlier one."""
    weighty = [name for name in layout.layers if layout.kinds[name] in ("conv", "fc")] or list(layout.layers)
    if count <= 0:
        return Names()
    if count >= len(weighty):
        return layout.groups["all"]
    first = layout.layers.index(weighty[-count])
    return Names(n for layer in layout.layers[first:] for n in layout.groups[f"layer:{layer}"])

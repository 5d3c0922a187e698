"""The table of a method's payload entries: what may cross each link, of which shape, type, range and kind."""

from dataclasses import dataclass
from itertools import groupby

import torch

from coterie.core.edges import EdgeMethod
from coterie.core.method import Method
from coterie.core.schema import LARGEST_ENTRY, LINKS, Entry, Link, Schema
from coterie.core.tree import Tree

LINK_WORDS: dict[Link, str] = {
    "up": "device to server",
    "down": "server to device",
    "edge_up": "edge to cloud",
    "edge_down": "cloud to edge",
}
AS_MODEL, SOME_VALUES = "as in the model", "some of its values, as a vector"
_PLAIN_LINKS: tuple[Link, ...] = ("up", "down")  # of methods without edges


@dataclass(frozen=True)
class PayloadRow:
    """Entries that differ in nothing but name and shape, as words of a table."""

    link: str
    entry: str
    shape: str
    type: str
    kind: str
    heading: str
    summed: str
    when: str
    bytes: int


def payload_rows(method: Method) -> list[PayloadRow]:
    """Return all entries that may cross a link, by the general schema of a method with a context."""
    links = LINKS if isinstance(method, EdgeMethod) else _PLAIN_LINKS
    return [row for link in links for row in _rows(LINK_WORDS[link], method.schema(link), method.ctx.w0)]


def _rows(link: str, schema: Schema, model: Tree) -> list[PayloadRow]:
    most = {word: high for word, (_, high) in schema.lengths.items()}
    found = []
    for name, entry in schema.entries.items():
        mark, _, plain = name.rpartition(":")
        shape = " x ".join(map(str, entry.shape)) or "one number"
        if plain in model and entry.shape == tuple(model[plain].shape):
            shape = AS_MODEL
        elif name in model and schema.lengths.get(shape, (0, 0))[1] == model[name].numel():
            shape = SOME_VALUES
        of_model = shape in (AS_MODEL, SOME_VALUES)
        found.append((
            (
                mark if of_model else name, shape, _type(entry), " and ".join(entry.kinds), entry.part,
                "yes" if entry.summable else "no", "not always" if entry.optional else "always",
            ),
            plain if of_model else "",
            entry.size(most),
        ))  # fmt: skip
    order = {key: i for i, (key, _, _) in reversed(list(enumerate(found)))}
    rows = []
    for key, same in groupby(sorted(found, key=lambda f: order[f[0]]), key=lambda f: f[0]):
        _, names, sizes = zip(*same, strict=True)
        entry_words = _model_entries(key[0], names, len(model)) if names[0] else f"`{key[0]}`"
        _, shape, type_, kind, heading, summed, when = key
        rows.append(PayloadRow(link, entry_words, shape, type_, kind, heading, summed, when, sum(sizes)))
    return rows or [PayloadRow(link, "nothing", "", "", "", "", "", "", 0)]


def _model_entries(mark: str, names: tuple[str, ...], model: int) -> str:
    """Entries of the model, with the mark before their names if they have one."""
    if len(names) == model:
        text = "all entries of the model"
    elif len(names) <= 4:
        text = ", ".join(f"`{n}`" for n in names)
    else:
        text = f"{len(names)} of the model's {model} entries, `{names[0]}` to `{names[-1]}`"
    return f"`{mark}:` {text}" if mark else text


def _type(entry: Entry) -> str:
    text = str(entry.dtype).removeprefix("torch.")
    if entry.dtype != torch.bool and (entry.low > -LARGEST_ENTRY or entry.high < LARGEST_ENTRY):
        low, high = (f"{v:g}" if abs(v) < LARGEST_ENTRY else "any" for v in (entry.low, entry.high))
        text += f", {low} to {high}" if high != "any" else f", {low} or more"
    return text + (", no value twice" if entry.distinct else "") + (", NaN: absent" if entry.nan else "")

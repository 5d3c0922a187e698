"""Facts of methods and settings in plain words, for tables, `coterie show` and the documentation."""

from collections.abc import Mapping
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Annotated, Any, Literal, Union, get_args, get_origin

if TYPE_CHECKING:  # the command line starts without torch
    from coterie.core.method import Method

FAMILIES = {
    "-": "alone",
    "G": "one global model",
    "F": "fine-tuning",
    "S": "split model",
    "R": "regularised",
    "M": "mixed models",
    "C": "clusters",
    "P": "prototypes and heads",
}
CERTAINTY = {
    "A": "checked against the authors' code",
    "B": "checked against other people's code",
    "P": "written from the paper itself",
    "O": "Coterie's own method",
    "C": "reconstructed from published descriptions, with open points",
}

NEEDS = {
    "bn": "a model with batch norm",
    "head": "a model whose last layer is linear",
    "val": "a validation part at every client",
    "some_val": "validation parts",
    "constant_lr": "one learning rate per round",
    "epochs": "local work in epochs",
    "unweighted": "no class weights",
    "public": "a public set without labels",
    "full": "all clients in every round",
}


def families(letters: str) -> list[str]:
    """The families of a card, in words."""
    return [FAMILIES.get(letter.strip(), letter) for letter in (letters or "-").split(",")]


def source(method: "type[Method]") -> str:
    """Return what a method was checked against, or the module of a method from a different package."""
    if not method.__module__.startswith("coterie.methods."):
        return f"the module {method.__module__}"
    return CERTAINTY.get(method.card.certainty, "")


def parents(found: Mapping[str, type]) -> dict[str, str | None]:
    """The method that each is a variant of: it is called NAME-... and written in the same module or folder as NAME.

    A mended method is not a variant of its paper's method but has variants of its own.
    """
    homes = {name: cls.__module__.split(".")[:3] for name, cls in found.items()}
    above: dict[str, str | None] = {}
    for n in found:
        named = [p for p in found if n.startswith(f"{p}-") and homes[p] == homes[n]]
        mended = [p for p in named if p.endswith("-mended")]
        above[n] = None if n.endswith("-mended") else min(mended or named, key=len, default=None)
    return above


def type_words(annotation: Any) -> str:
    """number, text, "a or b", number or "eigengap": as a person would write it."""
    origin, inner = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        return ", ".join(map(str, inner))
    if origin is Annotated:
        return type_words(inner[0])
    if origin in (Union, UnionType):
        return " or ".join("empty" if i is NoneType else type_words(i) for i in inner)
    if origin is list:
        return f"list of {type_words(inner[0])}" if inner else "list"
    if origin is dict or annotation is dict:
        return "table"
    named = {bool: "true or false", int: "whole number", float: "number", str: "text"}
    return named.get(annotation) or str(getattr(annotation, "__name__", annotation))


def bounds_words(metadata: Any) -> str:
    """Return the bounds of a setting in words, for example "at least 0, below 1"."""
    words = []
    for bound in metadata:
        for name, text in (("ge", "at least"), ("gt", "above"), ("le", "at most"), ("lt", "below")):
            value = getattr(bound, name, None)
            if value is not None and abs(value) < 1e6:  # larger ones only catch slips of the keyboard
                words.append(f"{text} {value:g}")
    return ", ".join(words)

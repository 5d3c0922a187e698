"""Malformed payloads that a schema must refuse."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from coterie.core.method import Schema, Tree
from coterie.errors import CoterieError


def refuses(schema: Schema, good: Tree, *wrong: tuple[dict[str, Tensor], str]) -> None:
    """Assert that the schema accepts `good`, and refuses malformed versions of it and the versions `wrong`."""
    schema.check(good, "the upload")
    for tree, words in [*_spoiled(good), *(({**good, **entries}, words) for entries, words in wrong)]:
        with pytest.raises(CoterieError, match=words) as e:
            schema.check(tree, "the upload")
        assert str(e.value).startswith("the upload ") and "\n" not in str(e.value)


def _spoiled(good: Tree) -> Iterator[tuple[Tree, str]]:
    name = max((k for k, v in good.items() if v.is_floating_point()), key=lambda k: good[k].numel(), default="")
    yield {**good, "more": torch.zeros(1)}, "'more' that is not declared"
    for k in good:
        yield {other: v for other, v in good.items() if other != k}, f"lacks {k}"
    if name:
        v = good[name]
        yield {**good, name: torch.full_like(v, float("nan"))}, f"NaN or infinity in {name}"
        yield {**good, name: torch.full_like(v, 1e10)}, f"1e\\+10 in {name}, larger than"
        yield {**good, name: v.double()}, f"{name} of type float64"
        yield {**good, name: v[..., :-1]}, f"{name} of shape"
        yield {**good, name: v[None]}, f"{name} of shape"

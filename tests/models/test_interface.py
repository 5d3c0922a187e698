"""Models of other packages with several inputs, and with outputs in objects, dictionaries and tuples."""

from collections import OrderedDict
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import coterie
from coterie.core.layers import layout
from coterie.errors import CoterieError
from coterie.models.registry import build_model
from support import families


class Encoder(nn.Module):
    """Like a classifier of Hugging Face: token ids with a mask, and an output object."""

    form = "object"

    def __init__(self, classes: int = 4, padding: int = 0):
        super().__init__()
        self.config = SimpleNamespace(pad_token_id=padding)
        self.words, self.classifier = nn.Embedding(20, 8), nn.Linear(8, classes)

    def forward(self, input_ids=None, attention_mask=None, labels=None, return_dict=True):
        weight = attention_mask.unsqueeze(-1).float()
        logits = self.classifier((self.words(input_ids) * weight).sum(1) / weight.sum(1).clamp(min=1))
        if self.form == "tuple":
            return logits, None
        return OrderedDict(logits=logits) if self.form == "dictionary" else SimpleNamespace(logits=logits, loss=None)


class InDictionary(Encoder):
    form = "dictionary"


class InTuple(Encoder):
    form = "tuple"


class TwoInputs(nn.Module):
    def __init__(self, classes: int = 4):
        super().__init__()
        self.a, self.b, self.head = nn.Embedding(20, 8), nn.Embedding(20, 8), nn.Linear(8, classes)

    def forward(self, words: Tensor, tags: Tensor) -> Tensor:
        return self.head(self.a(words).mean(1) + self.b(tags).mean(1))


FEW = {"rounds": 2, "clients": 3, "epochs": 1, "workers": 1, "eval_every": 2, "lr": 0.5}


@pytest.mark.parametrize("cls", [Encoder, InDictionary, InTuple])
def test_a_model_with_input_ids_gets_the_mask_of_padding_and_gives_its_logits(cls, tmp_path):
    data = families.data("tokens")
    model = build_model(cls(padding=0), data.shape, 4, dtype=torch.int64)
    x = data.x[:5]
    expected = model.inner(x, (x != 0).long())
    expected = expected[0] if cls is InTuple else expected["logits"] if cls is InDictionary else expected.logits
    assert torch.equal(model(x), expected)
    assert layout(model, x[:2]).head == "inner.classifier"
    for source in (cls, cls()):
        run = coterie.run("fedper", data, source, out=tmp_path / f"r{source is cls}", **FEW)
        assert run.personal(1)(x).shape == (5, 4)


def test_the_padding_of_a_model_is_that_of_its_configuration():
    x = torch.tensor([[3, 4, 1, 1], [3, 1, 1, 1]])
    model = build_model(Encoder(padding=1), (4,), 4, dtype=torch.int64)
    assert torch.equal(model(x), model.inner(x, (x != 1).long()).logits)


def test_dictionaries_of_inputs_reach_the_arguments_of_a_model(tmp_path):
    tokens = families.data("tokens")
    ids, mask = tokens.x.numpy(), (tokens.x != 0).long().numpy()
    both = coterie.from_arrays({"input_ids": ids, "attention_mask": mask}, tokens.y.numpy(), name="both")
    assert both.shape == (2, 6)
    model = build_model(Encoder(), both.shape, 4, dtype=torch.int64)
    assert torch.equal(model(both.x[:5]), model.inner(tokens.x[:5], torch.from_numpy(mask[:5])).logits)
    run = coterie.run("fedavg", both, Encoder, out=tmp_path / "two", **FEW)
    plain = coterie.run("fedavg", tokens, Encoder, out=tmp_path / "one", **FEW)
    assert torch.allclose(run.personal(0)(both.x[:5]), plain.personal(0)(tokens.x[:5]), atol=1e-6)
    predicted = run.predict(0, {"input_ids": ids[:5], "attention_mask": mask[:5]})
    assert np.allclose(predicted.outputs, run.personal(0)(both.x[:5]).detach().numpy(), atol=1e-6)
    own = coterie.from_arrays({"words": ids, "tags": ids[:, ::-1].copy()}, tokens.y.numpy(), name="own")
    assert coterie.run("fedrep", own, TwoInputs, out=tmp_path / "own", **FEW).finished


def test_models_that_take_and_give_one_tensor_are_not_touched():
    module = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
    assert type(build_model(module, (1, 8, 8), 10)) is nn.Sequential


def test_dictionaries_that_cannot_be_inputs_are_refused():
    for given in (
        {"a": np.zeros((4, 2)), "b": np.zeros((4, 2))},
        {"a": np.ones((4, 2), int), "b": np.ones((4, 3), int)},
    ):
        with pytest.raises(CoterieError, match="a dictionary of inputs of arrays must hold arrays of whole numbers"):
            coterie.from_arrays(given, np.arange(4) % 2)

"""Transformer encoders for text and pictures, with the tensor names of BERT, so that weights of such encoders load.

The padding of a text has vectors of zeros at every stage, and each layer computes its mask from them. So a layer needs
only the output of the layer before it.

Vaswani et al., NeurIPS 2017; Devlin et al., NAACL 2019; Dosovitskiy et al., ICLR 2021.
"""

import torch
from torch import Tensor, nn

from coterie.models.blocks import ItemShape

HIDDEN = -1e4  # added to the scores of padding; a finite value, because an item may be padding only


def real_tokens(x: Tensor) -> Tensor:
    """Return 1 for tokens and 0 for padding, whose vectors are zeros [batch, tokens]."""
    return (x != 0).any(-1).to(x.dtype)


class SelfAttention(nn.Module):
    """Scaled dot-product attention with several heads, without its output layer."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.heads = heads

    def forward(self, x: Tensor, bias: Tensor | None) -> Tensor:
        q, k, v = (  # [batch, heads, tokens, width / heads]
            layer(x).unflatten(-1, (self.heads, -1)).transpose(-3, -2) for layer in (self.query, self.key, self.value)
        )
        scores = q @ k.transpose(-2, -1) * q.shape[-1] ** -0.5
        if bias is not None:
            scores = scores + bias
        return (scores.softmax(-1) @ v).transpose(-3, -2).flatten(-2)  # type: ignore[no-any-return]


class Output(nn.Module):
    """A linear layer with dropout, and the norm of its residual branch."""

    def __init__(self, inner: int, width: int, dropout: float, eps: float):
        super().__init__()
        self.dense, self.dropout = nn.Linear(inner, width), nn.Dropout(dropout)
        self.LayerNorm = nn.LayerNorm(width, eps=eps)

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(self.dense(x))  # type: ignore[no-any-return]


class Attention(nn.Module):
    def __init__(self, width: int, heads: int, dropout: float, eps: float):
        super().__init__()
        self.self = SelfAttention(width, heads)
        self.output = Output(width, width, dropout, eps)

    def forward(self, x: Tensor, bias: Tensor | None) -> Tensor:
        return self.output(self.self(x, bias))  # type: ignore[no-any-return]


class Intermediate(nn.Module):
    def __init__(self, width: int, feedforward: int):
        super().__init__()
        self.dense = nn.Linear(width, feedforward)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.gelu(self.dense(x))


class EncoderLayer(nn.Module):
    """Attention and a small MLP, each with a shortcut and a norm: after it as in BERT, or before it (`norm_first`)."""

    def __init__(self, width: int, heads: int, feedforward: int, dropout: float, eps: float, norm_first: bool):
        super().__init__()
        self.attention = Attention(width, heads, dropout, eps)
        self.intermediate = Intermediate(width, feedforward)
        self.output = Output(feedforward, width, dropout, eps)
        self.norm_first = norm_first

    def forward(self, x: Tensor) -> Tensor:
        norm1, norm2 = self.attention.output.LayerNorm, self.output.LayerNorm
        if self.norm_first:  # pictures, which have no padding
            x = x + self.attention(norm1(x), None)
            return x + self.output(self.intermediate(norm2(x)))  # type: ignore[no-any-return]
        real = real_tokens(x)
        x = norm1(x + self.attention(x, (1 - real)[..., None, None, :] * HIDDEN))
        return norm2(x + self.output(self.intermediate(x))) * real.unsqueeze(-1)  # type: ignore[no-any-return]


class Encoder(nn.Module):
    def __init__(
        self, width: int, depth: int, heads: int, feedforward: int, dropout: float, eps: float, norm_first: bool = False
    ):
        super().__init__()
        layers = (EncoderLayer(width, heads, feedforward, dropout, eps, norm_first) for _ in range(depth))
        self.layer = nn.ModuleList(layers)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layer:
            x = layer(x)
        return x


class TokenEmbeddings(nn.Module):
    """Vectors of tokens and of positions, with a norm; all tokens are of type 0."""

    def __init__(self, vocab: int, width: int, positions: int, dropout: float, eps: float):
        super().__init__()
        self.word_embeddings = nn.Embedding(vocab, width, padding_idx=0)
        self.position_embeddings, self.token_type_embeddings = nn.Embedding(positions, width), nn.Embedding(2, width)
        self.LayerNorm, self.dropout = nn.LayerNorm(width, eps=eps), nn.Dropout(dropout)
        for table in (self.word_embeddings, self.position_embeddings, self.token_type_embeddings):
            nn.init.normal_(table.weight, std=0.02)
        nn.init.zeros_(self.word_embeddings.weight[0].detach())

    def forward(self, ids: Tensor) -> Tensor:
        positions = self.position_embeddings.weight[: ids.shape[-1]]
        x = self.word_embeddings(ids) + positions + self.token_type_embeddings.weight[0]
        return self.dropout(self.LayerNorm(x)) * (ids != 0).unsqueeze(-1).to(x.dtype)  # type: ignore[no-any-return]


class MeanOfTokens(nn.Module):
    """Mean of the outputs [batch, tokens, width] over tokens that are not padding."""

    def forward(self, x: Tensor) -> Tensor:
        return x.sum(-2) / real_tokens(x).sum(-1, keepdim=True).clamp(min=1)


class TextTransformer(nn.Module):
    """A BERT-like encoder, the mean over tokens, and the classifier; token 0 is padding and is not seen by others."""

    takes = torch.int64

    def __init__(
        self,
        classes: int,
        vocab: int,
        width: int,
        depth: int,
        heads: int,
        feedforward: int,
        positions: int,
        dropout: float = 0.0,
        eps: float = 1e-12,
    ):
        super().__init__()
        self.embeddings = TokenEmbeddings(vocab, width, positions, dropout, eps)
        self.encoder = Encoder(width, depth, heads, feedforward, dropout, eps)
        self.pool = MeanOfTokens()
        self.classifier = nn.Linear(width, classes)

    def forward(self, ids: Tensor) -> Tensor:
        return self.classifier(self.pool(self.encoder(self.embeddings(ids))))  # type: ignore[no-any-return]


class PatchEmbeddings(nn.Module):
    """Vectors of square patches, by a convolution, and of their positions."""

    def __init__(self, shape: ItemShape, patch: int, width: int):
        super().__init__()
        self.projection = nn.Conv2d(shape[0], width, patch, patch)
        count = (shape[1] // patch) * (shape[2] // patch)
        self.position_embeddings = nn.Parameter(torch.randn(1, count, width) * 0.02)

    def forward(self, x: Tensor) -> Tensor:
        return self.projection(x).flatten(-2).transpose(-2, -1) + self.position_embeddings  # type: ignore[no-any-return]


class VisionTransformer(nn.Module):
    """Patches, a transformer with norms before its layers, the mean over patches, and the classifier."""

    def __init__(
        self,
        shape: ItemShape,
        classes: int,
        patch: int,
        width: int,
        depth: int,
        heads: int,
        feedforward: int,
        dropout: float,
    ):
        super().__init__()
        self.embeddings = PatchEmbeddings(shape, patch, width)
        self.encoder = Encoder(width, depth, heads, feedforward, dropout, 1e-6, norm_first=True)
        self.norm = nn.LayerNorm(width, eps=1e-6)
        self.classifier = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(self.norm(self.encoder(self.embeddings(x))).mean(-2))  # type: ignore[no-any-return]

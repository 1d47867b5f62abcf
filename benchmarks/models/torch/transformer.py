"""A small decoder-only transformer (Vaswani et al., "Attention is all you need", 2017)."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from benchmarks.models import MODELS


class Transformer(nn.Module):
    """Predicts the next token at each place, with layers as in GPT-2.

    Args:
        vocabulary: the number of different tokens.
        context: the largest number of places in a sequence.
        width: the length of a token's vector.
        layers: the number of blocks.
        heads: the number of heads of each attention.
        tied: whether the last layer is the embedding, or a layer of its own, ``head``.
        history: the number of tokens before each, whose embeddings, one table for each distance, are added
            to its own.
    """

    def __init__(
        self,
        vocabulary: int = 1000,
        context: int = 64,
        width: int = 256,
        layers: int = 4,
        heads: int = 4,
        *,
        tied: bool = True,
        history: int = 0,
    ) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.places = nn.Embedding(context, width)
        self.before = nn.ModuleList([nn.Embedding(vocabulary, width) for _ in range(history)])
        self.blocks = nn.ModuleList([_Block(width, heads) for _ in range(layers)])
        self.norm = nn.LayerNorm(width)
        for embedding in (self.tokens, self.places, *self.before):
            nn.init.normal_(embedding.weight, std=0.02)
        self.head = None if tied else nn.Linear(width, vocabulary)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Logits, shape=(n, places, vocabulary), of tokens, shape=(n, places), int64."""
        x = self.tokens(tokens) + self.places.weight[: tokens.shape[1]]
        for distance, embedding in enumerate(self.before, 1):
            x = x + F.pad(embedding(tokens[:, :-distance]), (0, 0, distance, 0))
        for block in self.blocks:
            x = block(x)
        x = self.norm(x)
        return F.linear(x, self.tokens.weight) if self.head is None else self.head(x)


def gpt(vocabulary: int) -> Transformer:
    """The model of the training benchmark: two blocks of width 128, with a last layer of its own."""
    (context,) = MODELS["gpt"].input
    return Transformer(vocabulary, context, width=128, layers=2, heads=4, tied=False)


def gpt_history(vocabulary: int) -> Transformer:
    """Two blocks of width 96, which see the embeddings of the four tokens before each one, too."""
    (context,) = MODELS["gpt_history"].input
    return Transformer(vocabulary, context, width=96, layers=2, heads=4, tied=False, history=4)


def gpt2(vocabulary: int = MODELS["gpt2"].classes) -> Transformer:
    """GPT-2's smallest shape (Radford et al., 2019): 12 blocks of width 768, tied embeddings.

    The vocabulary is GPT-2's, or a larger one: bytes of text are its first 256 tokens.
    """
    vocabulary = max(vocabulary, MODELS["gpt2"].classes)
    return Transformer(vocabulary, context=1024, width=768, layers=12, heads=12)


class _Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.wide = nn.Linear(width, 4 * width)
        self.narrow = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        count, places, width = x.shape
        parts = self.qkv(self.norm1(x)).view(count, places, 3, self.heads, width // self.heads)
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).reshape(count, places, width))
        return x + self.narrow(F.gelu(self.wide(self.norm2(x))))

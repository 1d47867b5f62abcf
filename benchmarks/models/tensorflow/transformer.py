"""A small decoder-only transformer (Vaswani et al., "Attention is all you need", 2017)."""

from __future__ import annotations

from typing import Any

import keras
from keras import initializers, layers

from benchmarks.models import MODELS
from benchmarks.models.tensorflow.layers import linear, uniform

_HEADS = 4
_LAYERS = 2
_WIDTH = 128
_EMBEDDING = initializers.RandomNormal(stddev=0.02)


def gpt(vocabulary: int) -> keras.Model:
    """The model of :func:`benchmarks.models.torch.transformer.gpt`.

    Its input is tokens, shape=(n, places); its output, logits of the next tokens, shape=(n, places,
    vocabulary).
    """
    (context,) = MODELS["gpt"].input
    tokens = keras.Input((context,), dtype="int64")
    embedding = layers.Embedding(
        vocabulary, _WIDTH, embeddings_initializer=_EMBEDDING, name="tokens"
    )
    x = _Places(name="places")(embedding(tokens))
    for index in range(_LAYERS):
        x = _block(x, f"block{index}")
    x = layers.LayerNormalization(epsilon=1e-5, name="norm")(x)
    return keras.Model(tokens, linear(vocabulary, _WIDTH, name="head")(x), name="gpt")


class _Places(layers.Layer):
    """Adds a vector for each place."""

    def build(self, shape: tuple[int | None, ...]) -> None:
        self.places = self.add_weight(shape[1:], initializer=_EMBEDDING, name="embeddings")

    def call(self, x: Any) -> Any:
        return x + self.places


def _block(x: Any, name: str) -> Any:
    seen = layers.LayerNormalization(epsilon=1e-5, name=f"{name}_norm1")(x)
    attention = layers.MultiHeadAttention(
        _HEADS, _WIDTH // _HEADS, name=f"{name}_attention", **uniform(_WIDTH)
    )
    x = layers.Add()([x, attention(seen, seen, use_causal_mask=True)])
    y = layers.LayerNormalization(epsilon=1e-5, name=f"{name}_norm2")(x)
    y = linear(4 * _WIDTH, _WIDTH, name=f"{name}_wide", activation="gelu")(y)
    return layers.Add()([x, linear(_WIDTH, 4 * _WIDTH, name=f"{name}_narrow")(y)])

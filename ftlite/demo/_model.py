# SPDX-License-Identifier: BSD-3-Clause
"""A small character-level transformer, as wide as the wanted size of the training state says."""

from __future__ import annotations

import math

import torch
from torch import nn
from torch.nn import functional

__all__ = ["CONTEXT", "CharTransformer", "width_for"]

# Characters that the model sees at once.
CONTEXT = 64
_LAYERS = 6
_HEADS = 4
# Parameters of one layer per square of the width: query, key, value, output (4) and the two sides of the MLP (8).
_SQUARES = 12
# Each float32 parameter has two moments in AdamW's state.
_STATE_BYTES = 3 * 4
_DROPOUT = 0.1


class Layer(nn.Module):
    """Attention and an MLP, each on the normalized input, each added to it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        # draws from the generator, whose state therefore belongs to what a joiner has to copy
        self.dropout = nn.Dropout(_DROPOUT)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``x``: (batch, characters, width)."""
        batch, length, width = x.shape
        heads = (batch, length, _HEADS, width // _HEADS)
        q, k, v = (part.view(heads).transpose(1, 2) for part in self.qkv(self.norm1(x)).chunk(3, dim=-1))
        seen = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.dropout(self.out(seen.transpose(1, 2).reshape(batch, length, width)))
        mixed: torch.Tensor = x + self.dropout(self.down(functional.gelu(self.up(self.norm2(x)))))
        return mixed


class CharTransformer(nn.Module):
    """Predicts the next of ``characters`` kinds of characters at every place."""

    def __init__(self, characters: int, width: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(characters, width)
        self.place = nn.Embedding(CONTEXT, width)
        self.layers = nn.ModuleList(Layer(width) for _ in range(_LAYERS))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, characters)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``x``: (batch, characters) of numbers; returns the logits."""
        hidden = self.embed(x) + self.place.weight[: x.shape[1]]
        for layer in self.layers:
            hidden = layer(hidden)
        logits: torch.Tensor = self.head(self.norm(hidden))
        return logits


def width_for(size: int, characters: int) -> int:
    """The width at which parameters and AdamW's moments together are about ``size`` bytes."""
    wanted = size / _STATE_BYTES
    # _LAYERS * _SQUARES * width**2 + linear * width = wanted; biases and norms are in the 13 per layer
    square, linear = _LAYERS * _SQUARES, 2 * characters + CONTEXT + 13 * _LAYERS
    width = (math.sqrt(linear**2 + 4 * square * wanted) - linear) / (2 * square)
    # whole heads, whose sizes are even
    return max(2 * _HEADS, round(width / (2 * _HEADS)) * 2 * _HEADS)

"""An encoder: from the tokens of whole texts to hidden states or scores. Each token sees all tokens
of its text, so nothing is kept between calls.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn import functional

from cllm.backends.torch.decoder import ACTIVATIONS, Linear
from cllm.backends.torch.encoder_config import EncoderConfig
from cllm.backends.torch.weights import Weights

HEAD_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "tanh": torch.tanh,
    "relu": functional.relu,
}


class LayerNorm:
    """A norm that subtracts the mean."""

    def __init__(self, weights: Weights, name: str, config: EncoderConfig) -> None:
        size = (config.hidden_size,)
        self.weight, self.bias = (weights.read(f"{name}.{end}", size) for end in ("weight", "bias"))
        self.epsilon = config.norm_epsilon

    def __call__(self, x: Tensor) -> Tensor:
        return functional.layer_norm(x, x.shape[-1:], self.weight, self.bias, self.epsilon)


class EncoderLayer:
    """The weights of a layer, and what it computes."""

    def __init__(self, weights: Weights, prefix: str, config: EncoderConfig) -> None:
        name = {key: f"{prefix}.{value}" for key, value in config.family.names.items()}
        size = config.hidden_size
        self.num_heads = config.num_heads
        three = [name[key] for key in ("query", "key", "value")]
        self.qkv = Linear(weights, three, [size] * 3, size)
        self.attention_out = Linear(weights, [name["attention_out"]], [size], size)
        self.attention_norm = LayerNorm(weights, name["attention_norm"], config)
        self.up = Linear(weights, [name["up"]], [config.inner_size], size)
        self.down = Linear(weights, [name["down"]], [size], config.inner_size)
        self.norm = LayerNorm(weights, name["norm"], config)
        self.activate = ACTIVATIONS[config.activation]

    def __call__(self, hidden: Tensor, sizes: list[int]) -> Tensor:
        """``sizes`` are the lengths of the texts, whose tokens follow each other."""
        hidden = self.attention_norm(hidden + self.attention_out(self._attend(hidden, sizes)))
        return self.norm(hidden + self.down(self.activate(self.up(hidden))))

    def _attend(self, hidden: Tensor, sizes: list[int]) -> Tensor:
        # each text has the shape (query, key and value; heads; tokens; head_size)
        qkv = self.qkv(hidden).view(len(hidden), 3, self.num_heads, -1).permute(1, 2, 0, 3)
        texts = [
            functional.scaled_dot_product_attention(*text.unsqueeze(1))
            for text in qkv.split(sizes, dim=2)
        ]
        return torch.cat(texts, dim=2)[0].transpose(0, 1).reshape(hidden.shape)


class Encoder:
    """The weights of a model."""

    def __init__(self, weights: Weights, config: EncoderConfig) -> None:
        """Raises StartupError if a tensor is missing or does not fit."""
        self.config, self.device = config, weights.device
        family, size = config.family, config.hidden_size
        words = "embeddings.word_embeddings.weight"
        root = "" if words in weights else family.root
        self.words = weights.read(root + words, (config.vocabulary_size, size))
        num_positions = config.first_position + config.max_tokens
        self.positions = weights.read(
            f"{root}embeddings.position_embeddings.weight", (num_positions, size)
        )
        self.types: Tensor | None = None
        if config.num_types:
            name = f"{root}embeddings.token_type_embeddings.weight"
            self.types = weights.read(name, (config.num_types, size))
        self.norm = LayerNorm(weights, f"{root}embeddings.LayerNorm", config)
        self.layers = [
            EncoderLayer(weights, f"{root}{family.layers}.{i}", config)
            for i in range(config.num_layers)
        ]
        self.head: list[Linear] = []
        if config.ranks:
            names = zip(family.head, (size, 1), strict=True)
            self.head = [Linear(weights, [name], [outputs], size) for name, outputs in names]

    def compute(self, texts: Sequence[list[int]], types: Sequence[list[int]]) -> Tensor:
        """Return the hidden states of all tokens, shape (tokens, hidden_size).

        ``types`` are the types of the tokens: 1 in the second part of a pair, otherwise 0.
        """
        sizes, first = [len(text) for text in texts], self.config.first_position
        hidden = self.words[self._join(texts)]
        if self.types is not None:
            hidden = hidden + self.types[self._join(types)]
        positions = self._join([[*range(first, first + size)] for size in sizes])
        hidden = self.norm(hidden + self.positions[positions])
        for layer in self.layers:
            hidden = layer(hidden, sizes)
        return hidden

    def _join(self, lists: Sequence[list[int]]) -> Tensor:
        return torch.tensor([number for each in lists for number in each], device=self.device)

    def score(self, first: Tensor) -> Tensor:
        """Return the scores of texts, shape (texts, 1), from the hidden states of their first
        tokens.
        """
        pooled, score = self.head
        return score(HEAD_ACTIVATIONS[self.config.family.head_activation](pooled(first)))

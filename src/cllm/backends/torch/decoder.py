"""A decoder: from tokens and the cells of those before them to hidden states and logits.

The tokens of all sequences of a batch are computed together; only attention looks at each
sequence. One class computes all architectures of ``architecture.FAMILIES``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn import functional

from cllm.backends.torch.architecture import Architecture, Shape
from cllm.backends.torch.attention import Plan, attend
from cllm.backends.torch.cells import Cells
from cllm.backends.torch.weights import Weights

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
    "relu": functional.relu,
}

# what the names of a decoder's tensors begin with: alone, within a model that also sees, and saved
# without its output matrix
ROOTS = ("model.", "language_model.model.", "model.language_model.", "")
HEADS = ("lm_head", "language_model.lm_head")

FEW_ROWS, MANY_ROWS = 4, 64


class Delta(NamedTuple):
    """What an adapter adds to some outputs of a product: ``up @ down`` times the input."""

    outputs: slice
    down: Tensor
    up: Tensor


def multiply(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return ``x @ weight.T + bias``, contiguous.

    On CPUs, the libraries are faster with the weights on the left, unless there are many rows: on a
    core of a Xeon with AMX, 8 rows take 0.65 of the time in float32 and 0.7 in bfloat16, one row in
    bfloat16 0.5, 32 rows 0.8 in both, but 128 rows 1.0 to 1.2.
    """
    count = len(x)
    few = FEW_ROWS if x.dtype == torch.float32 else 1
    if x.device.type != "cpu" or not few <= count <= MANY_ROWS:
        return functional.linear(x, weight, bias)
    if count == 1:
        y = torch.mv(weight, x[0]) if bias is None else torch.addmv(bias, weight, x[0])
        return y.unsqueeze(0)
    y = weight @ x.t() if bias is None else torch.addmm(bias.unsqueeze(1), weight, x.t())
    return y.t().contiguous()


class Linear:
    """A matrix product. Several that have the same input are one."""

    __slots__ = ("bias", "deltas", "outputs", "weight")

    def __init__(
        self, weights: Weights, names: Sequence[str], sizes: Sequence[int], inputs: int
    ) -> None:
        """``names`` are those of the modules whose outputs, of ``sizes``, follow each other."""
        parts = [
            weights.read(f"{name}.weight", (size, inputs))
            for name, size in zip(names, sizes, strict=True)
        ]
        self.weight = torch.cat(parts) if len(parts) > 1 else parts[0]
        self.bias: Tensor | None = None
        if f"{names[0]}.bias" in weights:
            self.bias = torch.cat(
                [
                    weights.read(f"{name}.bias", (size,))
                    for name, size in zip(names, sizes, strict=True)
                ]
            )
        self.outputs: dict[str, slice] = {}  # of each module
        at = 0
        for name, size in zip(names, sizes, strict=True):
            self.outputs[name] = slice(at, at := at + size)
        self.deltas: list[Delta] = []

    def __call__(self, x: Tensor) -> Tensor:
        y = multiply(x, self.weight, self.bias)
        for outputs, down, up in self.deltas:
            y[:, outputs] += functional.linear(functional.linear(x, down), up)
        return y


class Norm:
    """RMS norm or, with ``layer_norm``, one that subtracts the mean."""

    __slots__ = ("bias", "epsilon", "is_layer_norm", "weight")

    def __init__(self, weights: Weights, name: str, size: int, architecture: Architecture) -> None:
        self.weight = weights.read(f"{name}.weight", (size,))
        if architecture.family.norm_offset:
            self.weight = self.weight + architecture.family.norm_offset
        self.bias = weights.read(f"{name}.bias", (size,)) if f"{name}.bias" in weights else None
        self.is_layer_norm = architecture.family.layer_norm
        self.epsilon = architecture.norm_epsilon

    def __call__(self, x: Tensor) -> Tensor:
        size = x.shape[-1:]
        if self.is_layer_norm:
            return functional.layer_norm(x, size, self.weight, self.bias, self.epsilon)
        return functional.rms_norm(x, size, self.weight, self.epsilon)


class Experts:
    """Feed-forward parts of which a router chooses some for each token."""

    def __init__(self, weights: Weights, prefix: str, a: Architecture) -> None:
        names, hidden, inner = a.names, a.hidden_size, a.expert_size
        self.router = Linear(weights, [f"{prefix}.{names['router']}"], [a.num_experts], hidden)
        self.gate_up, self.down = [], []
        for i in range(a.num_experts):
            expert = f"{prefix}.{names['experts']}.{i}"
            both = [f"{expert}.{names[name]}" for name in ("expert_gate", "expert_up")]
            self.gate_up.append(Linear(weights, both, [inner, inner], hidden))
            down = f"{expert}.{names['expert_down']}"
            self.down.append(Linear(weights, [down], [hidden], inner))
        self.count, self.normalizes = a.experts_per_token, a.normalizes_experts
        self.activate = ACTIVATIONS[a.activation]

    def __call__(self, x: Tensor) -> Tensor:
        shares = functional.softmax(self.router(x), dim=-1, dtype=torch.float32)
        shares, chosen = shares.topk(self.count, dim=-1)
        if self.normalizes:
            shares = shares / shares.sum(dim=-1, keepdim=True)
        shares = shares.to(x.dtype)
        out = torch.zeros_like(x)
        for expert in chosen.unique().tolist():
            tokens, places = (chosen == expert).nonzero(as_tuple=True)
            gate, up = self.gate_up[expert](x[tokens]).chunk(2, dim=-1)
            part = self.down[expert](self.activate(gate) * up)
            out.index_add_(0, tokens, part * shares[tokens, places].unsqueeze(-1))
        return out


class FeedForward:
    """Two products with an activation between them, and maybe a gate."""

    def __init__(self, weights: Weights, prefix: str, a: Architecture) -> None:
        name, inner = {key: f"{prefix}.{value}" for key, value in a.names.items()}, a.inner_size
        if f"{name['gate_up']}.weight" in weights:
            self.up = Linear(weights, [name["gate_up"]], [2 * inner], a.hidden_size)
            self.is_gated = True
        else:
            self.is_gated = f"{name['gate']}.weight" in weights
            parts = [name["gate"], name["up"]] if self.is_gated else [name["up"]]
            self.up = Linear(weights, parts, [inner] * len(parts), a.hidden_size)
        self.down = Linear(weights, [name["down"]], [a.hidden_size], inner)
        self.activate = ACTIVATIONS[a.activation]

    def __call__(self, x: Tensor) -> Tensor:
        x = self.up(x)
        if not self.is_gated:
            return self.down(self.activate(x))
        gate, up = x.chunk(2, dim=-1)
        return self.down(self.activate(gate) * up)


class DecoderLayer:
    """The weights of a layer, and what it computes."""

    def __init__(self, weights: Weights, prefix: str, index: int, a: Architecture) -> None:
        name = {key: f"{prefix}.{value}" for key, value in a.names.items()}
        self.architecture, self.kind, self.index = a, a.layers[index], index
        queries, kv = a.num_heads * a.head_size, a.kv_size
        if f"{name['query_key_value']}.weight" in weights:
            parts, sizes = [name["query_key_value"]], [queries + 2 * kv]
        else:
            parts = [name["query"], name["key"], name["value"]]
            sizes = [queries, kv, kv]
        self.qkv = Linear(weights, parts, sizes, a.hidden_size)
        self.attention_out = Linear(weights, [name["attention_out"]], [a.hidden_size], queries)
        self.attention_norm = Norm(weights, name["attention_norm"], a.hidden_size, a)

        def norm(which: str, size: int) -> Norm | None:
            known = which in a.names and f"{name[which]}.weight" in weights
            return Norm(weights, name[which], size, a) if known else None

        self.query_norm, self.key_norm = (
            norm(which, a.head_size) for which in ("query_norm", "key_norm")
        )
        self.attention_post_norm = norm("attention_post_norm", a.hidden_size)
        self.mlp_norm = norm("mlp_norm", a.hidden_size)
        self.mlp_post_norm = norm("mlp_post_norm", a.hidden_size)
        has_experts = a.num_experts and f"{name['router']}.weight" in weights
        self.mlp: FeedForward | Experts = (Experts if has_experts else FeedForward)(
            weights, prefix, a
        )

    def __call__(
        self, hidden: Tensor, angles: Sequence[tuple[Tensor, Tensor]], step: Step, cells: Cells
    ) -> Tensor:
        a = self.architecture
        x = self.attention_norm(hidden)
        attended = self._attend(x, angles, step, cells)
        if self.attention_post_norm:
            attended = self.attention_post_norm(attended)
        if a.family.parallel:
            return hidden + attended + self.mlp(x)
        hidden = (
            hidden + attended * a.residual_scale if a.residual_scale != 1 else hidden + attended
        )
        x = self.mlp(self.mlp_norm(hidden) if self.mlp_norm else hidden)
        if self.mlp_post_norm:
            x = self.mlp_post_norm(x)
        return hidden + x * a.residual_scale if a.residual_scale != 1 else hidden + x

    def _attend(
        self, x: Tensor, angles: Sequence[tuple[Tensor, Tensor]], step: Step, cells: Cells
    ) -> Tensor:
        a, count = self.architecture, x.shape[0]
        qkv = self.qkv(x).view(count, a.num_heads + 2 * a.num_kv_heads, a.head_size)
        query, key, value = qkv.split((a.num_heads, a.num_kv_heads, a.num_kv_heads), dim=1)
        if self.query_norm:
            query = self.query_norm(query)
        if self.key_norm:
            key = self.key_norm(key)
        if self.kind.rope is not None:
            turn = angles[self.kind.rope]
            query, key = rotate(query, *turn), rotate(key, *turn)
        keys, values = cells.keys[self.index], cells.values[self.index]
        keys[:, step.cells], values[:, step.cells] = key.transpose(0, 1), value.transpose(0, 1)
        plan = step.plans[self.kind.window]
        out = attend(plan, query, key, value, (keys, values), a.attention_scale)
        return self.attention_out(out.reshape(count, -1))


class Step(NamedTuple):
    """The rows of a batch: their tokens and positions, the cells that get their keys and values
    (numbers, or a slice), and what they attend to, for each window of the layers.
    """

    tokens: Tensor
    positions: Tensor
    cells: Tensor | slice
    plans: dict[int | None, Plan]


class AnyDecoder(Protocol):
    """What a backend needs of a decoder: the one below, or one of transformers."""

    device: torch.device
    embeddings: Tensor
    layers: list[Any]
    score: Linear | None
    generates: bool

    @property
    def architecture(self) -> Shape: ...

    @property
    def windows(self) -> set[int | None]: ...

    def compute(self, step: Step, cells: Cells) -> Tensor: ...

    def compute_logits(self, hidden: Tensor) -> Tensor: ...


class Decoder:
    """The weights of a model."""

    def __init__(self, weights: Weights, architecture: Architecture) -> None:
        """Raises StartupError if a tensor is missing or does not fit."""
        a = self.architecture = architecture
        self.device, size = weights.device, (a.vocabulary_size, a.hidden_size)
        root = next((root for root in ROOTS if f"{root}embed_tokens.weight" in weights), ROOTS[0])
        self.embeddings = weights.read(f"{root}embed_tokens.weight", size)
        self.layers = [
            DecoderLayer(weights, f"{root}layers.{i}", i, a) for i in range(len(a.layers))
        ]
        self.final_norm = Norm(weights, root + a.names["final_norm"], a.hidden_size, a)
        self.head, self.head_bias = self.embeddings, None
        # a model for embeddings may lack the output matrix, and then it cannot generate
        self.generates = bool(root) if a.ties_embeddings is None else a.ties_embeddings
        for head in HEADS:
            if f"{head}.weight" in weights:
                self.head = weights.read(f"{head}.weight", size)
                self.generates = True
                if f"{head}.bias" in weights:
                    self.head_bias = weights.read(f"{head}.bias", size[:1])
                break
        self.score: Linear | None = None
        if a.ranks:
            self.score, self.generates = Linear(weights, ["score"], [1], a.hidden_size), False
        self._frequencies = [
            (torch.tensor(rope.frequencies, device=self.device), rope.factor) for rope in a.ropes
        ]

    def compute(self, step: Step, cells: Cells) -> Tensor:
        """Return the hidden states of the tokens after the last norm, and fill their cells."""
        hidden = self.embeddings[step.tokens]
        if self.architecture.embedding_scale != 1:
            scale = torch.tensor(self.architecture.embedding_scale, dtype=hidden.dtype)
            hidden = hidden * scale.to(hidden.device)
        angles = [
            make_angles(step.positions, frequencies, factor, hidden.dtype)
            for frequencies, factor in self._frequencies
        ]
        for layer in self.layers:
            hidden = layer(hidden, angles, step, cells)
        return self.final_norm(hidden)

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """Return the logits, shape (tokens, vocabulary_size), float32."""
        a = self.architecture
        logits = multiply(hidden, self.head, self.head_bias).float()
        if a.logits_scale != 1:
            logits *= a.logits_scale
        if a.logits_cap:
            logits = torch.tanh(logits / a.logits_cap) * a.logits_cap
        return logits

    @property
    def windows(self) -> set[int | None]:
        return {layer.window for layer in self.architecture.layers}


def make_angles(
    positions: Tensor, frequencies: Tensor, factor: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Return the cosines and sines of each token's rotation, shape (tokens, 1, rotated sizes). The
    sines of the first half are negative.
    """
    angles = positions.to(torch.float32).unsqueeze(1) * frequencies
    cos, sin = angles.cos() * factor, angles.sin() * factor
    cos, sin = torch.cat((cos, cos), dim=1), torch.cat((-sin, sin), dim=1)
    return cos.to(dtype).unsqueeze(1), sin.to(dtype).unsqueeze(1)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate pairs of dimensions, one from each half of the first dimensions of ``x``."""
    size = cos.shape[-1]
    rest = None
    if size < x.shape[-1]:
        x, rest = x[..., :size], x[..., size:]
    first, second = x.chunk(2, dim=-1)
    turned = torch.addcmul(x * cos, torch.cat((second, first), dim=-1), sin)
    return turned if rest is None else torch.cat((turned, rest), dim=-1)

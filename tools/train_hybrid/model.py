"""The hybrid model, as llama.cpp computes it. Parameters have llama.cpp's names."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
import train as builtin  # type: ignore[import-not-found]
from torch import Tensor, nn

WIDTH, FEED_FORWARD, VOCABULARY = builtin.WIDTH, builtin.FEED_FORWARD, builtin.VOCABULARY
HEADS, KV_HEADS, HEAD, EPSILON = builtin.HEADS, builtin.KV_HEADS, builtin.HEAD, builtin.EPSILON
LAYERS, ATTENTION_INTERVAL = 2 * builtin.LAYERS, 2
DELTA_HEADS, KERNEL, CHUNK = 4, 4, 64


def is_recurrent(layer: int) -> bool:
    return layer < LAYERS and (layer + 1) % ATTENTION_INTERVAL != 0


def is_head(parameter: str) -> bool:
    """Return whether the parameter belongs to what drafts."""
    return parameter.startswith(("nextn.", f"blk.{LAYERS}."))


def linear(inputs: int, outputs: int) -> nn.Linear:
    layer = nn.Linear(inputs, outputs, bias=False)
    nn.init.normal_(layer.weight, std=inputs**-0.5)
    return layer


class DeltaNet(nn.Module):
    """Heads that write keys and values into a matrix, which decays, and read it with queries.

    Yang et al., "Gated Delta Networks", 2024.
    """

    def __init__(self) -> None:
        super().__init__()
        values, mixed = DELTA_HEADS * HEAD, 3 * DELTA_HEADS * HEAD
        self.attn_qkv, self.attn_gate = linear(WIDTH, mixed), linear(WIDTH, values)
        self.ssm_alpha, self.ssm_beta = linear(WIDTH, DELTA_HEADS), linear(WIDTH, DELTA_HEADS)
        self.ssm_out = linear(values, WIDTH)
        self.ssm_conv1d = nn.Parameter(torch.randn(mixed, KERNEL) * KERNEL**-0.5)
        self.ssm_norm = builtin.Norm(HEAD)
        self.log_a = nn.Parameter(torch.empty(DELTA_HEADS).uniform_(1, 16).log())
        step = torch.empty(DELTA_HEADS).uniform_(math.log(1e-3), math.log(0.1)).exp()
        self.ssm_dt = nn.Parameter(step.expm1().log())  # the inverse of softplus

    def forward(self, x: Tensor) -> Tensor:
        rows, length, _ = x.shape
        padded = F.pad(self.attn_qkv(x).mT, (KERNEL - 1, 0))
        mixed = F.conv1d(padded, self.ssm_conv1d[:, None], groups=len(self.ssm_conv1d))
        heads = F.silu(mixed.float()).view(rows, 3, DELTA_HEADS, HEAD, length).mT.unbind(1)
        decay = -self.log_a.exp() * F.softplus(self.ssm_alpha(x).float() + self.ssm_dt)
        beta = self.ssm_beta(x).float().sigmoid()
        with torch.autocast("cpu", enabled=False):  # the sums need F32
            read = delta_rule(
                unit(heads[0]) * HEAD**-0.5, unit(heads[1]), heads[2], decay.mT, beta.mT
            )
        read = self.ssm_norm(read.transpose(1, 2)).reshape(rows, length, -1)
        return self.ssm_out(read * F.silu(self.attn_gate(x)))


def unit(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + EPSILON)


def delta_rule(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor) -> Tensor:
    """Return what the queries read.

    Vectors are (rows, heads, length, HEAD). ``decay``, a logarithm, and ``beta``, the share of the
    old value that is replaced, are (rows, heads, length). The length is computed in chunks: what a
    chunk writes is the solution of a triangular system.
    """
    length = q.shape[2]
    padding = -length % CHUNK
    q, k, v = (F.pad(x, (0, 0, 0, padding)).unflatten(2, (-1, CHUNK)) for x in (q, k, v))
    decay, beta = (F.pad(x, (0, padding)).unflatten(2, (-1, CHUNK)) for x in (decay, beta))
    passed = decay.cumsum(-1)
    between = (passed[..., :, None] - passed[..., None, :]).tril().exp().tril()
    passed, beta = passed[..., None], beta[..., None]
    system = ((beta * k) @ k.mT * between).tril(-1)
    known = torch.cat((beta * v, beta * k * passed.exp()), -1)
    values, old = torch.linalg.solve_triangular(
        system, known, upper=False, unitriangular=True
    ).chunk(2, -1)
    scores, q = (q @ k.mT) * between, q * passed.exp()
    whole = passed[..., -1:, :]
    k, whole = k * (whole - passed).exp(), whole.exp()
    state = torch.zeros(*q.shape[:2], HEAD, HEAD)
    read = []
    for i in range(q.shape[2]):
        written = values[:, :, i] - old[:, :, i] @ state
        read.append(q[:, :, i] @ state + scores[:, :, i] @ written)
        state = state * whole[:, :, i] + k[:, :, i].mT @ written
    return torch.cat(read, 2)[:, :, :length]


class Attention(nn.Module):
    """Grouped attention with normed queries and keys, and a gate for each head's output."""

    def __init__(self) -> None:
        super().__init__()
        self.attn_q = linear(WIDTH, 2 * HEADS * HEAD)
        self.attn_k, self.attn_v = (linear(WIDTH, KV_HEADS * HEAD) for _ in range(2))
        self.attn_output = linear(HEADS * HEAD, WIDTH)
        self.attn_q_norm, self.attn_k_norm = builtin.Norm(HEAD), builtin.Norm(HEAD)

    def forward(self, x: Tensor) -> Tensor:
        rows, length, _ = x.shape
        frequency = builtin.ROPE_BASE ** (-torch.arange(0, HEAD, 2) / HEAD)
        angle = torch.arange(length)[:, None] * frequency
        q, gate = self.attn_q(x).view(rows, length, HEADS, 2 * HEAD).chunk(2, -1)
        k, v = (m(x).view(rows, length, KV_HEADS, HEAD) for m in (self.attn_k, self.attn_v))
        q, k = self.attn_q_norm(q.float()), self.attn_k_norm(k.float())
        q, k = (builtin.rotate(y.transpose(1, 2), angle.cos(), angle.sin()) for y in (q, k))
        read = F.scaled_dot_product_attention(
            q.to(v.dtype), k.to(v.dtype), v.transpose(1, 2), is_causal=True, enable_gqa=True
        )
        return self.attn_output((read.transpose(1, 2) * gate.sigmoid()).reshape(rows, length, -1))


class Block(nn.Module):
    def __init__(self, layer: int) -> None:
        super().__init__()
        self.attn_norm, self.post_attention_norm = builtin.Norm(WIDTH), builtin.Norm(WIDTH)
        self.mixer = DeltaNet() if is_recurrent(layer) else Attention()
        self.ffn_gate, self.ffn_up = (linear(WIDTH, FEED_FORWARD) for _ in range(2))
        self.ffn_down = linear(FEED_FORWARD, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.mixer(self.attn_norm(x))
        h = self.post_attention_norm(x)
        return x + self.ffn_down(F.silu(self.ffn_gate(h)) * self.ffn_up(h))


class NextN(nn.Module):
    """What the drafting layer has in addition to a block."""

    def __init__(self) -> None:
        super().__init__()
        self.eh_proj = linear(2 * WIDTH, WIDTH)
        self.enorm, self.hnorm, self.shared_head_norm = (builtin.Norm(WIDTH) for _ in range(3))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.token_embd = nn.Embedding(VOCABULARY, WIDTH)
        self.blk = nn.ModuleList(Block(layer) for layer in range(LAYERS + 1))
        self.output_norm = builtin.Norm(WIDTH)
        self.nextn = NextN()

    def forward(self, ids: Tensor) -> Tensor:
        """Return the hidden states after the last norm: (rows, length, WIDTH)."""
        x = self.token_embd(ids)
        for block in self.blk[:LAYERS]:
            x = block(x)
        return self.output_norm(x)

    def draft(self, ids: Tensor, hidden: Tensor) -> Tensor:
        """Return the hidden states from which the token after each of ``ids`` is drafted.

        ``hidden`` are those of the positions before: the model's, or, for the second draft, those
        that were returned for the first.
        """
        parts = self.nextn.enorm(self.token_embd(ids)), self.nextn.hnorm(hidden)
        x = self.nextn.eh_proj(torch.cat(parts, -1)).float()
        return self.nextn.shared_head_norm(self.blk[LAYERS](x))

    def logits(self, hidden: Tensor) -> Tensor:
        return (hidden @ self.token_embd.weight.T).float()

    def all_logits(self, ids: Tensor, drafts: int) -> list[Tensor]:
        """Return the logits after each of ``ids``, and those of the drafts, which leave out the
        first tokens: draft ``i`` the first ``i``.
        """
        states = [self(ids)]
        for i in range(1, drafts + 1):
            states.append(self.draft(ids[:, i:], states[-1][:, :-1]))
        return [self.logits(state) for state in states]


def begin_with_builtin(model: Model, weights: dict[str, Tensor]) -> None:
    """Copy the built-in model's layers, with delta nets between them that add little at first. The
    drafting layer begins as a copy of the last layer.
    """
    state = model.state_dict()
    state["token_embd.weight"].copy_(weights["token_embd.weight"])
    for name in ("output_norm", "nextn.shared_head_norm"):
        state[f"{name}.weight"].copy_(weights["output_norm.weight"])
    for layer in range(LAYERS + 1):
        to, of = f"blk.{layer}", f"blk.{min(layer // 2, builtin.LAYERS - 1)}"
        if is_recurrent(layer):
            for name in ("mixer.ssm_out", "ffn_down"):
                state[f"{to}.{name}.weight"].mul_(0.01)
            continue
        state[f"{to}.post_attention_norm.weight"].copy_(weights[f"{of}.ffn_norm.weight"])
        for name in ("attn_norm", "ffn_gate", "ffn_up", "ffn_down"):
            state[f"{to}.{name}.weight"].copy_(weights[f"{of}.{name}.weight"])
        for name in ("attn_k", "attn_v", "attn_q_norm", "attn_k_norm"):
            state[f"{to}.mixer.{name}.weight"].copy_(weights[f"{of}.{name}.weight"])
        queries = state[f"{to}.mixer.attn_q.weight"].view(HEADS, 2, HEAD, WIDTH)
        queries[:, 0].copy_(weights[f"{of}.attn_q.weight"].view(HEADS, HEAD, WIDTH))
        queries[:, 1] = 0  # the gate is half open
        state[f"{to}.mixer.attn_output.weight"].copy_(2 * weights[f"{of}.attn_output.weight"])

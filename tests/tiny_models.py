"""Tiny models with random weights that are not plain attention, or are encoders; their output is
noise.

Their weights are large enough that every token of the past changes the logits.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import gguf
import numpy as np

from cllm.bench.make_model import CONTROL, vocabulary

WIDTH, LAYERS, VOCABULARY, CONTEXT = 64, 4, 512, 512
HEADS, FEED_FORWARD, WINDOW = 4, 128, 32
INFILL = (300, 301, 302)
INNER, STATE, CONV, TIME_STEP = 2 * WIDTH, 8, 4, 8  # of a state-space layer
KV_HEADS = (4, 2, 1, 2)  # of the layers of deci
FEW_KV_HEADS = 2  # of the attention of hybrids and of gpt-oss
GROUPS, DELTA_HEADS, DELTA_STATE = 2, 4, 16  # of recurrent layers with several heads
EXPERTS, USED_EXPERTS, EXPERT_WIDTH = 4, 2, 32
HEAD = "_mtp"  # end of the name of a kind with a draft head
LARGE = 8  # of embeddings that decide what follows, more than the text before
# of compressed keys: numbers in a compressed one, in its positional part, and in a whole one
COMPRESSED, ROTATED, WHOLE = 32, 8, 24

Tensors = Iterator[tuple[str, np.ndarray]]


class Weights:
    def __init__(self) -> None:
        self._random = np.random.default_rng(1)

    def matrix(self, rows: int, columns: int) -> np.ndarray:
        return self._random.normal(0, columns**-0.5, (rows, columns)).astype(np.float32)

    def attention(self, prefix: str) -> Tensors:
        for name in ("attn_q", "attn_k", "attn_v", "attn_output"):
            yield f"{prefix}.{name}.weight", self.matrix(WIDTH, WIDTH)

    def grouped_attention(self, prefix: str, num_kv_heads: int) -> Tensors:
        width = num_kv_heads * WIDTH // HEADS
        for name, rows in (("q", WIDTH), ("k", width), ("v", width), ("output", WIDTH)):
            yield f"{prefix}.attn_{name}.weight", self.matrix(rows, WIDTH)

    def compressed_attention(self, prefix: str) -> Tensors:
        head = WIDTH // HEADS
        yield f"{prefix}.attn_q.weight", self.matrix(HEADS * WHOLE, WIDTH)
        yield f"{prefix}.attn_kv_a_mqa.weight", self.matrix(COMPRESSED + ROTATED, WIDTH)
        yield f"{prefix}.attn_kv_a_norm.weight", np.ones(COMPRESSED, np.float32)
        keys = self.matrix(HEADS * COMPRESSED, WHOLE - ROTATED)
        yield f"{prefix}.attn_k_b.weight", keys.reshape(HEADS, COMPRESSED, -1)
        values = self.matrix(HEADS * head, COMPRESSED)
        yield f"{prefix}.attn_v_b.weight", values.reshape(HEADS, head, -1)
        yield f"{prefix}.attn_output.weight", self.matrix(WIDTH, WIDTH)

    def feed_forward(self, prefix: str) -> Tensors:
        yield f"{prefix}.ffn_norm.weight", np.ones(WIDTH, np.float32)
        yield from self.gated_units(prefix)

    def gated_units(self, prefix: str) -> Tensors:
        yield f"{prefix}.ffn_gate.weight", self.matrix(FEED_FORWARD, WIDTH)
        yield f"{prefix}.ffn_up.weight", self.matrix(FEED_FORWARD, WIDTH)
        yield f"{prefix}.ffn_down.weight", self.matrix(WIDTH, FEED_FORWARD)

    def mamba(self, prefix: str) -> Tensors:
        yield f"{prefix}.ssm_in.weight", self.matrix(2 * INNER, WIDTH)
        yield f"{prefix}.ssm_conv1d.weight", self.matrix(INNER, CONV)
        yield f"{prefix}.ssm_conv1d.bias", np.zeros(INNER, np.float32)
        yield f"{prefix}.ssm_x.weight", self.matrix(TIME_STEP + 2 * STATE, INNER)
        yield f"{prefix}.ssm_dt.weight", self.matrix(INNER, TIME_STEP)
        yield f"{prefix}.ssm_dt.bias", np.zeros(INNER, np.float32)
        # forgets slowly
        yield (
            f"{prefix}.ssm_a",
            -np.tile(np.arange(1, STATE + 1, dtype=np.float32) / 50, (INNER, 1)),
        )
        yield f"{prefix}.ssm_d", np.ones(INNER, np.float32)
        yield f"{prefix}.ssm_out.weight", self.matrix(WIDTH, INNER)

    def short_convolution(self, prefix: str) -> Tensors:
        yield f"{prefix}.shortconv.conv.weight", self.matrix(WIDTH, CONV)
        yield f"{prefix}.shortconv.in_proj.weight", self.matrix(3 * WIDTH, WIDTH)
        yield f"{prefix}.shortconv.out_proj.weight", self.matrix(WIDTH, WIDTH)

    def mamba2(self, prefix: str) -> Tensors:
        mixed = INNER + 2 * GROUPS * STATE
        yield f"{prefix}.ssm_in.weight", self.matrix(INNER + mixed + TIME_STEP, WIDTH)
        yield f"{prefix}.ssm_conv1d.weight", self.matrix(mixed, CONV)
        yield f"{prefix}.ssm_conv1d.bias", np.zeros(mixed, np.float32)
        yield f"{prefix}.ssm_dt.bias", np.zeros(TIME_STEP, np.float32)
        yield f"{prefix}.ssm_a", np.full((TIME_STEP, 1), -0.02, np.float32)  # forgets slowly
        yield f"{prefix}.ssm_d", np.ones((TIME_STEP, 1), np.float32)
        yield f"{prefix}.ssm_norm.weight", np.ones((GROUPS, INNER // GROUPS), np.float32)
        yield f"{prefix}.ssm_out.weight", self.matrix(WIDTH, INNER)

    def delta_net(self, prefix: str) -> Tensors:
        values = DELTA_HEADS * DELTA_STATE
        mixed = values + 2 * GROUPS * DELTA_STATE
        yield f"{prefix}.attn_qkv.weight", self.matrix(mixed, WIDTH)
        yield f"{prefix}.attn_gate.weight", self.matrix(values, WIDTH)
        yield f"{prefix}.ssm_conv1d.weight", self.matrix(mixed, CONV)
        yield f"{prefix}.ssm_dt.bias", np.zeros(DELTA_HEADS, np.float32)
        yield f"{prefix}.ssm_a", np.full(DELTA_HEADS, -0.02, np.float32)  # forgets slowly
        yield f"{prefix}.ssm_beta.weight", self.matrix(DELTA_HEADS, WIDTH)
        yield f"{prefix}.ssm_alpha.weight", self.matrix(DELTA_HEADS, WIDTH)
        yield f"{prefix}.ssm_norm.weight", np.ones(DELTA_STATE, np.float32)
        yield f"{prefix}.ssm_out.weight", self.matrix(WIDTH, values)

    def gated_attention(self, prefix: str) -> Tensors:
        """Yield attention whose query matrix also makes a gate for each head's output."""
        for name, values in self.grouped_attention(prefix, FEW_KV_HEADS):
            yield name, self.matrix(2 * WIDTH, WIDTH) if name.endswith("attn_q.weight") else values
        yield from self.head_norms(prefix)

    def head_norms(self, prefix: str) -> Tensors:
        yield f"{prefix}.attn_q_norm.weight", np.ones(WIDTH // HEADS, np.float32)
        yield f"{prefix}.attn_k_norm.weight", np.ones(WIDTH // HEADS, np.float32)

    def qwen35_layer(self, prefix: str, *, recurrent: bool, experts: bool) -> Tensors:
        yield f"{prefix}.attn_norm.weight", np.ones(WIDTH, np.float32)
        yield f"{prefix}.post_attention_norm.weight", np.ones(WIDTH, np.float32)
        yield from (self.delta_net if recurrent else self.gated_attention)(prefix)
        if not experts:
            yield from self.gated_units(prefix)
            return
        yield f"{prefix}.ffn_gate_inp.weight", self.matrix(EXPERTS, WIDTH)
        yield f"{prefix}.ffn_gate_inp_shexp.weight", self.matrix(1, WIDTH)[0]
        for name, expert in self.expert_units():
            yield f"{prefix}.ffn_{name}_exps.weight", np.stack(expert)
            yield f"{prefix}.ffn_{name}_shexp.weight", expert[0]

    def glm4moe_layer(self, prefix: str) -> Tensors:
        yield f"{prefix}.attn_norm.weight", np.ones(WIDTH, np.float32)
        yield f"{prefix}.post_attention_norm.weight", np.ones(WIDTH, np.float32)
        yield from self.grouped_attention(prefix, FEW_KV_HEADS)
        yield from self.head_norms(prefix)
        yield f"{prefix}.ffn_gate_inp.weight", self.matrix(EXPERTS, WIDTH)
        yield f"{prefix}.exp_probs_b.bias", np.zeros(EXPERTS, np.float32)
        for name, expert in self.expert_units():
            yield f"{prefix}.ffn_{name}_exps.weight", np.stack(expert)
            yield f"{prefix}.ffn_{name}_shexp.weight", expert[0]

    def expert_units(self) -> Iterator[tuple[str, list[np.ndarray]]]:
        """Yield the matrices of all experts by their names."""
        for name in ("gate", "up", "down"):
            rows, columns = (WIDTH, EXPERT_WIDTH) if name == "down" else (EXPERT_WIDTH, WIDTH)
            yield name, [self.matrix(rows, columns) for _ in range(EXPERTS)]

    def draft_head(self, prefix: str, kind: str) -> Tensors:
        """Yield a layer that predicts mostly from the last token, as the model itself does if its
        embeddings are as large.
        """
        if kind.startswith("glm"):
            yield from self.glm4moe_layer(prefix)
        else:
            yield from self.qwen35_layer(prefix, recurrent=False, experts="moe" in kind)
        weights = 4 * self.matrix(WIDTH, 2 * WIDTH)
        weights[:, :WIDTH] += LARGE * np.eye(WIDTH, dtype=np.float32)
        yield f"{prefix}.nextn.eh_proj.weight", weights
        yield f"{prefix}.nextn.enorm.weight", np.ones(WIDTH, np.float32)
        yield f"{prefix}.nextn.hnorm.weight", np.ones(WIDTH, np.float32)

    def nemotron_h_layer(self, prefix: str, layer: int) -> Tensors:
        yield f"{prefix}.attn_norm.weight", np.ones(WIDTH, np.float32)
        if layer % 2 == 0:
            yield from self.mamba2(prefix)
        elif layer == 1:
            yield from self.grouped_attention(prefix, FEW_KV_HEADS)
        else:
            yield f"{prefix}.ffn_up.weight", self.matrix(FEED_FORWARD, WIDTH)
            yield f"{prefix}.ffn_down.weight", self.matrix(WIDTH, FEED_FORWARD)

    def gpt_oss_layer(self, prefix: str) -> Tensors:
        yield f"{prefix}.attn_norm.weight", np.ones(WIDTH, np.float32)
        yield f"{prefix}.post_attention_norm.weight", np.ones(WIDTH, np.float32)
        yield from self.grouped_attention(prefix, FEW_KV_HEADS)
        yield f"{prefix}.attn_output.bias", np.zeros(WIDTH, np.float32)
        yield f"{prefix}.attn_sinks.weight", np.ones(HEADS, np.float32)
        yield f"{prefix}.ffn_gate_inp.weight", self.matrix(EXPERTS, WIDTH)
        yield f"{prefix}.ffn_gate_inp.bias", np.zeros(EXPERTS, np.float32)
        for name, experts in self.expert_units():
            yield f"{prefix}.ffn_{name}_exps.weight", np.stack(experts)
            yield f"{prefix}.ffn_{name}_exps.bias", np.zeros((EXPERTS, len(experts[0])), np.float32)

    def encoder(self, *, ranks: bool) -> Tensors:
        yield "token_embd.weight", self.matrix(VOCABULARY, WIDTH) * math.sqrt(WIDTH)
        yield "token_types.weight", self.matrix(2, WIDTH)
        yield "position_embd.weight", self.matrix(CONTEXT, WIDTH)
        yield from norm("token_embd_norm")
        for layer in range(LAYERS):
            prefix = f"blk.{layer}"
            yield from self.attention(prefix)
            yield from norm(f"{prefix}.attn_output_norm")
            yield f"{prefix}.ffn_up.weight", self.matrix(FEED_FORWARD, WIDTH)
            yield f"{prefix}.ffn_up.bias", np.zeros(FEED_FORWARD, np.float32)
            yield f"{prefix}.ffn_down.weight", self.matrix(WIDTH, FEED_FORWARD)
            yield f"{prefix}.ffn_down.bias", np.zeros(WIDTH, np.float32)
            yield from norm(f"{prefix}.layer_output_norm")
        if ranks:
            yield "cls.output.weight", self.matrix(1, WIDTH)
            yield "cls.output.bias", np.zeros(1, np.float32)

    def of(self, kind: str) -> Tensors:
        if kind in ENCODERS:
            yield from self.encoder(ranks=kind == "reranker")
            return
        has_head = kind.endswith(HEAD)
        size = math.sqrt(WIDTH) * (LARGE if has_head else 1)
        yield "token_embd.weight", self.matrix(VOCABULARY, WIDTH) * size
        yield "output.weight", self.matrix(VOCABULARY, WIDTH)
        yield (
            "token_embd_norm.weight" if kind == "lfm2" else "output_norm.weight",
            np.ones(WIDTH, np.float32),
        )
        for layer in range(LAYERS):
            prefix = f"blk.{layer}"
            if kind.startswith("qwen35"):
                recurrent = layer % 2 == 0
                yield from self.qwen35_layer(prefix, recurrent=recurrent, experts="moe" in kind)
                continue
            if kind == "nemotron_h":
                yield from self.nemotron_h_layer(prefix, layer)
                continue
            if kind.startswith("glm"):
                yield from self.glm4moe_layer(prefix)
                continue
            if kind == "gpt-oss":
                yield from self.gpt_oss_layer(prefix)
                continue
            yield f"{prefix}.attn_norm.weight", np.ones(WIDTH, np.float32)
            if kind == "mamba":
                yield from self.mamba(prefix)
                continue
            if kind == "lfm2" and layer % 2 == 0:
                yield from self.short_convolution(prefix)
            elif kind == "deci":
                yield from self.grouped_attention(prefix, KV_HEADS[layer])
            elif kind == "deepseek2":
                yield from self.compressed_attention(prefix)
            else:
                yield from self.attention(prefix)
                yield from self.head_norms(prefix)
            if kind == "gemma3":
                yield f"{prefix}.post_attention_norm.weight", np.ones(WIDTH, np.float32)
                yield f"{prefix}.post_ffw_norm.weight", np.ones(WIDTH, np.float32)
            yield from self.feed_forward(prefix)
        if has_head:
            yield from self.draft_head(f"blk.{LAYERS}", kind)


def norm(name: str) -> Tensors:
    yield f"{name}.weight", np.ones(WIDTH, np.float32)
    yield f"{name}.bias", np.zeros(WIDTH, np.float32)


def add_state_space(writer: gguf.GGUFWriter, inner: int, state: int, rank: int) -> None:
    writer.add_ssm_conv_kernel(CONV)
    writer.add_ssm_inner_size(inner)
    writer.add_ssm_state_size(state)
    writer.add_ssm_time_step_rank(rank)


ENCODERS = {
    "bert": gguf.PoolingType.MEAN,
    "bert_cls": gguf.PoolingType.CLS,
    "reranker": gguf.PoolingType.RANK,
}


def write_tiny_model(kind: str, path: Path, templates: dict[str, str] | None = None) -> None:
    """Write a model of ``kind``: mamba (recurrent), lfm2, qwen35 and nemotron_h (some of their
    layers are recurrent), qwen35_mtp and qwen35moe_mtp (with a draft head, without and with
    experts), glm4moe_mtp (attention, experts and a draft head), gemma3 (a sliding window), gpt-oss (a sliding window, sinks and experts), deci (layers with
    different numbers of key heads), deepseek2 (compressed keys, no values), or one of ENCODERS.
    ``templates``: for chats, by name; without, it is a base model.
    """
    architecture = "bert" if kind in ENCODERS else kind.removesuffix(HEAD)
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_name(f"tiny {kind}")
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(WIDTH)
    writer.add_block_count(LAYERS + kind.endswith(HEAD))
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_head_count(0 if kind == "mamba" else HEADS)
    if kind == "nemotron_h":
        writer.add_feed_forward_length([0] * (LAYERS - 1) + [FEED_FORWARD])
    else:
        writer.add_feed_forward_length(0 if kind == "mamba" else FEED_FORWARD)
    if kind not in (*ENCODERS, "mamba", "deepseek2"):
        writer.add_key_length(WIDTH // HEADS)
        writer.add_value_length(WIDTH // HEADS)
        writer.add_rope_freq_base(1e4)
    if kind in ENCODERS:
        writer.add_layer_norm_eps(1e-6)
        writer.add_causal_attention(False)
        writer.add_pooling_type(ENCODERS[kind])
        writer.add_token_type_count(2)
    match kind:
        case "mamba":
            add_state_space(writer, INNER, STATE, TIME_STEP)
        case "lfm2":
            writer.add_head_count_kv([HEADS * (layer % 2) for layer in range(LAYERS)])
            writer.add_shortconv_l_cache(CONV)
        case "qwen35" | "qwen35_mtp" | "qwen35moe_mtp":
            writer.add_head_count_kv(FEW_KV_HEADS)
            add_state_space(writer, DELTA_HEADS * DELTA_STATE, DELTA_STATE, DELTA_HEADS)
            writer.add_ssm_group_count(GROUPS)
            writer.add_full_attention_interval(2)
            writer.add_rope_dimension_count(ROTATED)
            writer.add_rope_dimension_sections([2, 1, 1, 0])
            writer.add_nextn_predict_layers(int(kind.endswith(HEAD)))
            writer.add_expert_count(EXPERTS * ("moe" in kind))
            writer.add_expert_used_count(USED_EXPERTS * ("moe" in kind))
            writer.add_expert_feed_forward_length(EXPERT_WIDTH)
            writer.add_expert_shared_feed_forward_length(EXPERT_WIDTH)
        case "glm4moe_mtp":
            writer.add_head_count_kv(FEW_KV_HEADS)
            writer.add_rope_dimension_count(WIDTH // HEADS)
            writer.add_nextn_predict_layers(1)
            writer.add_expert_count(EXPERTS)
            writer.add_expert_used_count(USED_EXPERTS)
            writer.add_expert_feed_forward_length(EXPERT_WIDTH)
            writer.add_expert_shared_count(1)
        case "nemotron_h":
            heads = [FEW_KV_HEADS * (layer == 1) for layer in range(LAYERS)]
            writer.add_head_count_kv(heads)
            add_state_space(writer, INNER, STATE, TIME_STEP)
            writer.add_ssm_group_count(GROUPS)
            writer.add_layer_norm_eps(1e-6)
        case "gemma3":
            writer.add_head_count_kv(HEADS)
            writer.add_sliding_window(WINDOW)
        case "gpt-oss":
            writer.add_head_count_kv(FEW_KV_HEADS)
            writer.add_sliding_window(WINDOW)
            writer.add_rope_dimension_count(WIDTH // HEADS)
            writer.add_expert_count(EXPERTS)
            writer.add_expert_used_count(USED_EXPERTS)
            writer.add_expert_feed_forward_length(EXPERT_WIDTH)
        case "deci":
            writer.add_head_count_kv(KV_HEADS)
        case "deepseek2":
            writer.add_head_count_kv(1)
            writer.add_key_length(COMPRESSED + ROTATED)
            writer.add_value_length(COMPRESSED)
            writer.add_key_length_mla(WHOLE)
            writer.add_value_length_mla(WIDTH // HEADS)
            writer.add_kv_lora_rank(COMPRESSED)
            writer.add_q_lora_rank(0)
            writer.add_rope_dimension_count(ROTATED)
            writer.add_leading_dense_block_count(LAYERS)
            writer.add_expert_feed_forward_length(1)
            writer.add_expert_shared_count(0)

    tokens, merges = vocabulary(VOCABULARY)
    kinds = [gguf.TokenType.NORMAL] * (len(tokens) - len(CONTROL)) + [gguf.TokenType.CONTROL] * len(
        CONTROL
    )
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_merges(merges)
    writer.add_eos_token_id(tokens.index("<|im_end|>"))
    writer.add_add_bos_token(False)
    for i, name in enumerate(("prefix", "suffix", "middle")):  # any tokens will do
        writer.add_uint32(f"tokenizer.ggml.{name}_token_id", INFILL[i])
    if templates:
        named = [{"name": name, "template": text} for name, text in templates.items()]
        writer.add_chat_template(named)
    for name, values in Weights().of(kind):
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()

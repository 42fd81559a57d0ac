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
        yield "token_embd.weight", self.matrix(VOCABULARY, WIDTH) * math.sqrt(WIDTH)
        yield "output.weight", self.matrix(VOCABULARY, WIDTH)
        yield (
            "token_embd_norm.weight" if kind == "lfm2" else "output_norm.weight",
            np.ones(WIDTH, np.float32),
        )
        for layer in range(LAYERS):
            prefix = f"blk.{layer}"
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
                yield f"{prefix}.attn_q_norm.weight", np.ones(WIDTH // HEADS, np.float32)
                yield f"{prefix}.attn_k_norm.weight", np.ones(WIDTH // HEADS, np.float32)
            if kind == "gemma3":
                yield f"{prefix}.post_attention_norm.weight", np.ones(WIDTH, np.float32)
                yield f"{prefix}.post_ffw_norm.weight", np.ones(WIDTH, np.float32)
            yield from self.feed_forward(prefix)


def norm(name: str) -> Tensors:
    yield f"{name}.weight", np.ones(WIDTH, np.float32)
    yield f"{name}.bias", np.zeros(WIDTH, np.float32)


ENCODERS = {
    "bert": gguf.PoolingType.MEAN,
    "bert_cls": gguf.PoolingType.CLS,
    "reranker": gguf.PoolingType.RANK,
}


def write_tiny_model(kind: str, path: Path, templates: dict[str, str] | None = None) -> None:
    """Write a model of ``kind``: mamba (recurrent), lfm2 (half of its layers are recurrent), gemma3
    (a sliding window), deci (layers with different numbers of key heads), deepseek2 (compressed
    keys, no values), or one of ENCODERS. ``templates``: for chats, by name; without, it is a base
    model.
    """
    writer = gguf.GGUFWriter(path, "bert" if kind in ENCODERS else kind)
    writer.add_name(f"tiny {kind}")
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(WIDTH)
    writer.add_block_count(LAYERS)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_feed_forward_length(0 if kind == "mamba" else FEED_FORWARD)
    writer.add_head_count(0 if kind == "mamba" else HEADS)
    if kind in ENCODERS:
        writer.add_layer_norm_eps(1e-6)
        writer.add_causal_attention(False)
        writer.add_pooling_type(ENCODERS[kind])
        writer.add_token_type_count(2)
    elif kind == "mamba":
        writer.add_ssm_conv_kernel(CONV)
        writer.add_ssm_inner_size(INNER)
        writer.add_ssm_state_size(STATE)
        writer.add_ssm_time_step_rank(TIME_STEP)
    elif kind == "deepseek2":
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
    else:
        writer.add_key_length(WIDTH // HEADS)
        writer.add_value_length(WIDTH // HEADS)
        writer.add_rope_freq_base(1e4)
    if kind == "deci":
        writer.add_head_count_kv(KV_HEADS)
    if kind == "lfm2":
        writer.add_head_count_kv([HEADS * (layer % 2) for layer in range(LAYERS)])
        writer.add_shortconv_l_cache(CONV)
    if kind == "gemma3":
        writer.add_head_count_kv(HEADS)
        writer.add_sliding_window(WINDOW)

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

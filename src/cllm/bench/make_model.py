"""Makes a model with the shape of a real one and random weights, to measure speed where nothing can
be downloaded.

Each token costs as much time and memory as with the real model. The output is noise.
"""

from __future__ import annotations

import math
import shutil
import string
import tempfile
from collections.abc import Callable, Iterator, Mapping
from itertools import islice, product
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import numpy.typing as npt

from cllm.backends.llama_cpp.quantize import quantize
from cllm.errors import StartupError
from cllm.models.gguf import format_size

if TYPE_CHECKING:
    import gguf

Progress = Callable[[str, float], None]
"""Called with the name of the stage and its completed share, 0 to 1."""


class DeltaNet(msgspec.Struct, frozen=True):
    """The dimensions of gated delta nets, which replace the attention of a hybrid's layers, except
    each ``attention_interval``-th one. That attention has gates, and positions in ``rotated``
    numbers of a head.
    """

    attention_interval: int
    heads: int
    key_heads: int
    head: int
    kernel: int
    rotated: int

    @property
    def width(self) -> int:
        """All heads' values."""
        return self.heads * self.head

    @property
    def mixed_width(self) -> int:
        """The values, keys and queries, which go through a convolution."""
        return self.width + 2 * self.key_heads * self.head


class Shape(msgspec.Struct, frozen=True):
    """The dimensions of a transformer with grouped-query attention, SwiGLU and tied embeddings.

    With a ``delta_net`` it is a hybrid, and has another layer, which drafts tokens (MTP).
    """

    architecture: str
    tokenizer: str
    layers: int
    width: int
    feed_forward: int
    heads: int
    kv_heads: int
    head: int
    vocabulary: int
    context: int
    rope_base: float
    delta_net: DeltaNet | None = None

    @property
    def num_blocks(self) -> int:
        """The number of layers, with the one that drafts tokens."""
        return self.layers + (self.delta_net is not None)

    def is_recurrent(self, layer: int) -> bool:
        if self.delta_net is None or layer >= self.layers:
            return False
        return (layer + 1) % self.delta_net.attention_interval != 0


SHAPES = {
    "tiny": Shape("qwen3", "qwen2", 2, 256, 512, 4, 2, 64, 2048, 4096, 1e6),
    "smollm2-135m": Shape("llama", "smollm", 30, 576, 1536, 9, 3, 64, 49_152, 8192, 1e5),
    "qwen3-0.6b": Shape("qwen3", "qwen2", 28, 1024, 3072, 16, 8, 128, 151_936, 40_960, 1e6),
    "qwen3-1.7b": Shape("qwen3", "qwen2", 28, 2048, 6144, 16, 8, 128, 151_936, 40_960, 1e6),
    "llama-3.2-1b": Shape("llama", "llama-bpe", 16, 2048, 8192, 32, 8, 64, 128_256, 131_072, 5e5),
    "qwen35-0.8b": Shape(
        *("qwen35", "qwen35", 24, 1024, 3584, 8, 2, 256, 248_320, 262_144, 1e7),
        delta_net=DeltaNet(4, 16, 16, 128, 4, 64),
    ),
}

# The name on the command line -> llama.cpp's file type.
QUANTS = {
    name.lower(): name for name in ("F16", "Q8_0", "Q6_K", "Q5_K_M", "Q4_K_M", "Q4_K_S", "Q4_0")
}

CONTROL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content "
    "}}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
EPSILON = 1e-6
BLOCK = 1 << 23


def make_model(
    shape: str,
    quant: str,
    out: Path,
    *,
    seed: int = 0,
    threads: int | None = None,
    progress: Progress,
) -> None:
    """Write the model ``SHAPES[shape]``, quantized to ``QUANTS[quant]``, to ``out``, completely or
    not at all.

    The same arguments give the same weights. Needs the ``bench`` extra, and space for the model in
    F16 in the folder of ``out``, in addition to the result. Raises StartupError for an unknown
    name, a missing extra or folder, or too little space.
    """
    _check(shape, SHAPES, "shape")
    _check(quant, QUANTS, "quantization")
    if not out.parent.is_dir():
        raise StartupError(f"There is no folder {out.parent}")
    _check_space(SHAPES[shape], out.parent)
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=f".{out.name}.") as folder:
        result = source = Path(folder) / "f16.gguf"
        _write_f16(SHAPES[shape], shape, source, seed, progress)
        if QUANTS[quant] != "F16":
            result = Path(folder) / "quantized.gguf"
            quantize(
                source,
                result,
                QUANTS[quant],
                threads=threads,
                progress=lambda share: progress("quantizing", share),
            )
        result.replace(out)


def tensors(shape: Shape) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield the name and shape (rows, columns) of each tensor. Norms are vectors."""
    yield "token_embd.weight", (shape.vocabulary, shape.width)
    yield "output_norm.weight", (shape.width,)
    for layer in range(shape.num_blocks):
        for name, dims in _layer_tensors(shape, layer):
            yield f"blk.{layer}.{name}", dims


def vocabulary(size: int) -> tuple[list[str], list[str]]:
    """Return the tokens and merges of a byte-level BPE with ``size`` tokens, the control tokens
    last.

    The tokens are all bytes, then all strings of 2, 3, 4 lower-case letters in order, with and
    without a leading space. Each token is merged from the token that is a letter shorter, so every
    token can be reached. English text needs a token for every 3 letters.
    """
    tokens = [_byte_characters()[byte] for byte in range(256)]
    merges = list(islice(_merges(), size - len(tokens) - len(CONTROL)))
    return tokens + [merge.replace(" ", "") for merge in merges] + CONTROL, merges


def _check(name: str, table: Mapping[str, object], what: str) -> None:
    if name not in table:
        raise StartupError(f"Unknown {what} {name!r}; there are {', '.join(table)}")


def _check_space(shape: Shape, folder: Path) -> None:
    needed = 2 * sum(2 * math.prod(dims) for _, dims in tensors(shape))
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise StartupError(
            f"Making this model needs {format_size(needed)} in {folder}, which has "
            f"{format_size(free)} free"
        )


def _layer_tensors(shape: Shape, layer: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield "attn_norm.weight", (shape.width,)
    if shape.delta_net and shape.is_recurrent(layer):
        yield from _delta_net_tensors(shape, shape.delta_net)
    else:
        yield from _attention_tensors(shape)
    norm = "ffn_norm" if shape.delta_net is None else "post_attention_norm"
    yield f"{norm}.weight", (shape.width,)
    yield "ffn_gate.weight", (shape.feed_forward, shape.width)
    yield "ffn_up.weight", (shape.feed_forward, shape.width)
    yield "ffn_down.weight", (shape.width, shape.feed_forward)
    if layer == shape.layers:
        yield "nextn.eh_proj.weight", (shape.width, 2 * shape.width)
        yield "nextn.enorm.weight", (shape.width,)
        yield "nextn.hnorm.weight", (shape.width,)
        yield "nextn.shared_head_norm.weight", (shape.width,)


def _attention_tensors(shape: Shape) -> Iterator[tuple[str, tuple[int, ...]]]:
    queries, keys = shape.heads * shape.head, shape.kv_heads * shape.head
    gates = 0 if shape.delta_net is None else queries
    yield "attn_q.weight", (queries + gates, shape.width)
    yield "attn_k.weight", (keys, shape.width)
    yield "attn_v.weight", (keys, shape.width)
    yield "attn_output.weight", (shape.width, queries)
    if shape.architecture != "llama":
        yield "attn_q_norm.weight", (shape.head,)
        yield "attn_k_norm.weight", (shape.head,)


def _delta_net_tensors(shape: Shape, net: DeltaNet) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield "attn_qkv.weight", (net.mixed_width, shape.width)
    yield "attn_gate.weight", (net.width, shape.width)
    yield "ssm_conv1d.weight", (net.mixed_width, net.kernel)
    yield "ssm_dt.bias", (net.heads,)
    yield "ssm_a", (net.heads,)
    yield "ssm_beta.weight", (net.heads, shape.width)
    yield "ssm_alpha.weight", (net.heads, shape.width)
    yield "ssm_norm.weight", (net.head,)
    yield "ssm_out.weight", (shape.width, net.width)


def _byte_characters() -> dict[int, str]:
    """Return GPT-2's printable character for each byte."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = (byte for byte in range(256) if byte not in printable)
    return {byte: chr(byte) for byte in printable} | {
        byte: chr(256 + i) for i, byte in enumerate(others)
    }


def _merges() -> Iterator[str]:
    space, letters = _byte_characters()[ord(" ")], string.ascii_lowercase
    for length in range(1, 9):
        for start in ("".join(word) for word in product(letters, repeat=length - 1)):
            yield from (f"{space}{start} {letter}" for letter in letters)
        for start in ("".join(word) for word in product(letters, repeat=length)):
            yield from (f"{start} {letter}" for letter in letters)


def _write_f16(shape: Shape, name: str, path: Path, seed: int, progress: Progress) -> None:
    writer = _writer(shape, name, path)
    every = list(tensors(shape))
    for tensor, dims in every:
        kind = _choose_type(tensor, dims)
        writer.add_tensor_info(tensor, dims, kind, math.prod(dims) * kind.itemsize)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    total, done = sum(math.prod(dims) for _, dims in every), 0
    weights = _Weights(seed)
    for tensor, dims in every:
        if len(dims) == 1:  # a state decays if ssm_a is negative
            values = np.full(dims, -1 if tensor.endswith("ssm_a") else 1, np.float32)
            writer.write_tensor_data(values)
        else:
            matrix = weights.matrix(*dims)
            writer.write_tensor_data(matrix.astype(_choose_type(tensor, dims), copy=False))
        done += math.prod(dims)
        progress("writing random weights", done / total)
    writer.close()


def _choose_type(tensor: str, dims: tuple[int, ...]) -> np.dtype[np.floating]:
    """Return float16, or float32 where llama.cpp computes with nothing else."""
    is_small = len(dims) == 1 or "ssm_conv1d" in tensor
    return np.dtype(np.float32 if is_small else np.float16)


class _Weights:
    """Matrices with normally distributed entries of standard deviation 1/sqrt(columns), so that
    activations keep their size.

    Drawing 600 million entries would take half a minute. Instead, each matrix is assembled from
    pieces of one block of eight million numbers, cut at random places. This affects neither the
    model's speed nor its size.
    """

    def __init__(self, seed: int) -> None:
        self.random = np.random.default_rng(seed)
        self.block = self.random.standard_normal(BLOCK, np.float32)
        self.scaled: dict[int, npt.NDArray[np.float16]] = {}

    def matrix(self, rows: int, columns: int) -> npt.NDArray[np.float16]:
        block = self.scaled.get(columns)
        if block is None:
            block = self.scaled[columns] = (self.block * np.float32(columns**-0.5)).astype(
                np.float16
            )
        values = np.empty(rows * columns, np.float16)
        at = 0
        while at < len(values):
            piece = block[self.random.integers(BLOCK) :][: len(values) - at]
            values[at : at + len(piece)] = piece
            at += len(piece)
        return values.reshape(rows, columns)


def _writer(shape: Shape, name: str, path: Path) -> gguf.GGUFWriter:
    """Return a writer that contains all metadata and the vocabulary."""
    try:
        import gguf
    except ImportError:
        raise StartupError(
            "Making a model needs the extra `bench`: pip install 'cllm[bench]'"
        ) from None
    writer = gguf.GGUFWriter(path, shape.architecture)
    writer.add_name(f"{name} with random weights")
    writer.add_context_length(shape.context)
    writer.add_embedding_length(shape.width)
    writer.add_block_count(shape.num_blocks)
    writer.add_feed_forward_length(shape.feed_forward)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.kv_heads)
    writer.add_key_length(shape.head)
    writer.add_value_length(shape.head)
    writer.add_rope_dimension_count(shape.delta_net.rotated if shape.delta_net else shape.head)
    writer.add_rope_freq_base(shape.rope_base)
    if shape.delta_net:
        _add_delta_net(writer, shape.delta_net)
    writer.add_layer_norm_rms_eps(EPSILON)
    writer.add_vocab_size(shape.vocabulary)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_F16)

    tokens, merges = vocabulary(shape.vocabulary)
    normal = len(tokens) - len(CONTROL)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(shape.tokenizer)
    writer.add_token_list(tokens)
    writer.add_token_types(
        [gguf.TokenType.NORMAL] * normal + [gguf.TokenType.CONTROL] * len(CONTROL)
    )
    writer.add_token_merges(merges)
    writer.add_bos_token_id(tokens.index("<|endoftext|>"))
    writer.add_pad_token_id(tokens.index("<|endoftext|>"))
    writer.add_eos_token_id(tokens.index("<|im_end|>"))
    writer.add_add_bos_token(False)
    writer.add_chat_template(CHATML)
    return writer


def _add_delta_net(writer: gguf.GGUFWriter, net: DeltaNet) -> None:
    writer.add_full_attention_interval(net.attention_interval)
    writer.add_ssm_conv_kernel(net.kernel)
    writer.add_ssm_inner_size(net.width)
    writer.add_ssm_state_size(net.head)
    writer.add_ssm_time_step_rank(net.heads)
    writer.add_ssm_group_count(net.key_heads)
    half = net.rotated // 2  # for text, it does not matter how they are divided
    writer.add_rope_dimension_sections([half - 2 * (half // 3), half // 3, half // 3, 0])
    writer.add_nextn_predict_layers(1)

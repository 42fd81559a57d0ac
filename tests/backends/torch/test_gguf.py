"""Models in GGUF files have the same logits in PyTorch as in llama.cpp, and as the checkpoint that
they were converted from.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from conftest import is_right

torch = pytest.importorskip("torch", reason="needs the extra torch: tools/setup.sh --torch")

from cllm import LLM, SamplingParams  # noqa: E402
from cllm.backends.base import Backend  # noqa: E402
from cllm.backends.params import BackendParams  # noqa: E402
from cllm.backends.registry import import_loader, import_options  # noqa: E402
from cllm.bench.backend_comparison import compare_logits  # noqa: E402
from cllm.bench.backend_work import compute_logits, generate  # noqa: E402
from cllm.bench.make_model import CONTROL, vocabulary  # noqa: E402
from cllm.core.batch import Chunk  # noqa: E402
from cllm.errors import StartupError  # noqa: E402

pytestmark = [pytest.mark.torch, pytest.mark.llama]

SIZE, WIDTH, HEADS, KV_HEADS, HEAD, INNER, EXPERTS = 512, 64, 4, 2, 16, 96, 4
LAYERS, CONTEXT = 7, 256
# Because llama.cpp keeps keys and values in 16 bits, and a router may then choose another expert.
# A wrong order of rows, or a scale that is missing, gives more than 0.005.
MEAN_KL = 0.001
TEXT = [(7 * i * i + 3 * i) % 400 for i in range(120)]

PROSE = """The history of the city begins with a small settlement on the river. In 1850 the first
bridge was built, and trade grew quickly. The people of the town worked in factories and on farms,
and many of them had come from other countries to find a better life."""
TIE = 1.0  # two tokens are nearly as probable

Options = dict[str, Any]
LONG = {"rope_factors_long": 1.5, "rope_factors_short": 1.1}
# by name: the architecture, its metadata, and which tensors it has beside those of all
CASES: dict[str, tuple[str, Options, Options]] = {
    "llama": ("llama", {}, {}),
    "llama3": ("llama", {"rope.freq_base": 500_000.0}, {"rope_freqs": 3.0}),
    "biases": ("llama", {}, {"biases": ("q", "k", "v", "output")}),
    "linear": ("llama", {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}, {}),
    "yarn": (
        "llama",
        {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0}
        | {"rope.scaling.original_context_length": 64},
        {},
    ),
    "mixtral": ("llama", {"expert_count": EXPERTS, "expert_used_count": 2}, {}),
    "granite": (
        "granite",
        {"attention.scale": 0.8, "embedding_scale": 3.0}
        | {"residual_scale": 0.5, "logit_scale": 2.0},
        {},
    ),
    "smollm3": ("smollm3", {}, {}),
    "qwen2": ("qwen2", {}, {"biases": ("q", "k", "v")}),
    "qwen3": ("qwen3", {}, {"norms": True}),
    "qwen3moe": (
        "qwen3moe",
        {"expert_count": EXPERTS, "expert_used_count": 2, "expert_feed_forward_length": INNER},
        {"norms": True},
    ),
    "gemma3": (
        "gemma3",
        {"attention.sliding_window": 16, "rope.freq_base": 1e6},
        {"norms": True, "post_norms": True, "tied": True},
    ),
    "phi3": ("phi3", {}, {"fused": True}),
    "longrope": (
        "phi3",
        {"rope.scaling.original_context_length": 64, "rope.scaling.attn_factor": 1.2},
        {"fused": True} | LONG,
    ),
}


def make_tensors(options: Options, num_experts: int) -> Iterator[tuple[str, np.ndarray]]:
    chosen = np.random.default_rng(5)

    def matrix(*shape: int) -> np.ndarray:
        return chosen.normal(0, shape[-1] ** -0.5, shape).astype(np.float32)

    def norm(size: int = WIDTH) -> np.ndarray:
        return chosen.normal(1, 0.3, size).astype(np.float32)

    yield "token_embd", matrix(SIZE, WIDTH) * (1 if options.get("tied") else 8)
    yield "output_norm", norm()
    if not options.get("tied"):
        yield "output", matrix(SIZE, WIDTH)
    for name in ("rope_freqs", "rope_factors_long", "rope_factors_short"):
        if name in options:
            yield name, np.linspace(1, options[name], HEAD // 2, dtype=np.float32)
    for layer in range(LAYERS):
        rows = {"q": HEADS * HEAD, "k": KV_HEADS * HEAD, "v": KV_HEADS * HEAD, "output": WIDTH}
        parts = {name: matrix(size, HEADS * HEAD) for name, size in rows.items()}
        if options.get("fused"):
            parts["qkv"] = np.concatenate([parts.pop(name) for name in "qkv"])
        found = {f"attn_{name}": part for name, part in parts.items()}
        found |= {"attn_norm": norm(), "ffn_norm": norm()}
        found |= {f"attn_{name}.bias": matrix(rows[name]) for name in options.get("biases", ())}
        if options.get("norms"):
            found |= {"attn_q_norm": norm(HEAD), "attn_k_norm": norm(HEAD)}
        if options.get("post_norms"):
            found |= {"post_attention_norm": norm(), "post_ffw_norm": norm()}
        if num_experts:
            found["ffn_gate_inp"] = matrix(num_experts, WIDTH)
            found["ffn_gate_exps"] = matrix(num_experts, INNER, WIDTH)
            found["ffn_up_exps"] = matrix(num_experts, INNER, WIDTH)
            found["ffn_down_exps"] = matrix(num_experts, WIDTH, INNER)
        else:
            found["ffn_down"] = matrix(WIDTH, INNER)
            found["ffn_up"] = matrix(INNER * (2 if options.get("fused") else 1), WIDTH)
            if not options.get("fused"):
                found["ffn_gate"] = matrix(INNER, WIDTH)
        for name, values in found.items():
            yield f"blk.{layer}.{name}", values


def write_model(path: Path, name: str, more: Options | None = None, **writing: Any) -> Path:
    """Write a model with random weights, and ``more`` metadata. Return its file, or the first one."""
    architecture, metadata, options = CASES[name]
    metadata = metadata | (more or {})
    writer = gguf.GGUFWriter(path, architecture, **writing)
    sizes = {
        "context_length": CONTEXT,
        "embedding_length": WIDTH,
        "block_count": LAYERS,
        "feed_forward_length": INNER,
        "attention.head_count": HEADS,
        "attention.head_count_kv": KV_HEADS,
        "attention.key_length": HEAD,
        "attention.value_length": HEAD,
        "rope.dimension_count": HEAD,
        "attention.layer_norm_rms_epsilon": 1e-5,
    }
    for key, value in (sizes | metadata).items():
        add = {int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
        add[type(value)](f"{architecture}.{key}", value)
    tokens, merges = vocabulary(SIZE)
    kinds = [gguf.TokenType.NORMAL] * (SIZE - len(CONTROL))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(tokens)
    writer.add_token_types([*kinds, *[gguf.TokenType.CONTROL] * len(CONTROL)])
    writer.add_token_merges(merges)
    writer.add_eos_token_id(tokens.index("<|im_end|>"))
    writer.add_add_bos_token(False)
    for tensor, values in make_tensors(options, metadata.get("expert_count", 0)):
        writer.add_tensor(tensor if tensor.endswith(".bias") else f"{tensor}.weight", values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path if path.exists() else min(path.parent.glob(f"{path.stem}-00001*"))


Open = Callable[[Path, str], Backend]


@pytest.fixture
def load() -> Iterator[Open]:
    """Return ``load(path, name)``: the model in the backend ``name``, on one core."""
    backends = list[Backend]()
    more: dict[str, Options] = {
        "torch": {"device": "cpu", "dtype": "float32"},
        "llama_cpp": {"n_gpu_layers": 0, "kernels": "off"},
    }

    def open_backend(path: Path, name: str, context_length: int = CONTEXT) -> Backend:
        options = import_options(name).Options(n_threads=1, **more[name]).model_dump()
        params = BackendParams(
            path=str(path),
            context_length=context_length,
            max_num_seqs=16,
            max_num_batched_tokens=64,
            options=options,
        )
        backends.append(import_loader(name).load(params))
        return backends[-1]

    yield open_backend
    for backend in backends:
        backend.close()


@pytest.mark.parametrize("name", CASES)
def test_logits_are_those_of_llama_cpp(load, tmp_path, name) -> None:
    path = write_model(tmp_path / "model.gguf", name)
    ours, theirs = (compute_logits(load(path, backend), TEXT) for backend in ("torch", "llama_cpp"))
    assert compare_logits(theirs, ours).mean_kl < MEAN_KL


def test_split_model_is_read_from_all_files(load, tmp_path) -> None:
    whole = write_model(tmp_path / "whole.gguf", "mixtral")
    first = write_model(tmp_path / "parts.gguf", "mixtral", split_max_tensors=20)
    assert first.name.endswith("-of-00004.gguf")
    logits = [compute_logits(load(path, "torch"), TEXT[:20]) for path in (whole, first)]
    assert np.array_equal(*logits)


@pytest.mark.parametrize(("number", "pooling"), [(1, "mean"), (3, "last")])
def test_embeddings_are_those_of_llama_cpp(load, tmp_path, number, pooling) -> None:
    path = write_model(tmp_path / "model.gguf", "qwen3", {"pooling_type": number})
    vectors = []
    for name in ("torch", "llama_cpp"):
        backend = load(path, name)
        assert backend.info.pooling == pooling
        [vector] = backend.embed([Chunk(TEXT[:40], 0, 40)])
        vectors.append(vector / np.linalg.norm(vector))
    assert vectors[0] @ vectors[1] > 0.999


def test_weights_and_logits_are_those_of_the_checkpoint(
    load, builtin_path, builtin_checkpoint
) -> None:
    """Bit for bit."""
    file, folder = (load(path, "torch") for path in (builtin_path, builtin_checkpoint))
    logits = [compute_logits(backend, TEXT) for backend in (file, folder)]
    assert np.array_equal(*logits)
    assert file.info.model_bytes == folder.info.model_bytes
    assert file.info.end_tokens == folder.info.end_tokens
    assert file.info.fingerprint != folder.info.fingerprint


def test_vocabulary_is_that_of_llama_cpp(load, builtin_path) -> None:
    ours, theirs = (load(builtin_path, name) for name in ("torch", "llama_cpp"))
    assert ours.vocabulary.pieces == theirs.vocabulary.pieces
    assert ours.info.end_tokens == theirs.info.end_tokens == ours.vocabulary.end_tokens


def test_questions_are_answered_as_by_llama_cpp(known_questions) -> None:
    questions = known_questions(6, seed=5)
    with LLM(backend_name="torch", backend_torch_device="cpu", scheduler_max_num_seqs=4) as llm:
        assert llm.info.system.startswith("PyTorch")
        for question in questions:
            done = llm.chat(question.messages, SamplingParams(temperature=0), question.tools)
            assert is_right(done.outputs[0], question)


def test_size_is_estimated_from_the_header(builtin_path, load) -> None:
    info = load(builtin_path, "torch").info
    size = import_loader("torch").measure(BackendParams(path=str(builtin_path)))
    assert size is not None
    assert size.weight_bytes == info.model_bytes
    assert size.kv_bytes_per_token == info.kv_bytes_per_token


def change_name(path: Path, old: bytes, new: bytes) -> None:
    content = path.read_bytes()
    assert old in content
    path.write_bytes(content.replace(old, new))


def test_unknown_architecture_is_rejected(tiny_model) -> None:
    expect_error(
        tiny_model("mamba"), r"does not know the architecture 'mamba' .* only llama, qwen2"
    )


def test_unknown_tensor_is_rejected(tmp_path) -> None:
    path = write_model(tmp_path / "model.gguf", "qwen3")
    change_name(path, b"blk.3.attn_q_norm.weight", b"blk.3.attn_x_norm.weight")
    expect_error(path, r"does not know the tensor blk\.3\.attn_x_norm\.weight of qwen3 models")


def test_unknown_type_is_rejected(tmp_path) -> None:
    path = write_model(tmp_path / "model.gguf", "qwen3")
    name, shape = b"output_norm.weight", (1).to_bytes(4, "little") + WIDTH.to_bytes(8, "little")
    change_name(path, name + shape + bytes(4), name + shape + (26).to_bytes(4, "little"))
    expect_error(
        path, r"the tensor output_norm\.weight is I32, which the torch backend cannot read"
    )


def test_other_sizes_than_the_metadata_says_are_rejected(load, tmp_path) -> None:
    path = write_model(tmp_path / "model.gguf", "qwen3")
    change_name(
        path, b"qwen3.feed_forward_length\x04\0\0\0\x60", b"qwen3.feed_forward_length\x04\0\0\0\x61"
    )
    with pytest.raises(StartupError, match=r"has the shape \[96, 64\], but the settings say \[97"):
        load(path, "torch")


def expect_error(path: Path, pattern: str) -> None:
    with pytest.raises(StartupError, match=pattern) as raised:
        import_loader("torch").measure(BackendParams(path=str(path)))
    assert "\n" not in str(raised.value)


@pytest.mark.real
@pytest.mark.parametrize("name", ["smollm2-135m.gguf", "gemma3-270m.gguf"])
def test_trained_model_continues_a_text_as_in_llama_cpp(load, real_model, name) -> None:
    """llama.cpp also rounds what it multiplies by quantized weights."""
    path = real_model(name)
    theirs, ours = (load(path, backend) for backend in ("llama_cpp", "torch"))
    tokens = ours.vocabulary.tokenize(PROSE, add_special=True, parse_special=False)
    expected = compute_logits(theirs, tokens)
    compared = compare_logits(expected, compute_logits(ours, tokens))
    assert compared.mean_kl < 0.01
    assert compared.same_best > 0.9
    start = tokens[:12]
    [mine], [their_text] = (generate(backend, [start], 8) for backend in (ours, theirs))
    for place, (token, other) in enumerate(zip(mine, their_text, strict=True)):
        if token != other:
            [*_, logits] = compute_logits(theirs, [*start, *mine[:place]])
            assert logits[other] - logits[token] < TIE
            break

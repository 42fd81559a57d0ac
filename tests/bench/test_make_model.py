"""Models with random weights: valid files, with which llama.cpp tokenizes and decodes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from msgspec import structs

from cllm.backends.llama_cpp.quantize import quantize
from cllm.bench.make_model import QUANTS, SHAPES, DeltaNet, make_model, tensors, vocabulary
from cllm.errors import StartupError
from cllm.models.gguf import read_header
from cllm.models.sequence_memory import compute_kv_bytes_per_token

# In a process of its own: a wrong call of libllama ends the process, and its log callback is one
# for all.
LOAD = """
import ctypes, sys
import numpy as np
from cllm.backends.llama_cpp import library
from llama_cpp import llama_cpp as lib

model = lib.llama_model_load_from_file(sys.argv[1].encode(), lib.llama_model_default_params())
vocabulary = lib.llama_model_get_vocab(model)

def tokenize(text, special):
    content, tokens = text.encode(), (lib.llama_token * 1000)()
    return tokens[:lib.llama_tokenize(vocabulary, content, len(content), tokens, 1000, False, special)]

def piece(token):
    buffer = ctypes.create_string_buffer(64)
    length = lib.llama_token_to_piece(vocabulary, token, buffer, 64, 0, True)
    return buffer.raw[:length]

text = "Hello there, 27 brown foxes jumped over\\n\\n the lazy dog: \u00e4 \u6f22\u5b57 \U0001f600"
tokens = tokenize(text, False)
assert b"".join(map(piece, tokens)).decode() == text
assert len(tokens) < len(text)
assert len(tokenize("<|im_start|><|im_end|><|endoftext|>", True)) == 3
assert tokenize("<|im_end|>", True) == [lib.llama_vocab_eos(vocabulary)]

params = lib.llama_context_default_params()
params.n_ctx, params.n_threads, params.n_threads_batch = 256, 1, 1
context = lib.llama_init_from_model(model, params)
ids = (lib.llama_token * len(tokens))(*tokens)
assert lib.llama_decode(context, lib.llama_batch_get_one(ids, len(tokens))) == 0
logits = np.ctypeslib.as_array(lib.llama_get_logits_ith(context, -1), (lib.llama_vocab_n_tokens(vocabulary),))
assert np.isfinite(logits).all()
assert 0.1 < logits.std() < 10
"""


def make(out: Path, quant: str, **options: int) -> list[tuple[str, float]]:
    seen: list[tuple[str, float]] = []
    make_model(
        "tiny", quant, out, progress=lambda stage, share: seen.append((stage, share)), **options
    )
    return seen


@pytest.mark.llama
def test_quantized_model_works(tmp_path: Path) -> None:
    out = tmp_path / "tiny.gguf"
    seen = make(out, "q4_k_m", threads=1)
    assert ("writing random weights", 1.0) in seen
    assert seen[-1] == ("quantizing", 1.0)
    assert [path.name for path in tmp_path.iterdir()] == ["tiny.gguf"]
    header, shape = read_header(out), SHAPES["tiny"]
    assert header.architecture == "qwen3"
    assert {tensor.type for tensor in header.tensors} == {"F32", "Q4_K", "Q6_K"}
    assert header.array_lengths["tokenizer.ggml.tokens"] == shape.vocabulary
    assert compute_kv_bytes_per_token(header) == 2 * 2 * shape.layers * shape.kv_heads * shape.head
    done = subprocess.run(
        [sys.executable, "-c", LOAD, str(out)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.llama
def test_hybrid_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A smaller hybrid than the one that can be chosen."""
    delta_net = DeltaNet(2, 4, 2, 32, 4, 32)
    shape = structs.replace(
        SHAPES["tiny"], architecture="qwen35", tokenizer="qwen35", delta_net=delta_net
    )
    monkeypatch.setitem(SHAPES, "tiny", shape)
    out = tmp_path / "tiny.gguf"
    make(out, "q4_k_m", threads=1)
    assert read_header(out).get_number("nextn_predict_layers") == 1
    done = subprocess.run(
        [sys.executable, "-c", LOAD, str(out)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_same_seed_gives_same_file(tmp_path: Path) -> None:
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        make(tmp_path / name, "f16", seed=seed)
    first, second, third = ((tmp_path / name).read_bytes() for name in "abc")
    assert first == second != third


@pytest.mark.llama
def test_interrupt_leaves_no_files(tmp_path: Path) -> None:
    def interrupt(stage: str, share: float) -> None:
        if stage == "quantizing":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        make_model("tiny", "q8_0", tmp_path / "tiny.gguf", progress=interrupt)
    assert not list(tmp_path.iterdir())


@pytest.mark.llama
def test_llama_cpp_reason_is_reported(tmp_path: Path) -> None:
    (tmp_path / "source.gguf").write_bytes(b"nonsense")
    with pytest.raises(StartupError, match=r"could not quantize to Q8_0: .*failed to quantize"):
        quantize(
            tmp_path / "source.gguf",
            tmp_path / "target.gguf",
            "Q8_0",
            threads=1,
            progress=lambda share: None,
        )


@pytest.mark.parametrize(
    ("shape", "quant", "folder", "words"),
    [
        ("huge", "q8_0", ".", "Unknown shape 'huge'; there are tiny, smollm2-135m, qwen3-0.6b"),
        ("tiny", "q9", ".", "Unknown quantization 'q9'; there are f16, q8_0"),
        ("tiny", "q8_0", "none", "There is no folder"),
    ],
)
def test_invalid_arguments_raise(
    tmp_path: Path, shape: str, quant: str, folder: str, words: str
) -> None:
    with pytest.raises(StartupError) as caught:
        make_model(shape, quant, tmp_path / folder / "m.gguf", progress=lambda stage, share: None)
    assert words in str(caught.value)


def test_missing_bench_extra_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(StartupError, match="needs the extra `bench`"):
        make(tmp_path / "m.gguf", "q8_0")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", SHAPES)
def test_vocabulary_is_valid(name: str) -> None:
    size = SHAPES[name].vocabulary
    tokens, merges = vocabulary(size)
    assert len(tokens) == len(set(tokens)) == size
    known = set(tokens)
    assert all(part in known for merge in merges for part in merge.split(" "))
    assert all(len(merge.split(" ")) == 2 for merge in merges)


def test_shapes_have_sizes_of_real_models() -> None:
    """The numbers of parameters are those that the publishers state."""
    counts = {
        name: sum(int.__mul__(*(*dims, 1)[:2]) for _, dims in tensors(shape))
        for name, shape in SHAPES.items()
    }
    assert round(counts["qwen3-0.6b"] / 1e6) == 596
    assert round(counts["qwen3-1.7b"] / 1e6) == 1721
    assert round(counts["llama-3.2-1b"] / 1e6) == 1236
    assert round(counts["qwen35-0.8b"] / 1e6) == 773  # 20 in the layer that drafts tokens


def test_quants_are_known_to_llama_cpp() -> None:
    assert {"q4_k_m", "q4_0", "q8_0", "f16"} <= set(QUANTS)

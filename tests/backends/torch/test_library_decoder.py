"""Architectures that transformers computes; test_decoder.py compares their logits."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from checkpoints import pack_tensors, write_tokenizer

from cllm import LLM, SamplingParams
from cllm.backends.params import BackendParams
from cllm.backends.torch.loader import load
from cllm.errors import StartupError
from cllm.models.checkpoint import read_tensors

torch = pytest.importorskip("torch", reason="needs the extra torch: tools/setup.sh --torch")
transformers = pytest.importorskip("transformers", reason="it computes the models")
pytestmark = [pytest.mark.torch, pytest.mark.slow]

SIZES = {
    "vocab_size": 1024,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
PROMPTS = ["The red fox runs over the", "The red fox runs under the", "What is 2 + 3?"]


def write_model(folder: Path, builtin: Path, name: str) -> Any:
    """Write a small model with random weights and the built-in model's vocabulary; return it."""
    torch.manual_seed(4)
    config = getattr(transformers, f"{name}Config")(**SIZES)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    for weights in model.parameters():
        weights.data += torch.randn_like(weights) * 0.1
    model.save_pretrained(folder)
    write_tokenizer(folder, builtin)
    return model.eval()


def refuse(folder: Path) -> str:
    """Return the line with which a checkpoint is refused."""
    with pytest.raises(StartupError) as caught:
        load(BackendParams(path=str(folder), max_num_seqs=2))
    line = str(caught.value)
    assert "\n" not in line
    return line


def test_texts_and_vectors_are_those_of_transformers(builtin_path, tmp_path) -> None:
    """Several sequences at a time, which share a prefix and draft tokens."""
    model = write_model(tmp_path, builtin_path, "Olmo2")
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    options: dict[str, Any] = {"backend_torch_dtype": "float32", "backend_torch_n_threads": 1}
    with LLM(str(tmp_path), model_max_context_length=256, **options) as llm:
        prompts = [llm.encode(prompt) for prompt in PROMPTS]
        texts = [done.outputs[0].tokens for done in llm.generate(prompts, params)]
        vectors = llm.embed(PROMPTS)
    with torch.inference_mode():
        for prompt, text, vector in zip(prompts, texts, vectors, strict=True):
            logits = model(torch.tensor([prompt + text])).logits[0, len(prompt) - 1 : -1]
            chosen = logits.gather(1, torch.tensor(text).unsqueeze(1))[:, 0]
            assert (logits.max(-1).values - chosen).max() < 1e-4 * logits.abs().max()
            hidden = model.model(torch.tensor([prompt])).last_hidden_state[0]
            mean = hidden.mean(0) / hidden.mean(0).norm()
            assert np.abs(vector - mean.numpy()).max() < 1e-5


@pytest.mark.parametrize(
    ("name", "reason"),
    [("Qwen3Next", "not every layer has attention"), ("Gemma2", "attention needs softcap")],
)
def test_model_that_cells_cannot_hold_is_refused(builtin_path, tmp_path, name, reason) -> None:
    write_model(tmp_path, builtin_path, name)
    assert reason in refuse(tmp_path)


def test_model_that_computes_something_else_in_parts_is_refused(
    builtin_path, tmp_path, monkeypatch
) -> None:
    from cllm.backends.torch import library_decoder

    write_model(tmp_path, builtin_path, "Olmo2")
    attend = library_decoder.attend
    monkeypatch.setattr(library_decoder, "attend", lambda *given: attend(*given) * 1.1)
    assert "cannot serve olmo2, which computes something else" in refuse(tmp_path)


@pytest.mark.parametrize(
    ("kinds", "window", "chunk", "called", "reason"),
    [
        (["full_attention", "sliding_attention"], 4096, None, [None, 4096], None),
        (None, None, None, [None, None], None),
        (None, 4096, None, [4096, 4096], None),
        (None, 8192, None, [None, None], None),  # as long as all texts
        (None, 4096, None, [None, None], "window of its own"),
        (["full_attention", "sliding_attention"], 4096, None, [None, None], "sliding_attention"),
        (["full_attention", "chunked_attention"], None, None, [None, None], "chunked_attention"),
        (None, None, 8192, [None, None], "divided into chunks"),
    ],
)
def test_windows_longer_than_the_compared_texts_are_checked(
    kinds, window, chunk, called, reason
) -> None:
    from cllm.backends.torch.library_decoder import check_windows

    config = SimpleNamespace(
        layer_types=kinds,
        sliding_window=window,
        attention_chunk_size=chunk,
        max_position_embeddings=8192,
    )
    with nullcontext() if reason is None else pytest.raises(ValueError, match=reason):
        check_windows(config, called)


def test_missing_tensor_is_named(builtin_path, tmp_path) -> None:
    """transformers would take random numbers."""
    write_model(tmp_path, builtin_path, "Olmo2")
    file = tmp_path / "model.safetensors"
    data, stored = file.read_bytes(), read_tensors(file)
    name = "model.layers.1.mlp.up_proj.weight"
    del stored[name]
    parts = {n: (t.dtype, [*t.shape], data[t.begin : t.end]) for n, t in stored.items()}
    file.write_bytes(pack_tensors(parts))
    assert f"the checkpoint has no tensor {name}" in refuse(tmp_path)


def test_without_transformers_the_architecture_is_unknown(
    builtin_path, tmp_path, monkeypatch
) -> None:
    write_model(tmp_path, builtin_path, "Olmo2")
    monkeypatch.setattr("cllm.backends.torch.architecture.find_spec", lambda _: None)
    assert "does not know the architecture 'olmo2'" in refuse(tmp_path)

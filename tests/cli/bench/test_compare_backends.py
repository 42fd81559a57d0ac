"""``cllm bench compare-backends`` compares what backends compute, and how fast they are."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from cllm.bench.backend_comparison import (
    LogitsComparison,
    Plan,
    choose_files,
    compare,
    compare_logits,
    count_equal,
)
from cllm.errors import StartupError

SMALL = {"sequences": (1, 2), "rounds": 2, "prompt_tokens": 8, "max_tokens": 4}


def compare_quietly(*models: tuple[str, Path]):
    return compare(Plan(list(models), **SMALL), lambda _share, _stage: None)


def test_logits_are_compared() -> None:
    """Unused ids at the end of one vocabulary do not count."""
    logits = np.array([[0.0, 1.0, 2.0], [3.0, 4.0, -8.0]], np.float32)
    assert compare_logits(logits, logits) == LogitsComparison(0.0, 0.0, 1.0)
    other = np.array([[2.0, 1.0, 0.0, 9.0], [3.0, 4.0, -8.0, 9.0]], np.float32)
    compared = compare_logits(logits, other)
    assert (compared.max_difference, compared.same_best) == (0.25, 0.5)
    shares = np.exp([0.0, 1.0, 2.0]) / np.exp([0.0, 1.0, 2.0]).sum()
    assert compared.mean_kl == pytest.approx((shares * [-2, 0, 2]).sum() / 2)


def test_common_beginning_is_counted() -> None:
    assert count_equal([1, 2, 3], [1, 2, 4]) == (2, 3)
    assert count_equal([1, 2], [1, 2, 4]) == (2, 3)
    assert count_equal([], []) == (0, 0)


def test_each_backend_gets_a_model_that_it_reads(tmp_path) -> None:
    folder, file, both = tmp_path, tmp_path / "model.gguf", ("torch", "llama_cpp")
    assert choose_files(both, [file, folder]) == [("torch", folder), ("llama_cpp", file)]
    assert choose_files(both, [file]) == [("torch", file), ("llama_cpp", file)]
    with pytest.raises(
        StartupError, match=r"llama_cpp cannot read .* name a GGUF file of the same"
    ):
        choose_files(both, [folder])


@pytest.mark.torch
@pytest.mark.llama
@pytest.mark.slow
def test_checkpoint_and_its_file_are_equal(builtin_checkpoint, builtin_path) -> None:
    """Their processes have ended afterwards."""
    first, same = compare_quietly(("torch", builtin_checkpoint), ("torch", builtin_path))
    assert (first.logits, first.equal_tokens) == (None, None)
    assert same.logits == LogitsComparison(0.0, 0.0, 1.0)
    assert same.equal_tokens is not None
    assert all(equal == length > 0 for equal, length in same.equal_tokens)
    assert min(first.memory_bytes, first.load_seconds, same.memory_bytes) > 0
    for result in (first, same):
        for speeds in (result.prefill, result.decode):
            assert [len(found) for found in speeds.values()] == [2, 2]
            assert min(map(min, speeds.values())) > 0


@pytest.mark.torch
@pytest.mark.llama
@pytest.mark.slow
def test_command_prints_a_table_or_json(cllm, builtin_path) -> None:
    options = ["--rounds", "1", "--prompt-tokens", "4", "--max-tokens", "2", "--sequences", "2"]
    code, out, _ = cllm("bench", "compare-backends", builtin_path, *options)
    assert code == 0
    assert all(part in out for part in ("torch", "llama_cpp", "decode, 2 sequences", "mean KL"))
    only = ("--backend", "llama_cpp", "--json")
    code, out, _ = cllm("bench", "compare-backends", *options, *only)
    assert code == 0
    [result] = json.loads(out)
    assert (result["backend"], list(result["decode"])) == ("llama_cpp", ["2"])


@pytest.mark.torch
@pytest.mark.llama
@pytest.mark.slow
def test_other_vocabulary_and_unreadable_models_are_rejected(
    builtin_checkpoint, builtin_path, tiny_model, tmp_path
) -> None:
    with pytest.raises(StartupError, match=r"divide texts into different tokens"):
        compare_quietly(("torch", builtin_path), ("llama_cpp", tiny_model("gemma3")))
    damaged = shutil.copytree(builtin_checkpoint, tmp_path / "damaged")
    (damaged / "config.json").write_text("{}")
    with pytest.raises(StartupError, match=r"^torch: .* does not know the architecture"):
        compare_quietly(("torch", damaged))

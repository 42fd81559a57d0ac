"""LoRA adapters of a model."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from cllm.backends.llama_cpp.backend import LlamaCppBackend
from cllm.backends.llama_cpp.options import Options
from cllm.backends.params import BackendParams
from cllm.bench.make_adapter import write_adapter
from cllm.core.batch import Batch, Row, Trim
from cllm.core.params import SamplingParams
from cllm.core.request import Adapters, Request
from cllm.core.sequence import Sequence
from cllm.errors import EngineError, StartupError
from cllm.models.gguf import read_header
from cllm.models.sequence_memory import compute_kv_bytes_per_token

pytestmark = pytest.mark.llama

TOKENS = [5, 9, 33, 7, 20, 21, 40, 3]


def load(path: Path, adapters: dict[str, str]) -> LlamaCppBackend:
    per_token = compute_kv_bytes_per_token(read_header(path), "f16") or 0
    params = BackendParams(
        path=str(path),
        context_length=256,
        max_num_seqs=2,
        kv_bytes_per_token=per_token,
        options=Options(n_threads=1).model_dump(),
        adapters=adapters,
    )
    return LlamaCppBackend(params)


@pytest.fixture(scope="module")
def files(builtin_path: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("adapters")
    return {
        name: str(write_adapter(folder / f"{name}.gguf", builtin_path, seed=seed))
        for seed, name in enumerate(("one", "two"))
    }


@pytest.fixture(scope="module")
def backend(builtin_path: Path, files: dict[str, str]):
    made = load(builtin_path, files)
    yield made
    made.close()


def logits(backend: LlamaCppBackend, adapters: Adapters = ()) -> np.ndarray:
    seq = Sequence(Request("A", TOKENS, SamplingParams(), adapters=adapters), 0, 0, 256)
    seq.seq_id = 0
    batch = Batch([Row(seq, 0, len(TOKENS), 1)], [Trim(0, 0)], adapters)
    return np.array(backend.forward(batch)[0])


def test_adapters_change_what_is_computed_and_leave_no_trace(backend) -> None:
    """Changing back gives the same bits as before."""
    plain, one, two = logits(backend), logits(backend, (("one", 1.0),)), None
    two = logits(backend, (("two", 1.0),))
    spread = plain.std()
    for first, second in ((plain, one), (plain, two), (one, two)):
        assert np.abs(first - second).max() > 0.1 * spread
    assert np.array_equal(logits(backend), plain)
    assert np.array_equal(logits(backend, (("one", 1.0),)), one)


def test_scale_and_combination(backend) -> None:
    plain, one = logits(backend), logits(backend, (("one", 1.0),))
    assert np.abs(logits(backend, (("one", 0.0),)) - plain).max() < 0.01 * plain.std()
    half, both = logits(backend, (("one", 0.5),)), logits(backend, (("one", 1.0), ("two", 1.0)))
    assert not np.allclose(half, one)
    assert not np.allclose(both, one)


def test_context_that_is_opened_again_has_no_adapters(builtin_path, files) -> None:
    backend = load(builtin_path, files)
    plain, one = logits(backend), logits(backend, (("one", 1.0),))
    backend.reopen(backend._params)
    assert np.array_equal(logits(backend), plain)
    assert np.array_equal(logits(backend, (("one", 1.0),)), one)
    backend.close()


def test_unknown_adapter_is_an_error(backend) -> None:
    plain = logits(backend)
    with pytest.raises(EngineError, match="there is no adapter three"):
        logits(backend, (("three", 1.0),))
    assert np.array_equal(logits(backend), plain)


def test_files_that_are_no_adapters_of_the_model_are_refused(
    builtin_path, tiny_model, tmp_path
) -> None:
    other = tiny_model("gemma3")
    wrong = write_adapter(tmp_path / "wrong.gguf", other)
    damaged = tmp_path / "damaged.gguf"
    damaged.write_bytes(b"GGUF" + b"\xff" * 64)
    for path in (wrong, damaged, builtin_path, tmp_path / "missing.gguf"):
        with pytest.raises(StartupError, match="the adapter x"):
            load(builtin_path, {"x": str(path)})


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_adapter_with_numbers_that_are_not_finite_is_refused(
    builtin_path, tmp_path, value: float
) -> None:
    """Also when it is loaded while the model runs. The error names the tensor."""
    path = write_adapter(tmp_path / "x.gguf", builtin_path)
    header = read_header(path)
    tensor = header.tensors[-1]
    data = np.memmap(path, np.float32, "r+", offset=0)
    data[(header.data_offset + tensor.offset) // 4 + 1] = value
    data.flush()
    words = f"the adapter x .*the tensor {tensor.name} has numbers that are not finite"
    with pytest.raises(StartupError, match=words):
        load(builtin_path, {"x": str(path)})


def test_adapter_with_impossible_alpha_or_too_little_data_is_refused(
    backend, builtin_path, tmp_path
) -> None:
    path = write_adapter(tmp_path / "x.gguf", builtin_path)
    content = path.read_bytes()
    key = b"adapter.lora.alpha"
    at = content.index(key) + len(key) + 4
    nan = np.float32(np.nan).tobytes()
    for changed, words in (
        (content[:at] + nan + content[at + 4 :], "adapter.lora.alpha is nan"),
        (content[:-100], "the download is incomplete"),
    ):
        path.write_bytes(changed)
        with pytest.raises(StartupError, match=words):
            backend._adapters.load("x", str(path))

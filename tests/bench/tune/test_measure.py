"""The child process that measures, and what is reported when it crashes."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import msgspec
import pytest

from cllm.backends.llama_cpp.options import Options
from cllm.bench.tune.measure import Bench, CandidateError, Measure, SpeedWork, fit_job
from cllm.engine.params import EngineParams

pytestmark = [pytest.mark.llama, pytest.mark.slow]

WORK = SpeedWork(2, 16, 2)


@pytest.fixture
def params(builtin_path: Path) -> EngineParams:
    return EngineParams(path=str(builtin_path), options=Options(n_threads=1).model_dump())


def test_one_child_measures_many_candidates(params: EngineParams, tmp_path: Path) -> None:
    """Each job has its own context. The same model has zero divergence; 4-bit cells do not."""
    tokens = [40 + i % 50 for i in range(540)]  # more than a window
    with Bench() as bench:
        for change in (
            {},
            {"layout": "unified"},
            {"kv_type": "q8_0"},
            {"options": Options(n_threads=1, n_threads_batch=2, n_ubatch=64).model_dump()},
        ):
            speeds = bench.measure(msgspec.structs.replace(params, **change), WORK)
            assert min(speeds.prompt, speeds.decode) > 0
        child = bench._child
        bench.write_logits(params, tokens, tmp_path / "logits")
        same = bench.quality(params, tokens, tmp_path / "logits")
        other = bench.quality(
            msgspec.structs.replace(params, kv_type="q4_0"), tokens, tmp_path / "logits"
        )
        assert bench._child is child
    assert (same.kl, same.top1, same.num_tokens) == (pytest.approx(0, abs=1e-9), 1.0, 540)
    assert other.kl > 1e-4
    assert child.poll() is not None


def test_all_candidates_are_measured_without_speculation(params: EngineParams) -> None:
    """Only the first one loads the model, so only it could have past states and a draft head."""
    assert params.speculation == "auto"
    assert fit_job(Measure(params, WORK)).speculation == "off"


def test_crashed_child_is_reported_and_replaced(
    params: EngineParams, tiny_model, tmp_path: Path
) -> None:
    (tmp_path / "bad.gguf").write_bytes(b"GGUF and nothing")
    windowed = msgspec.structs.replace(params, path=str(tiny_model("gemma3")), layout="unified")
    with Bench() as bench:
        for wrong, words in (
            (msgspec.structs.replace(params, path=str(tmp_path / "bad.gguf")), "cannot load"),
            (windowed, "this model has no unified KV cache"),
            (
                msgspec.structs.replace(params, path=str(tiny_model("gemma3")), kv_type="q8_0"),
                "n_embd_head_k=16",
            ),
        ):
            with pytest.raises(CandidateError, match=words) as caught:
                bench.measure(wrong, WORK)
            assert "\n" not in str(caught.value)
        bench.measure(params, WORK)
        os.kill(bench._child.pid, signal.SIGSEGV)
        with pytest.raises(CandidateError, match="it died of SIGSEGV"):
            bench.measure(params, WORK)
        bench.measure(params, WORK)


def test_hanging_child_is_stopped(params: EngineParams, monkeypatch: pytest.MonkeyPatch) -> None:
    with Bench() as bench:
        bench.measure(params, WORK)
        monkeypatch.setattr("cllm.bench.tune.measure.TIMEOUT", 0.2)
        monkeypatch.setattr("cllm.bench.tune.measure.TIMES_LONGEST", 0.0)
        os.kill(bench._child.pid, signal.SIGSTOP)
        with pytest.raises(CandidateError, match="it did not end within 0 s"):
            bench.measure(params, WORK)

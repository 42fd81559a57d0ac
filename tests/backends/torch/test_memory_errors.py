"""What becomes of a step for which PyTorch has too little memory."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest

from cllm import LLM, Output, SamplingParams
from cllm.errors import EngineError
from cllm.scheduler.report import collect_stats

torch = pytest.importorskip("torch", reason="needs the extra torch: tools/setup.sh --torch")
pytestmark = pytest.mark.torch

POISON = 900
PROMPTS = [[20 + i, 30, 40, 50 + i] for i in range(4)]
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logit_bias={POISON: -100.0})


def exhaust_cpu() -> None:
    torch.empty(1 << 60)


def exhaust_gpu() -> None:
    raise torch.OutOfMemoryError("CUDA out of memory")


@pytest.mark.parametrize("exhaust", [exhaust_cpu, exhaust_gpu])
def test_only_the_sequence_that_causes_it_ends(
    builtin_checkpoint, monkeypatch, caplog, exhaust: Callable[[], None]
):
    """The others continue, and the cells of all are free afterwards."""
    sizes = {"model_max_context_length": 256, "scheduler_max_num_seqs": 8}
    with LLM(str(builtin_checkpoint), **sizes) as llm:
        expected = [done.outputs[0].tokens for done in llm.generate(PROMPTS, GREEDY)]
        backend: Any = llm._backend
        decoder = backend._decoder
        compute = decoder.compute

        def compute_or_fail(step, cells):
            if POISON in step.tokens:
                exhaust()
            return compute(step, cells)

        monkeypatch.setattr(decoder, "compute", compute_or_fail)
        running, outputs = llm.stream(PROMPTS, GREEDY), [Output() for _ in PROMPTS]
        first = next(running)
        with pytest.raises(EngineError):
            llm.generate([[5, 6, POISON]], GREEDY)
        for piece in itertools.chain([first], running):
            outputs[piece.prompt].add(piece)
        assert [output.tokens for output in outputs] == expected
        assert "PyTorch failed: " in caplog.text
        assert "Traceback" not in caplog.text
        backend._cells.check()
        assert [done.outputs[0].tokens for done in llm.generate(PROMPTS, GREEDY)] == expected
        assert collect_stats(llm._engine.scheduler).num_seq_ids_in_use == 0

"""A hybrid with quantized weights computes several sequences together as it computes each alone."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from msgspec import structs

from cllm.backends.llama_cpp.backend import LlamaCppBackend
from cllm.backends.llama_cpp.options import Options
from cllm.backends.params import BackendParams
from cllm.bench.make_model import SHAPES, DeltaNet, make_model
from cllm.core.batch import Batch, Row, Trim
from cllm.core.params import SamplingParams
from cllm.core.request import Request
from cllm.core.sequence import Sequence

pytestmark = pytest.mark.llama
NUM_SEQS = 8
TOLERANCE = 0.1  # of the standard deviation of the logits


@pytest.mark.parametrize("quant", ["q8_0", "q4_0"])
def test_sequences_together_have_the_logits_of_each_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quant: str
) -> None:
    """llama.cpp's products with AMX are wrong for all sequences but the first."""
    delta_net = DeltaNet(2, 4, 2, 64, 4, 32)
    shape = structs.replace(
        SHAPES["tiny"], architecture="qwen35", tokenizer="qwen35", delta_net=delta_net
    )
    monkeypatch.setitem(SHAPES, "tiny", shape)
    path = tmp_path / "hybrid.gguf"
    make_model("tiny", quant, path, threads=1, progress=lambda *_: None)
    backend = LlamaCppBackend(
        BackendParams(
            path=str(path),
            context_length=256,
            max_num_seqs=NUM_SEQS,
            options=Options(n_threads=1).model_dump(),
        )
    )
    seqs = [Sequence(Request("A", [0], SamplingParams()), 0, 0, 256) for _ in range(NUM_SEQS)]
    for i, seq in enumerate(seqs):
        seq.tokens = [(37 * j + 101 * i) % 1500 for j in range(5)]
    alone = []
    for seq in seqs:
        seq.seq_id = 0
        alone.append(np.array(backend.forward(Batch([Row(seq, 0, 5, 1)], [Trim(0, 0)]))[0]))
    for i, seq in enumerate(seqs):
        seq.seq_id = i
    backend.forward(Batch([Row(seq, 0, 4, 0) for seq in seqs], [Trim(0, 0)]))
    together = np.array(backend.forward(Batch([Row(seq, 4, 1, 1) for seq in seqs], [])))
    backend.close()
    assert np.abs(together - np.array(alone)).max() < TOLERANCE * np.std(alone)

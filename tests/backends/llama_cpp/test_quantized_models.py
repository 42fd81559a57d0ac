"""Models with quantized weights compute several sequences together as they compute each alone."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import tiny_models

from cllm.backends.llama_cpp.backend import LlamaCppBackend
from cllm.backends.llama_cpp.options import Options
from cllm.backends.llama_cpp.quantize import quantize
from cllm.backends.params import BackendParams
from cllm.core.batch import Batch, Row, Trim
from cllm.core.params import SamplingParams
from cllm.core.request import Request
from cllm.core.sequence import Sequence

pytestmark = pytest.mark.llama
NUM_SEQS, PROMPT = 20, 5
TOLERANCE = 0.1  # of the standard deviation of the logits
# Multiples of 256, so that all types of weights are used.
SIZES = {"WIDTH": 256, "INNER": 512, "FEED_FORWARD": 512, "DELTA_STATE": 64}
COMPRESSED_KEYS = {"COMPRESSED": 64, "ROTATED": 32, "WHOLE": 96}


@pytest.mark.parametrize("quant", ["Q8_0", "Q4_0", "Q4_K_M", "Q6_K"])
@pytest.mark.parametrize("kind", ["qwen35", "lfm2", "nemotron_h", "mamba", "deepseek2"])
def test_sequences_together_have_the_logits_of_each_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, quant: str
) -> None:
    """llama.cpp's products with AMX are wrong for all sequences but the first in recurrent layers,
    and it aborts where it takes matrices with a third axis for AMX.
    """
    for name, size in (SIZES | COMPRESSED_KEYS).items():
        monkeypatch.setattr(tiny_models, name, size)
    source, path = tmp_path / "f32.gguf", tmp_path / "quantized.gguf"
    tiny_models.write_tiny_model(kind, source)
    quantize(source, path, quant, threads=1, progress=lambda _: None)
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
        seq.tokens = [(37 * j + 101 * i) % 500 for j in range(PROMPT + 1)]

    def compute(rows: list[Sequence]) -> np.ndarray:
        """Return the logits of a step with the prompts, and of one that decodes."""
        prompts = Batch([Row(seq, 0, PROMPT, 1) for seq in rows], [Trim(0, 0)])
        after_prompts = np.array(backend.forward(prompts))
        decoded = backend.forward(Batch([Row(seq, PROMPT, 1, 1) for seq in rows], []))
        return np.stack([after_prompts, np.array(decoded)], 1)

    alone = []
    for seq in seqs:
        seq.seq_id = 0
        alone.append(compute([seq]))
    expected = np.concatenate(alone)
    for i, seq in enumerate(seqs):
        seq.seq_id = i
    together = compute(seqs)
    backend.close()
    assert np.abs(together - expected).max() < TOLERANCE * np.std(expected)

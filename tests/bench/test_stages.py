"""The stages from llama_decode to the socket: all of them do the same work."""

from __future__ import annotations

import pytest

from cllm.bench.make_model import make_model
from cllm.bench.stages import PARTS, STAGES, Size, SizeResult, StageResult, losses, run_stages

BUDGET = 0.25  # of the speed, for one stage


def result(*medians: float) -> SizeResult:
    return SizeResult(8, [StageResult(str(i), [median]) for i, median in enumerate(medians)], {})


def test_losses() -> None:
    """Against the stage before; what is faster has lost less than nothing."""
    assert losses(result(100, 90, 90, 99)) == pytest.approx([0, 0.1, 0, -0.1])


@pytest.mark.llama
@pytest.mark.slow
def test_every_stage_is_measured(builtin_path, caplog) -> None:
    told = []
    sizes = [Size(1, 4, 6, 0.0, 0), Size(3, 4, 6, 0.8, 0)]
    results = run_stages(builtin_path, sizes, 1, lambda share, what: told.append((share, what)))
    assert [found.num_seqs for found in results] == [1, 3]
    for found in results:
        assert [stage.stage for stage in found.stages] == list(STAGES)
        assert all(speed > 0 for stage in found.stages for speed in stage.tokens_per_s)
        assert list(found.step_us) == list(PARTS)
        assert all(us > 0 for us in found.step_us.values())
    shares = [share for share, _ in told]
    assert shares == sorted(shares)
    assert told[-1] == (1.0, "3 sequences")
    assert not caplog.records, "no step failed"


@pytest.mark.llama
@pytest.mark.slow
def test_no_stage_loses_much(tmp_path):
    """Of a model as big as small real ones. Whatever else runs here only takes, so the best of three tries counts."""
    pytest.importorskip("gguf")
    model = tmp_path / "model.gguf"
    make_model("smollm2-135m", "q4_0", model, progress=lambda *_: None)
    tries = []
    while len(tries) < 3 and not (tries and max(tries[-1]) <= BUDGET):
        (result,) = run_stages(model, [Size(8, 4, 24, 0.8, 0)], 3, lambda *_: None)
        tries.append(losses(result))
    assert max(tries[-1]) <= BUDGET, tries

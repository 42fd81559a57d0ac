"""The stages from llama_decode to the socket do the same work."""

from __future__ import annotations

import pytest
from conftest import repeat

from cllm.bench.bare_engine import PARTS
from cllm.bench.stages import STAGES, SizeResult, StageResult, losses, run_stages
from cllm.bench.work import WorkSize


def result(*medians: float) -> SizeResult:
    return SizeResult(8, [StageResult(str(i), [median]) for i, median in enumerate(medians)], {})


def test_loss_is_computed_between_stages() -> None:
    """Each stage is compared with the one before it; the loss of a faster stage is negative."""
    assert losses(result(100, 90, 90, 99)) == pytest.approx([0, 0.1, 0, -0.1])


@pytest.mark.llama
@pytest.mark.slow
def test_every_stage_is_measured(builtin_path, caplog) -> None:
    told = []
    sizes = [WorkSize(1, 4, 6, 0.0, 0), WorkSize(3, 4, 6, 0.8, 0)][-repeat(2, 1) :]
    results = run_stages(builtin_path, sizes, 1, lambda share, what: told.append((share, what)))
    assert [found.num_seqs for found in results] == [size.num_seqs for size in sizes]
    for found in results:
        assert [stage.stage for stage in found.stages] == list(STAGES)
        assert all(speed > 0 for stage in found.stages for speed in stage.tokens_per_s)
        assert list(found.step_us) == list(PARTS)
        assert all(us > 0 for us in found.step_us.values())
    shares = [share for share, _ in told]
    assert shares == sorted(shares)
    assert told[-1] == (1.0, "3 sequences")
    assert not caplog.records, "no step failed"

"""From how many rows on matrix products are computed in tiles."""

from __future__ import annotations

import pytest

from cllm.backends.llama_cpp import library
from cllm.bench.tune.tiles import TILE, measure_tiles

pytestmark = pytest.mark.llama


def test_types_with_tiles_are_measured() -> None:
    if not hasattr(library.own_kernels(), "cllm_time_products"):
        pytest.skip("this llama.cpp was built without native/")
    found = measure_tiles(["F32", "Q8_0", "Q4_K", "Q5_K", "IQ3_S", "Q4_0"])
    if not found:
        pytest.skip("ggml has no tiles for this CPU")
    assert [tiles.type for tiles in found] == ["Q5_K", "IQ3_S"]
    for tiles in found:
        assert 1 <= tiles.after <= tiles.alone <= TILE
        assert tiles.faster_alone > 1
    large, small = found  # to take a row with IQ3_S alone costs more
    assert large.faster_alone > small.faster_alone


def test_build_without_own_kernels_has_no_tiles(monkeypatch) -> None:
    monkeypatch.setattr(library, "own_kernels", lambda: None)
    assert measure_tiles(["Q5_K"]) == []

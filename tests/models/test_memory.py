"""The memory budget of the KV cache."""

import pytest

from cllm.errors import StartupError
from cllm.models import memory
from cllm.models.gguf import format_size

GB = 1_000_000_000
CELL = 100_000


@pytest.fixture
def room(monkeypatch):
    """10 GB of available memory."""
    monkeypatch.setattr(memory, "measure_available_bytes", lambda: 10 * GB)


@pytest.mark.usefixtures("room")
def test_default_is_half_of_the_remaining_memory_up_to_4_gib(monkeypatch):
    assert memory.compute_kv_budget(GB, CELL, 0, None, on_gpu=False) == memory.USUAL_KV_BYTES
    monkeypatch.setattr(memory, "measure_available_bytes", lambda: 3 * GB)
    assert (
        memory.compute_kv_budget(GB, CELL, 0, None, on_gpu=False)
        == (3 * GB - GB - memory.COMPUTE_BYTES) // 2
    )


@pytest.mark.usefixtures("room")
def test_budget_fits_one_sequence_of_the_requested_context():
    """80,000 tokens take 8 GB, which is more than the default, and fit."""
    assert memory.compute_kv_budget(GB, CELL, 0, 80_000, on_gpu=False) == 8 * GB


@pytest.mark.usefixtures("room")
def test_requested_size_is_used_or_rejected():
    assert memory.compute_kv_budget(GB, CELL, 5 * GB, None, on_gpu=False) == 5 * GB
    with pytest.raises(StartupError, match=r"20\.0 GB.*10\.0 GB"):
        memory.compute_kv_budget(GB, CELL, 20 * GB, None, on_gpu=False)
    with pytest.raises(StartupError, match=r"100000 tokens"):
        memory.compute_kv_budget(GB, CELL, 0, 100_000, on_gpu=False)


@pytest.mark.parametrize(
    ("weights", "wanted", "context", "kv", "total", "cure"),
    [
        (3_200_000, 20 * GB, None, "KV cache 20.0 GB", "20.3 GB", "lower kv.max_memory_mb"),
        (
            GB,
            0,
            90_000,
            "KV cache of 90000 tokens 9.0 GB",
            "10.3 GB",
            "lower model.max_context_length",
        ),
        (
            9_700_000_000,
            0,
            None,
            "KV cache of 256 tokens 25.6 MB",
            "10.0 GB",
            "use a smaller model or quantization",
        ),
        (
            12 * GB,
            0,
            4000,
            "KV cache of 4000 tokens 400.0 MB",
            "12.7 GB",
            "use a smaller model or quantization",
        ),
    ],
)
@pytest.mark.usefixtures("room")
def test_memory_error_lists_each_part_of_the_sum(weights, wanted, context, kv, total, cure):
    """The size of the weights is that of the file. Work buffers and processes are listed
    separately.
    """
    with pytest.raises(StartupError) as caught:
        memory.compute_kv_budget(weights, CELL, wanted, context, on_gpu=False)
    assert str(caught.value) == (
        f"not enough memory: {total} are needed (weights {format_size(weights)}, {kv}, "
        f"work buffers and processes about 314.6 MB), but 10.0 GB are available: {cure}"
    )


def test_available_memory_is_plausible():
    """On an unknown system it may be None."""
    available = memory.measure_available_bytes()
    assert available is None or 10_000_000 < available < 10**14

"""How much of the memory the KV cache gets."""

import pytest

from cllm.errors import StartupError
from cllm.models import memory
from cllm.models.gguf import size_text

GB = 1_000_000_000
CELL = 100_000


@pytest.fixture
def room(monkeypatch):
    """10 GB to spare, for a model of 1 GB."""
    monkeypatch.setattr(memory, "available_bytes", lambda: 10 * GB)


@pytest.mark.usefixtures("room")
def test_half_of_what_is_left_but_not_more_than_the_usual(monkeypatch):
    """4 GiB here; less on a smaller machine."""
    assert memory.kv_budget(GB, CELL, 0, None, on_gpu=False) == memory.USUAL_KV_BYTES
    monkeypatch.setattr(memory, "available_bytes", lambda: 3 * GB)
    assert (
        memory.kv_budget(GB, CELL, 0, None, on_gpu=False)
        == (3 * GB - GB - memory.COMPUTE_BYTES) // 2
    )


@pytest.mark.usefixtures("room")
def test_one_sequence_of_the_wanted_context_at_least():
    """80,000 tokens take 8 GB, more than the usual, and fit."""
    assert memory.kv_budget(GB, CELL, 0, 80_000, on_gpu=False) == 8 * GB


@pytest.mark.usefixtures("room")
def test_what_was_asked_for_is_taken_or_refused():
    assert memory.kv_budget(GB, CELL, 5 * GB, None, on_gpu=False) == 5 * GB
    with pytest.raises(StartupError, match=r"20\.0 GB.*10\.0 GB"):
        memory.kv_budget(GB, CELL, 20 * GB, None, on_gpu=False)
    with pytest.raises(StartupError, match=r"100000 tokens"):
        memory.kv_budget(GB, CELL, 0, 100_000, on_gpu=False)


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
            "take a smaller model or quantization",
        ),
        (
            12 * GB,
            0,
            4000,
            "KV cache of 4000 tokens 400.0 MB",
            "12.7 GB",
            "take a smaller model or quantization",
        ),
    ],
)
@pytest.mark.usefixtures("room")
def test_refusal_names_each_part_of_the_sum(weights, wanted, context, kv, total, cure):
    """The weights are those of the file, and what does not belong to the model is named apart."""
    with pytest.raises(StartupError) as caught:
        memory.kv_budget(weights, CELL, wanted, context, on_gpu=False)
    assert str(caught.value) == (
        f"not enough memory: {total} are needed (weights {size_text(weights)}, {kv}, "
        f"work buffers and processes about 314.6 MB), but 10.0 GB are available: {cure}"
    )


def test_this_machine_has_memory():
    """Whatever the system, the number is plausible or absent."""
    available = memory.available_bytes()
    assert available is None or 10_000_000 < available < 10**14

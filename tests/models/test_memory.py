"""How much of the memory the KV cache gets."""

from pathlib import Path

import pytest

from cllm.errors import StartupError
from cllm.models import memory
from cllm.models.gguf import GgufHeader

GB = 1_000_000_000
CELL = 100_000


@pytest.fixture
def header(monkeypatch):
    """A model of 1 GB, on a machine with 10 GB to spare."""
    monkeypatch.setattr(memory, "available_bytes", lambda: 10 * GB)
    monkeypatch.setattr(GgufHeader, "tensor_bytes", property(lambda _: GB))
    return GgufHeader(Path("x"), 3, "qwen3", {}, {}, [], GB, 0)


def test_half_of_what_is_left_but_not_more_than_the_usual(header, monkeypatch):
    """4 GiB here; less on a smaller machine."""
    assert memory.kv_budget(header, CELL, None, None, on_gpu=False) == memory.USUAL_KV_BYTES
    monkeypatch.setattr(memory, "available_bytes", lambda: 3 * GB)
    assert memory.kv_budget(header, CELL, None, None, on_gpu=False) == (3 * GB - GB - memory.COMPUTE_BYTES) // 2


def test_one_sequence_of_the_wanted_context_at_least(header):
    """80,000 tokens take 8 GB, more than the usual, and fit."""
    assert memory.kv_budget(header, CELL, None, 80_000, on_gpu=False) == 8 * GB


def test_what_was_asked_for_is_taken_or_refused(header):
    """Both sizes and what there is are in the message."""
    assert memory.kv_budget(header, CELL, 5 * GB, None, on_gpu=False) == 5 * GB
    with pytest.raises(StartupError, match=r"20\.0 GB.*10\.0 GB"):
        memory.kv_budget(header, CELL, 20 * GB, None, on_gpu=False)
    with pytest.raises(StartupError, match=r"100000 tokens"):
        memory.kv_budget(header, CELL, None, 100_000, on_gpu=False)


def test_this_machine_has_memory():
    """Whatever the system, the number is plausible or absent."""
    available = memory.available_bytes()
    assert available is None or 10_000_000 < available < 10**14

"""How much of the memory the KV cache gets."""

import pytest

from cllm.errors import StartupError
from cllm.models import memory

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
    assert memory.kv_budget(GB, CELL, 0, None, on_gpu=False) == (3 * GB - GB - memory.COMPUTE_BYTES) // 2


@pytest.mark.usefixtures("room")
def test_one_sequence_of_the_wanted_context_at_least():
    """80,000 tokens take 8 GB, more than the usual, and fit."""
    assert memory.kv_budget(GB, CELL, 0, 80_000, on_gpu=False) == 8 * GB


@pytest.mark.usefixtures("room")
def test_what_was_asked_for_is_taken_or_refused():
    """Both sizes and what there is are in the message."""
    assert memory.kv_budget(GB, CELL, 5 * GB, None, on_gpu=False) == 5 * GB
    with pytest.raises(StartupError, match=r"20\.0 GB.*10\.0 GB"):
        memory.kv_budget(GB, CELL, 20 * GB, None, on_gpu=False)
    with pytest.raises(StartupError, match=r"100000 tokens"):
        memory.kv_budget(GB, CELL, 0, 100_000, on_gpu=False)


def test_this_machine_has_memory():
    """Whatever the system, the number is plausible or absent."""
    available = memory.available_bytes()
    assert available is None or 10_000_000 < available < 10**14

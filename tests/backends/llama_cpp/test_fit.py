"""How the memory for the KV cache is divided."""

import pytest
from msgspec import structs

from cllm.backends.llama_cpp.fit import MAX_DRAFTING, POSITION_BYTES, fit, fit_recurrent
from cllm.backends.params import BackendParams
from cllm.core.model_info import CHECKPOINT_SHARE
from cllm.errors import StartupError

TRAINED = 40_960
CELL = 10_000


def params(kv_memory: int, context: int | None = None, layout: str = "auto") -> BackendParams:
    return BackendParams(
        path="model.gguf",
        layout=layout,
        context_length=context,
        max_num_seqs=64,
        kv_bytes_per_token=CELL,
        kv_memory=kv_memory,
    )


@pytest.mark.parametrize(
    ("kv_memory", "context"), [(10**9, None), (50_000_000, None), (10**9, 4000), (3_500_000, None)]
)
def test_paged_cells_and_positions_take_the_given_memory(kv_memory: int, context: int | None):
    sizes = fit(params(kv_memory, context), TRAINED, pages=True)
    assert sizes.layout == "paged"
    assert sizes.num_cells >= sizes.context_length >= 256
    padding = 255
    positions = 64 * sizes.context_length * POSITION_BYTES
    used = sizes.num_cells * CELL + positions
    assert kv_memory - CELL - 64 * padding * POSITION_BYTES <= used <= kv_memory


def test_context_without_room_for_positions_is_not_paged():
    """They would take 133 MB. If paged was asked for, it is an error."""
    assert fit(params(420_000_000, TRAINED), TRAINED, pages=True).layout == "unified"
    with pytest.raises(StartupError) as caught:
        fit(params(420_000_000, TRAINED, "paged"), TRAINED, pages=True)
    assert str(caught.value) == (
        "one sequence of 40960 tokens needs 546 MB of KV cache and positions for 64 sequences, but "
        "420 MB are allowed: lower model.max_context_length or scheduler.max_num_seqs or raise "
        "kv.max_memory_mb"
    )


def test_sequence_that_does_not_fit_is_an_error_in_every_layout():
    for layout in ("auto", "unified"):
        with pytest.raises(StartupError, match=r"40960 tokens needs 410 MB of KV cache, but 400"):
            fit(params(400_000_000, TRAINED, layout), TRAINED, pages=True)


STATE = 20_000_000


def fit_states(kv_memory, taken_back=8, context=None, layout="auto", state=STATE, pages=False):
    given = structs.replace(params(kv_memory, context, layout), max_taken_back=taken_back)
    sizes = fit_recurrent(given, TRAINED, state, pages=pages)
    num_drafting = min(sizes.max_num_seqs, MAX_DRAFTING) if pages else sizes.max_num_seqs
    states = (sizes.max_num_seqs + num_drafting * sizes.num_past_states) * state
    assert states + sizes.num_cells * CELL + kv_memory * CHECKPOINT_SHARE <= kv_memory
    return sizes


def test_sequences_with_states_share_cells():
    """Half of the memory has states: those of fewer sequences, each with four past ones."""
    sizes = fit_states(4_000_000_000)
    assert (sizes.max_num_seqs, sizes.num_past_states, sizes.layout) == (20, 4, "unified")
    assert sizes.context_length == TRAINED
    sizes = fit_states(4_000_000_000, taken_back=0)
    assert (sizes.max_num_seqs, sizes.num_past_states) == (64, 0)


@pytest.mark.parametrize(
    ("kv_memory", "num_seqs", "num_past_states"),
    [(4_000_000_000, 64, 8), (2_000_000_000, 34, 4), (500_000_000, 2, 5), (100_000_000, 1, 1)],
)
def test_few_sequences_take_memory_for_past_states(kv_memory, num_seqs, num_past_states):
    """Where it is taken when it is used."""
    sizes = fit_states(kv_memory, pages=True, context=256)
    assert (sizes.max_num_seqs, sizes.num_past_states) == (num_seqs, num_past_states)


def test_small_states_leave_room_for_all_past_ones():
    sizes = fit_states(40_000_000_000, context=4096, state=1_000_000)
    assert (sizes.max_num_seqs, sizes.num_past_states, sizes.layout) == (64, 8, "partitioned")


def test_partitioned_sequences_have_cells_for_whole_contexts():
    sizes = fit_states(4_000_000_000, layout="partitioned")
    assert sizes.num_cells == sizes.max_num_seqs * TRAINED
    assert sizes.max_num_seqs == 3


def test_sequence_and_state_that_do_not_fit_are_an_error():
    with pytest.raises(StartupError, match=r"40960 tokens needs 477 MB of KV cache"):
        fit_states(470_000_000, context=TRAINED)

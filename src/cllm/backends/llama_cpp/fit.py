"""Divide the memory for the KV cache into sequences and cells."""

from __future__ import annotations

import math
from typing import NamedTuple

from cllm.backends.params import BackendParams
from cllm.core.model_info import CHECKPOINT_SHARE
from cllm.errors import StartupError

MIN_SAMPLES = 16  # room for draft tokens when few sequences run
MIN_CONTEXT = 256
USUAL_CONTEXT = 4096
STATES_SHARE = 0.5  # of kv_memory, for recurrent states
MIN_PAST_STATES = 4
MAX_DRAFTING = 4  # sequences for whose past states there is memory, if it is taken when it is used
MIN_SEQS = 4  # a context longer than USUAL_CONTEXT is shortened until this many fit
PAD = 256  # llama.cpp rounds the length of a stream up to a multiple of this many tokens
NOT_PAGED = (
    "kv.layout is paged, which needs Linux, a model on the CPU, and keys and values of all tokens: "
    "use auto"
)
POSITION_BYTES = 52  # llama.cpp writes these for each cell at load, see llama-kv-cells.h


class KVSizes(NamedTuple):
    """The KV cache: tokens per sequence, number of sequences, tokens in total, layout, and the past
    recurrent states of each sequence.
    """

    context_length: int
    max_num_seqs: int
    num_cells: int
    layout: str
    num_past_states: int = 0


def pad_context(num_tokens: int) -> int:
    """Return the length of the stream that llama.cpp makes for ``num_tokens`` tokens."""
    return -(-num_tokens // PAD) * PAD


def fit(
    params: BackendParams,
    trained_context_length: int,
    *,
    plain: bool = True,
    pages: bool = False,
    num_caches: int = 1,
) -> KVSizes:
    """Divide kv_memory into cells and sequences.

    The only memory of a ``plain`` model is attention to all tokens; only plain models can be
    unified. ``pages`` says that paged memory can be used. A sequence may be as long as the model
    was trained for, or as kv_memory allows. In paged memory, each sequence also needs positions for
    a whole context in each of ``num_caches``; ``auto`` is not paged if these leave too little
    memory for cells. Without paged memory, ``auto`` is partitioned if each sequence gets cells for
    a whole context, otherwise unified. A model that cannot be unified gets a shorter context, so
    that MIN_SEQS sequences fit. Raises StartupError, with the sizes, if not even one sequence fits.
    """
    layout = params.layout
    if layout == "paged" and not pages:
        raise StartupError(NOT_PAGED)
    if layout == "auto" or (layout == "unified" and not plain):
        layout = "paged" if pages else ""
    is_paged = layout == "paged"
    position_bytes = POSITION_BYTES * num_caches * params.max_num_seqs if is_paged else 0
    affordable = params.kv_memory // max(1, params.kv_bytes_per_token + position_bytes)
    longest = min(trained_context_length, affordable)
    if layout not in ("paged", "unified") and not plain:
        longest = min(longest, max(USUAL_CONTEXT, affordable // MIN_SEQS))
    context = params.context_length or max(MIN_CONTEXT, longest)
    if context > affordable:
        if is_paged and params.layout == "auto":
            return fit(params, trained_context_length, plain=plain)
        need = context * (params.kv_bytes_per_token + position_bytes)
        raise too_little_memory(params, context, need, has_positions=is_paged)
    if is_paged:
        cell_bytes = params.kv_memory - position_bytes * pad_context(context)
        affordable = max(context, cell_bytes // max(1, params.kv_bytes_per_token))
    wanted = params.max_num_seqs * context
    if not layout:
        layout = "unified" if plain and wanted > affordable else "partitioned"
    if layout != "partitioned":
        return KVSizes(context, params.max_num_seqs, min(affordable, wanted), layout)
    num_seqs = min(params.max_num_seqs, affordable // context)
    return KVSizes(context, num_seqs, num_seqs * context, layout)


def fit_recurrent(
    params: BackendParams, trained_context_length: int, state_bytes: int, *, pages: bool = False
) -> KVSizes:
    """Divide kv_memory into recurrent states of ``state_bytes``, one for each sequence, and cells.

    The states take at most STATES_SHARE of the memory. If tokens have keys and values too, the
    model is a hybrid, and CHECKPOINT_SHARE is left for its checkpoints. Each sequence keeps up to
    max_taken_back past states, too; there are fewer sequences if that leaves less than
    MIN_PAST_STATES to each. With ``pages``, memory is taken when it is used, and only the past
    states of MAX_DRAFTING sequences are counted. A sequence may be as long as the model was trained
    for, or as the cells allow. The layout ``auto`` is partitioned if each sequence gets cells for a
    whole context, otherwise unified. Raises StartupError, with the sizes, if not even one sequence
    fits.
    """
    if params.layout == "paged":
        raise StartupError(NOT_PAGED)
    num_states = int(params.kv_memory * STATES_SHARE) // max(1, state_bytes)
    least = min(params.max_taken_back, MIN_PAST_STATES)
    num_seqs = num_states // (1 + least)
    if pages:
        num_seqs = max(num_seqs, num_states - MAX_DRAFTING * least)
    num_seqs = max(1, min(params.max_num_seqs, num_seqs))
    num_drafting = min(num_seqs, MAX_DRAFTING) if pages else num_seqs
    num_past_states = max(0, num_states - num_seqs) // num_drafting
    num_past_states = min(params.max_taken_back, num_past_states)
    share = 1 - (CHECKPOINT_SHARE if params.kv_bytes_per_token else 0)
    memory = int(params.kv_memory * share)
    memory -= (num_seqs + num_drafting * num_past_states) * state_bytes
    affordable = max(0, memory) // max(1, params.kv_bytes_per_token)
    context = params.context_length or max(MIN_CONTEXT, min(trained_context_length, affordable))
    if context > affordable:
        need = context * params.kv_bytes_per_token + state_bytes
        raise too_little_memory(params, context, math.ceil(need / share))
    wanted = num_seqs * context
    if params.layout == "unified" or (params.layout == "auto" and wanted > affordable):
        return KVSizes(context, num_seqs, min(affordable, wanted), "unified", num_past_states)
    num_seqs = min(num_seqs, affordable // context)
    return KVSizes(context, num_seqs, num_seqs * context, "partitioned", num_past_states)


def too_little_memory(
    params: BackendParams, context: int, need: int, *, has_positions: bool = False
) -> StartupError:
    """Return the error for a sequence of ``context`` tokens that needs ``need`` bytes."""
    positions = f" and positions for {params.max_num_seqs} sequences" if has_positions else ""
    return StartupError(
        f"one sequence of {context} tokens needs {need / 1e6:.0f} MB of KV cache{positions}, "
        f"but {params.kv_memory / 1e6:.0f} MB are allowed: lower model.max_context_length"
        f"{' or scheduler.max_num_seqs' if has_positions else ''} or raise kv.max_memory_mb"
    )


def max_samples(params: BackendParams, sizes: KVSizes) -> int:
    """Return the maximum number of positions whose logits one step may request."""
    return min(params.max_num_batched_tokens, max(MIN_SAMPLES, sizes.max_num_seqs))

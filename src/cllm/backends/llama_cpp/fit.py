"""Divide the memory for the KV cache into sequences and cells."""

from __future__ import annotations

from typing import NamedTuple

from cllm.backends.params import BackendParams
from cllm.errors import StartupError

MIN_SAMPLES = 16  # room for draft tokens when few sequences run
MIN_CONTEXT = 256
USUAL_CONTEXT = 4096


class Fit(NamedTuple):
    """The KV cache: tokens per sequence, number of sequences, tokens in total, layout, and whether
    that can change.
    """

    context_length: int
    max_num_seqs: int
    num_cells: int
    layout: str
    can_change: bool = False


def fit(
    params: BackendParams, trained_context_length: int, *, plain: bool = True, on_gpu: bool = False
) -> Fit:
    """Divide kv_memory: first the requested context (or the usual one), then as many sequences of
    it as fit.

    ``plain``: the model's only memory is attention to all tokens; other models cannot be unified.
    ``auto`` starts partitioned and may change, except on a GPU, where partitioned is far faster. If
    the memory cannot hold a whole context for each sequence, ``auto`` starts unified, because only
    then can all of them run. Raises StartupError, with the sizes, if not even one sequence fits.
    """
    affordable = params.kv_memory // max(1, params.kv_bytes_per_token)
    context = params.context_length or max(
        MIN_CONTEXT, min(trained_context_length, USUAL_CONTEXT, affordable)
    )
    if context > affordable:
        need = context * params.kv_bytes_per_token
        raise StartupError(
            f"one sequence of {context} tokens needs {need / 1e6:.0f} MB of KV cache, but "
            f"{params.kv_memory / 1e6:.0f} MB are allowed: lower model.max_context_length or "
            f"raise kv.max_memory_mb"
        )
    layout = params.layout
    wanted = params.max_num_seqs * context
    follows_load = layout == "auto" and plain and not on_gpu
    if layout == "auto" or not plain:
        layout = "unified" if follows_load and wanted > affordable else "partitioned"
    if layout == "unified":
        return Fit(context, params.max_num_seqs, min(affordable, wanted), layout)
    num_seqs = min(params.max_num_seqs, affordable // context)
    return Fit(
        context, num_seqs, num_seqs * context, layout, can_change=follows_load and num_seqs > 1
    )


def max_samples(params: BackendParams, sizes: Fit) -> int:
    """Return the maximum number of positions whose logits one step may request."""
    return min(params.max_num_batched_tokens, max(MIN_SAMPLES, sizes.max_num_seqs))

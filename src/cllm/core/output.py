"""The outputs of a step: tokens, embeddings, and the state of the engine."""

from __future__ import annotations

import enum

import msgspec

NO_TOKEN = -1
FAILED = -2  # replaces each token of a sequence that cannot be sampled


class FinishReason(enum.StrEnum):
    """Why a sequence ended. GRAMMAR: its grammar cannot be compiled, or allows no further token."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"
    TIMEOUT = "timeout"
    GRAMMAR = "grammar"


class Logprobs(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The logprob of a token and those of the most probable tokens: natural logarithms of the
    model's probabilities.

    top: (token id, logprob) pairs, as many as the request asked for, most probable first.
    """

    logprob: float
    top: list[tuple[int, float]]


class TokenOutput(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One sampled token of one sequence.

    token: the id, or NO_TOKEN if the sequence ended without one (abort). finish: "" while the
    sequence continues, else the FinishReason. is_text: False for end and stop tokens, which are
    counted but are not text. num_cached_tokens: prompt tokens taken from the cache, reported once,
    with the first token of index 0 (with max_tokens 0, when it ends).

    On request: ``logprobs`` of the token, and ``prompt_logprobs`` of the next prompt tokens. Prompt
    logprobs precede the first token of index 0, in one or more outputs with NO_TOKEN that do not
    finish.

    mirostat_mu: with mirostat, the limit of surprise for the next token; it does not follow from
    the tokens.
    """

    request_id: str
    index: int
    token: int
    finish: str = ""
    is_text: bool = True
    num_cached_tokens: int = 0
    logprobs: Logprobs | None = None
    prompt_logprobs: list[Logprobs] | None = None
    mirostat_mu: float | None = None


class EmbeddingOutput(msgspec.Struct, frozen=True, tag=True, array_like=True, gc=False):
    """The next embeddings of one request, in the order of its texts, as little-endian float32
    bytes.

    The first message of a request has no vectors; it says that the request has started. error: why
    no more will follow.
    """

    request_id: str
    vectors: list[bytes]
    error: str = ""


class Stats(msgspec.Struct, frozen=True, array_like=True):
    """The state of the engine after a step, for gauges and counters.

    waiting_seconds: estimated time until all waiting sequences are served. prompt_token_seconds:
    expected time per prompt token, averaged over computed and cached tokens (cached ones take
    none). step_seconds: time of a step with the present sequences. slot_seconds: estimated time
    from one freed seq_id to the next while all are taken, 0 if unknown. decode_cpu_seconds: CPU
    time of the engine process inside llama_decode.
    """

    num_running: int = 0
    num_waiting: int = 0
    num_seq_ids: int = 0
    num_seq_ids_in_use: int = 0
    num_cells: int = 0
    num_cells_held: int = 0
    num_cells_idle: int = 0
    num_steps: int = 0
    num_parked: int = 0
    num_prefill_tokens: int = 0
    num_guesses: int = 0
    num_accepted: int = 0
    num_ram_bytes: int = 0
    num_disk_bytes: int = 0
    num_waiting_tokens: int = 0
    waiting_seconds: float = 0.0
    prompt_token_seconds: float = 0.0
    step_seconds: float = 0.0
    num_embedding_tokens: int = 0
    slot_seconds: float = 0.0
    decode_cpu_seconds: float = 0.0
    num_disk_failures: int = 0

    def add_totals(self, earlier: Stats) -> Stats:
        """Return these stats with the TOTALS of ``earlier`` added."""
        totals = {field: getattr(self, field) + getattr(earlier, field) for field in TOTALS}
        return msgspec.structs.replace(self, **totals)

    def with_totals(self, other: Stats) -> Stats:
        """Return these stats with the TOTALS of ``other``."""
        return msgspec.structs.replace(self, **{field: getattr(other, field) for field in TOTALS})


def combine_stats(all_stats: list[Stats]) -> Stats:
    """Return the stats of several engines, of which there is at least one, as if they were one
    engine: sums; means of the times of a step and a token; the longest wait; and the time between
    two free seq_ids of any.
    """
    if len(all_stats) == 1:
        return all_stats[0]
    count = len(all_stats)
    sums = {
        field: sum([getattr(stats, field) for stats in all_stats])
        for field in Stats.__struct_fields__
    }
    rate = sum(1 / stats.slot_seconds for stats in all_stats if stats.slot_seconds)
    return Stats(
        **sums
        | {
            "waiting_seconds": max(stats.waiting_seconds for stats in all_stats),
            "prompt_token_seconds": sums["prompt_token_seconds"] / count,
            "step_seconds": sums["step_seconds"] / count,
            "slot_seconds": 1 / rate if rate else 0.0,
        }
    )


# Fields that only grow while an engine runs.
TOTALS = (
    "num_steps",
    "num_parked",
    "num_prefill_tokens",
    "num_guesses",
    "num_accepted",
    "num_embedding_tokens",
    "decode_cpu_seconds",
    "num_disk_failures",
)

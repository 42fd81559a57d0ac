"""The outputs of a step: tokens, embeddings, and the state of the engine."""

from __future__ import annotations

import enum

import msgspec

NO_TOKEN = -1
FAILED = -2  # replaces each token of a sequence that cannot be sampled


class FinishReason(enum.StrEnum):
    """The reason why a sequence ended. GRAMMAR means that its grammar cannot be compiled, or allows
    no further token.
    """

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"
    TIMEOUT = "timeout"
    GRAMMAR = "grammar"


FAILURES = frozenset({FinishReason.ERROR, FinishReason.GRAMMAR, FinishReason.TIMEOUT})


class Logprobs(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The logprob of a token and those of the most probable tokens: natural logarithms of the
    model's probabilities.

    ``top`` has (token id, logprob) pairs, as many as the request asked for, most probable first.
    """

    logprob: float
    top: list[tuple[int, float]]


class PrefillChunk(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Tokens of a prompt that one step has computed. Times are in seconds since the admission."""

    begin: float
    end: float
    num_tokens: int


class SequenceTimes(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """How a sequence has spent its time, in seconds.

    It waited ``queued`` from its arrival to its first admission, and its prompt took ``prefill``
    from there to the first token. A time that has not ended yet is None. ``reason`` says why it
    waited, "" if it did not. It was parked ``num_parked`` times. ``chunks`` are those of the
    prompt, if its request is traced.
    """

    queued: float | None = None
    prefill: float | None = None
    reason: str = ""
    num_parked: int = 0
    chunks: tuple[PrefillChunk, ...] = ()


class PrefillProgress(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """How far a prompt of ``num_tokens`` is: ``num_computed`` are done, ``num_cached`` of them were
    taken from the cache. ``seconds`` have passed since its admission.
    """

    num_tokens: int
    num_cached: int
    num_computed: int
    seconds: float


class TokenOutput(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One sampled token of one sequence.

    ``token`` is its id, or NO_TOKEN if the sequence ended without one (abort). ``finish`` is the
    FinishReason, "" while the sequence continues. End and stop tokens are counted, but are not
    text: ``is_text`` is False. ``num_cached_tokens`` of the prompt were taken from the cache. This
    is reported once, with the first token of index 0 (with max_tokens 0, when it ends).

    On request, outputs have the ``logprobs`` of the token, and the ``prompt_logprobs`` of the next
    prompt tokens. Prompt logprobs precede the first token of index 0, in one or more outputs with
    NO_TOKEN that do not finish. With mirostat, ``mirostat_mu`` limits the surprise of the next
    token; it does not follow from the tokens. The first token of a sequence and its last output
    have its ``times``.

    If the request wants it, outputs with NO_TOKEN that do not finish have the ``prefill`` of its
    prompt, before the first token of index 0.

    If a step has verified draft tokens, its first token says how many (``num_guesses``), and how
    many of them were right (``num_accepted``).
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
    times: SequenceTimes | None = None
    prefill: PrefillProgress | None = None
    num_guesses: int = 0
    num_accepted: int = 0


class EmbeddingOutput(msgspec.Struct, frozen=True, tag=True, array_like=True, gc=False):
    """The next embeddings of one request, in the order of its texts, as little-endian float32
    bytes.

    The first message of a request has no vectors; it says that the request has started. After an
    ``error``, no more will follow.
    """

    request_id: str
    vectors: list[bytes]
    error: str = ""


class Stats(msgspec.Struct, frozen=True, array_like=True):
    """The state of the engine after a step, for gauges and counters.

    All waiting sequences will be served within about ``waiting_seconds``. A prompt token will take
    about ``prompt_token_seconds``, the mean of computed tokens and cached ones, which take no time.
    A step with the present sequences takes ``step_seconds``. While all seq_ids are taken, one
    becomes free every ``slot_seconds`` or so, 0 if unknown. The engine process has spent
    ``decode_cpu_seconds`` of CPU time inside llama_decode.

    ``num_rows`` counts decoding rows. Of the ``num_cache_queries`` prompt tokens of admitted
    sequences, the cache had those of the three hits: in cells, in RAM and on disk. The times of the
    stages of all steps are wall time. ``num_thoughts_ended`` counts finished sequences whose
    reasoning was ended by its budget or on request. Running sequences do without
    ``num_cells_shared`` cells, because they share others.
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
    num_checkpoint_bytes: int = 0
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
    num_rows: int = 0
    num_cache_queries: int = 0
    num_cell_hits: int = 0
    num_ram_hits: int = 0
    num_disk_hits: int = 0
    schedule_seconds: float = 0.0
    forward_seconds: float = 0.0
    sample_seconds: float = 0.0
    update_seconds: float = 0.0
    side_job_seconds: float = 0.0
    num_cells_shared: int = 0
    num_ram_tokens: int = 0
    num_disk_tokens: int = 0
    num_thoughts_ended: int = 0

    def add_totals(self, earlier: Stats) -> Stats:
        """Return these stats with the TOTALS of ``earlier`` added."""
        totals = {field: getattr(self, field) + getattr(earlier, field) for field in TOTALS}
        return msgspec.structs.replace(self, **totals)

    def with_totals(self, other: Stats) -> Stats:
        """Return these stats with the TOTALS of ``other``."""
        return msgspec.structs.replace(self, **{field: getattr(other, field) for field in TOTALS})


def combine_stats(all_stats: list[Stats]) -> Stats:
    """Return the stats of several engines (at least one) as those of one engine.

    Most fields are sums. The times of a step and of a token are means, the wait is the longest one,
    and the time between two free seq_ids is that over all engines.
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


# the stages of a step, by the fields with their times
STAGES = (
    "schedule_seconds",
    "forward_seconds",
    "sample_seconds",
    "update_seconds",
    "side_job_seconds",
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
    "num_rows",
    "num_cache_queries",
    "num_cell_hits",
    "num_ram_hits",
    "num_disk_hits",
    "num_thoughts_ended",
    *STAGES,
)

"""What a step gave to one sequence, and how the engine stands."""

from __future__ import annotations

import enum

import msgspec

NO_TOKEN = -1
FAILED = -2  # stands for each token of a sequence that cannot be sampled


class FinishReason(enum.StrEnum):
    """GRAMMAR: the request's grammar cannot be compiled, or allows no further token."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"
    TIMEOUT = "timeout"
    GRAMMAR = "grammar"


class Logprobs(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """How probable a token was, and which ones were most so: natural logarithms of the model's probabilities.

    top: ids and their logprobs, as many as were asked for, in falling order.
    """

    logprob: float
    top: list[tuple[int, float]]


class TokenOutput(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One sampled token of one sequence.

    token: the id, or NO_TOKEN if the sequence ended without one (abort). finish: "" while it goes on, else the
    FinishReason. A token that ends a sequence because it means "end" is counted but is not text: ``is_text`` False.
    num_cached_tokens: prompt tokens that were not computed again, told once, with the first token of index 0.

    For those who asked: ``logprobs`` of the token, and ``prompt_logprobs`` of the next tokens of the prompt. These
    come before the first token with index 0, in one or more outputs of token -1 that do not finish.
    """

    request_id: str
    index: int
    token: int
    finish: str = ""
    is_text: bool = True
    num_cached_tokens: int = 0
    logprobs: Logprobs | None = None
    prompt_logprobs: list[Logprobs] | None = None


class Embedded(msgspec.Struct, frozen=True, tag=True, array_like=True, gc=False):
    """Of one request for vectors, the next of them in the order of its texts, float32 in little-endian bytes.

    None with the first message of a request: it has begun. error: why there will be no more, in words.
    """

    request_id: str
    vectors: list[bytes]
    error: str = ""


class Stats(msgspec.Struct, frozen=True, array_like=True):
    """The engine after a step: what gauges and counters show.

    waiting_seconds: estimated time until all who wait now are served. prompt_token_seconds: what a token of a prompt
    will probably take, cached ones, which take none, included. step_seconds: what a step takes now. place_seconds:
    estimated time from one free place to the next while all are taken; 0 if it is not known.
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
    place_seconds: float = 0.0

    def plus_totals(self, earlier: Stats) -> Stats:
        """Self, whose TOTALS go on from those of ``earlier``."""
        totals = {field: getattr(self, field) + getattr(earlier, field) for field in TOTALS}
        return msgspec.structs.replace(self, **totals)


# Fields that only grow while an engine runs.
TOTALS = ("num_steps", "num_parked", "num_prefill_tokens", "num_guesses", "num_accepted", "num_embedding_tokens")

"""The sequences that the engine computes."""

from __future__ import annotations

import enum
from collections.abc import Collection
from typing import Protocol

import numpy as np
import numpy.typing as npt

from cllm.core.output import (
    NO_TOKEN,
    FinishReason,
    Logprobs,
    PrefillChunk,
    PrefillProgress,
    SequenceTimes,
    TokenOutput,
)
from cllm.core.request import Adapters, Request, SequenceProgress
from cllm.core.thinking import Thinking
from cllm.core.vocabulary import Pieces

BOUNDARY_DISTANCE = 4096  # tokens between boundaries within long messages
MAX_PROMPT_END = 64  # tokens after the last boundary that are rather computed again
MAX_CHUNKS = 1000  # of a prompt that are noted; later ones count as part of the last one


class Status(enum.Enum):
    """PARKED: the sequence has run, gave up its cells to others, and waits to resume."""

    WAITING = "waiting"
    RUNNING = "running"
    PARKED = "parked"
    FINISHED = "finished"


class Matcher(Protocol):
    """The state of a sequence in its grammar; see sampling/grammar.py."""

    @property
    def is_stopped(self) -> bool:
        """True if only the end may follow."""
        ...

    def consume(self, token: int) -> None:
        """Advance by ``token``, the next one of the sequence."""
        ...

    def rollback(self, count: int) -> None:
        """Undo the last ``count`` calls of ``consume``."""
        ...

    def accepts(self, token: int) -> bool:
        """Return whether ``token`` may come next. This takes microseconds."""
        ...

    def compute_mask(self) -> npt.NDArray[np.uint8] | None:
        """Return one bit per token, lowest bit of each byte first, or None if no token may follow.

        End tokens are allowed where the text may end.
        """
        ...


class Sequence:
    """One continuation of a request's prompt; ``n=3`` makes three.

    There are no phases. ``num_computed_tokens`` (tokens whose keys and values are in the cache)
    catches up with ``num_tokens``. A sequence that lacks one token decodes. One that lacks many
    prefills, in chunks. One that has lost its cells lacks tokens again.

    Invariants: 0 <= num_computed_tokens < num_tokens until it has finished; seq_id >= 0 exactly
    while RUNNING.
    """

    __slots__ = (
        "__weakref__",
        "_array",
        "admitted",
        "arrived",
        "chunks",
        "effective_priority",
        "expires",
        "first_token_at",
        "index",
        "is_plain",
        "limit",
        "matcher",
        "mirostat_mu",
        "num_cached_tokens",
        "num_computed_tokens",
        "num_failures",
        "num_parked",
        "num_pending_prompt_logprobs",
        "num_prompt_tokens",
        "num_reported_tokens",
        "num_uncached_tokens",
        "order",
        "request",
        "seed",
        "seq_id",
        "status",
        "thinking",
        "token_counts",
        "tokens",
        "wait_reason",
        "waits_since",
    )

    def __init__(
        self,
        request: Request,
        index: int,
        seed: int,
        context_length: int,
        pieces: Pieces | None = None,
    ) -> None:
        """``seed`` has 64 bits; ``context_length`` limits prompt and output together, in tokens.
        ``pieces`` has the bytes of each token id, for requests with a thinking budget.

        The engine sets ``matcher`` if the request has a grammar. The scheduler sets ``arrived``,
        ``waits_since`` (its arrival, or when it was parked last) and ``expires`` (in seconds of its
        clock), ``order`` (grows with each arrival),
        ``num_uncached_tokens`` (on arrival) and ``effective_priority`` (the class in which it is
        served once it runs). It also notes when the sequence was ``admitted`` first and had its
        first token (``first_token_at``), the ``wait_reason`` and ``num_parked``.
        """
        self.request = request
        self.index = index
        self.seed = seed
        self.tokens = list(request.prompt)
        self._array = np.zeros(0, np.int32)
        self.num_prompt_tokens = len(request.prompt)
        self.num_computed_tokens = 0
        self.num_reported_tokens = -1  # of the prompt, see TokenOutput.prefill
        self.num_failures = 0  # consecutive failed batches that contained this sequence
        self.num_cached_tokens: int | None = None  # set once, at admission
        self.seq_id = -1
        self.arrived = 0.0
        self.waits_since = 0.0
        self.admitted: float | None = None
        self.first_token_at: float | None = None
        self.wait_reason: object = ""  # its text is the reason
        self.num_parked = 0
        self.chunks: list[PrefillChunk] = []  # if the request is traced
        self.expires: float | None = None
        self.order = 0
        self.num_uncached_tokens = 0
        self.effective_priority: int = request.priority
        self.status = Status.WAITING
        self.is_plain = request.params.is_plain  # looked up with every token
        # prompt tokens whose logprobs have not been reported yet; they must be computed even if
        # they are cached
        scores = request.params.prompt_logprobs is not None and index == 0
        self.num_pending_prompt_logprobs = self.num_prompt_tokens - 1 if scores else 0
        self.matcher: Matcher | None = None
        budget = request.params.thinking
        self.thinking = None if budget is None else Thinking(budget, pieces)
        # by position, for the positions that may be sampled again; see sampling/extensions.py
        self.mirostat_mu: dict[int, float] = {}
        self.limit = context_length
        if request.params.max_tokens is not None:
            self.limit = min(context_length, self.num_prompt_tokens + request.params.max_tokens)
        # token -> [times in the prompt, times in the output]; None without penalties
        self.token_counts: dict[int, list[int]] | None = (
            {} if request.params.has_penalties else None
        )
        if self.token_counts is not None:
            for token in request.prompt:
                self.token_counts.setdefault(token, [0, 0])[0] += 1

    def resume(self, progress: SequenceProgress) -> None:
        """Continue after the tokens that another engine has delivered. Call this before the
        sequence is queued.
        """
        for token in progress.tokens:
            self.append(token)
        self.num_pending_prompt_logprobs -= progress.num_prompt_logprobs
        if progress.mirostat_mu is not None:
            self.mirostat_mu = {self.num_tokens: progress.mirostat_mu}

    def find_mu(self, position: int) -> float | None:
        """Return mirostat's mu for ``position``; None if no token has been drawn with it.

        A position whose predecessor was not drawn has the mu of the latest one that was.
        """
        known = max((at for at in self.mirostat_mu if at <= position), default=None)
        return None if known is None else self.mirostat_mu[known]

    def follow(self, matcher: Matcher) -> None:
        """Constrain the output by ``matcher``, which first consumes the output so far."""
        for token in self.tokens[self.num_prompt_tokens :]:
            matcher.consume(token)
        self.matcher = matcher

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    @property
    def array(self) -> npt.NDArray[np.int32]:
        """The tokens as an array, rebuilt only when tokens were added."""
        if len(self._array) != len(self.tokens):
            self._array = np.array(self.tokens, np.int32)
        return self._array

    def list_boundaries(self) -> list[int]:
        """Return the positions in the prompt up to which later ones may agree with it: where an
        activated LoRA begins, the boundaries of messages, others at regular distances, and the end
        if no boundary is close to it.
        """
        request = self.request
        end = request.num_base_tokens or self.num_prompt_tokens - 1
        distant = range(BOUNDARY_DISTANCE, end, BOUNDARY_DISTANCE)
        listed = [at for at in sorted({*request.boundaries, *distant}) if at <= end]
        if not listed or end - listed[-1] > (0 if request.num_base_tokens else MAX_PROMPT_END):
            listed.append(end)
        return listed

    @property
    def shareable_tokens(self) -> npt.NDArray[np.int32]:
        """The tokens that sequences with the same salt compute alike: all, or those before an
        activated LoRA.
        """
        return self.array[: self.request.num_base_tokens or None]

    @property
    def reusable_tokens(self) -> npt.NDArray[np.int32]:
        """The tokens that may be reused from the cache: shareable, and their logits are not
        needed.
        """
        scored = self.num_pending_prompt_logprobs
        return self.shareable_tokens[
            : (self.num_prompt_tokens - scored if scored else self.num_tokens) - 1
        ]

    @property
    def adapters(self) -> Adapters:
        """The adapters with which its next tokens are computed."""
        request = self.request
        return request.adapters if self.num_computed_tokens >= request.num_base_tokens else ()

    def count_until_adapters(self) -> int:
        """Return how many tokens can be computed before the adapters change."""
        left = self.request.num_base_tokens - self.num_computed_tokens
        return left if left > 0 else self.num_tokens

    def count_prompt_logprobs(self, start: int, count: int) -> int:
        """Return how many of the ``count`` positions from ``start`` give prompt logprobs not yet
        reported.
        """
        last = self.num_prompt_tokens - 1
        return max(
            0, min(start + count, last) - max(start, last - self.num_pending_prompt_logprobs)
        )

    @property
    def num_lacking_tokens(self) -> int:
        return len(self.tokens) - self.num_computed_tokens

    def append(self, token: int) -> None:
        self.tokens.append(token)
        if self.matcher is not None:
            self.matcher.consume(token)
        if self.thinking is not None:
            self.thinking.advance(token)
        if self.token_counts is not None:
            self.token_counts.setdefault(token, [0, 0])[1] += 1

    def end_reasoning(self) -> None:
        """End the reasoning with the next tokens, or as soon as any begins."""
        if self.thinking is not None:
            self.thinking.end(self.tokens[self.num_prompt_tokens :])

    def finish_after(
        self, token: int, end_tokens: Collection[int]
    ) -> tuple[FinishReason | str, bool]:
        """Return why ``token``, the last one, ends the sequence ("" if it does not), and whether it
        is text.

        NO_TOKEN means that the grammar allows no token.
        """
        params, matcher = self.request.params, self.matcher
        if token == NO_TOKEN:
            return FinishReason.GRAMMAR, False
        if token in end_tokens and (matcher is not None or not params.ignore_eos):
            return FinishReason.STOP, False
        if token in params.stop_token_ids:
            return FinishReason.STOP, False
        if matcher is not None and matcher.is_stopped:
            return FinishReason.STOP, True
        return FinishReason.LENGTH if len(self.tokens) >= self.limit else "", True

    def make_end_output(self, reason: FinishReason) -> TokenOutput:
        """Return an output without a token that says that the sequence ended for ``reason``."""
        return TokenOutput(
            self.request.request_id, self.index, NO_TOKEN, reason, False, times=self.sum_up_times()
        )

    def sum_up_times(self) -> SequenceTimes:
        """Return how the sequence has spent its time so far."""
        admitted, first = self.admitted, self.first_token_at
        return SequenceTimes(
            None if admitted is None else admitted - self.arrived,
            None if admitted is None or first is None else first - admitted,
            str(self.wait_reason),
            self.num_parked,
            tuple(self.chunks),
        )

    def note_chunk(self, begun: float, ended: float, num_tokens: int) -> list[TokenOutput]:
        """Note that a step has computed a chunk of the prompt. Return outputs that tell of it, if
        the request wants them.
        """
        if self.request.is_traced:
            admitted = self.admitted or 0.0
            begin = begun - admitted
            if len(self.chunks) == MAX_CHUNKS:
                last = self.chunks.pop()
                begin, num_tokens = last.begin, last.num_tokens + num_tokens
            self.chunks.append(PrefillChunk(begin, ended - admitted, num_tokens))
        return self._report_prefill(ended) if self.request.reports_prefill else []

    def report_prompt_logprobs(self, logprobs: list[Logprobs]) -> TokenOutput:
        """Return an output with the logprobs of the next prompt tokens."""
        self.num_pending_prompt_logprobs -= len(logprobs)
        return TokenOutput(self.request.request_id, self.index, NO_TOKEN, prompt_logprobs=logprobs)

    def _report_prefill(self, now: float) -> list[TokenOutput]:
        """Return how far the prompt is: the first time also what the cache had of it."""
        num_cached, num_computed = self.num_cached_tokens or 0, self.num_computed_tokens
        if self.index or self.num_output_tokens:
            return []
        reported = self.num_reported_tokens
        self.num_reported_tokens = max(reported, num_computed)
        seconds = 0.0 if self.admitted is None else now - self.admitted
        return [
            TokenOutput(
                self.request.request_id,
                0,
                NO_TOKEN,
                prefill=PrefillProgress(self.num_prompt_tokens, num_cached, count, seconds),
            )
            for count in dict.fromkeys((num_cached, num_computed))
            if count > reported
        ]

    @property
    def name(self) -> str:
        return f"{self.request.request_id}.{self.index}"

    @property
    def num_output_tokens(self) -> int:
        return len(self.tokens) - self.num_prompt_tokens

    def __repr__(self) -> str:
        return (
            f"<{self.name} {self.status.value} {self.num_computed_tokens}/{self.num_tokens} "
            f"seq_id={self.seq_id}>"
        )

"""What is being computed."""

from __future__ import annotations

import enum
from collections.abc import Collection
from typing import Protocol

import numpy as np
import numpy.typing as npt

from cllm.core.output import NO_TOKEN, FinishReason, TokenOutput
from cllm.core.request import Request


class Status(enum.Enum):
    """PARKED: it has run, gave its cells back for others, and waits to go on."""

    WAITING = "waiting"
    RUNNING = "running"
    PARKED = "parked"
    FINISHED = "finished"


class Matcher(Protocol):
    """How far a sequence has followed its grammar; see sampling/grammar.py."""

    @property
    def stopped(self) -> bool:
        """Nothing may follow but the end."""
        ...

    def consume(self, token: int) -> None:
        """``token`` is the next one of the sequence."""
        ...

    def take_back(self, count: int) -> None:
        """Undo the last ``count`` calls of ``consume``."""
        ...

    def accepts(self, token: int) -> bool:
        """Return whether ``token`` may come next. This takes microseconds."""
        ...

    def allowed(self) -> npt.NDArray[np.uint8] | None:
        """One bit a token, the lowest of a byte first; end tokens where the text may end. None: there is no way on."""
        ...


class Sequence:
    """One continuation of a request's prompt; ``n=3`` makes three.

    There are no phases. ``num_computed_tokens`` (tokens whose keys and values lie in the cache) catches up with
    ``num_tokens``. Lacks one: the sequence decodes. Lacks many: it prefills, in chunks. Lost its cells: it lacks again.

    Invariants: 0 <= num_computed_tokens < num_tokens until it has finished; seq_id >= 0 exactly while RUNNING.
    """

    __slots__ = (
        "__weakref__",
        "_array",
        "arrived",
        "expires",
        "index",
        "is_plain",
        "limit",
        "matcher",
        "num_cached_tokens",
        "num_computed_tokens",
        "num_failures",
        "num_prompt_tokens",
        "num_unscored",
        "order",
        "request",
        "seed",
        "seq_id",
        "status",
        "token_counts",
        "tokens",
        "urgency",
        "work",
    )

    def __init__(self, request: Request, index: int, seed: int, context_length: int) -> None:
        """``seed`` is 64 bits; ``context_length`` bounds prompt and output together, in tokens.

        Whoever compiles its grammar sets ``matcher``, if it has one.
        The scheduler sets ``arrived`` and ``expires`` (seconds of its clock), ``order``, a number that grows, ``work``,
        the tokens that were not cached when it came, and ``urgency``, the class in which it is served once it runs.
        """
        self.request = request
        self.index = index
        self.seed = seed
        self.tokens = list(request.prompt)
        self._array = np.zeros(0, np.int32)
        self.num_prompt_tokens = len(request.prompt)
        self.num_computed_tokens = 0
        self.num_failures = 0  # batches with it that could not be computed
        self.num_cached_tokens: int | None = None  # set once, at admission
        self.seq_id = -1
        self.arrived = 0.0
        self.expires: float | None = None
        self.order = 0
        self.work = 0
        self.urgency: int = request.priority
        self.status = Status.WAITING
        self.is_plain = request.params.is_plain  # looked up with every token
        # tokens of the prompt whose logprobs are still to be told; they cannot be without computing it
        scores = request.params.prompt_logprobs is not None and index == 0
        self.num_unscored = self.num_prompt_tokens - 1 if scores else 0
        self.matcher: Matcher | None = None
        self.limit = context_length
        if request.params.max_tokens is not None:
            self.limit = min(context_length, self.num_prompt_tokens + request.params.max_tokens)
        # token -> [times in the prompt, times in the output]; only kept for those who pay for penalties
        self.token_counts: dict[int, list[int]] | None = {} if request.params.penalized else None
        if self.token_counts is not None:
            for token in request.prompt:
                self.token_counts.setdefault(token, [0, 0])[0] += 1

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    @property
    def array(self) -> npt.NDArray[np.int32]:
        """The tokens as an array, made anew only when there are more of them."""
        if len(self._array) != len(self.tokens):
            self._array = np.array(self.tokens, np.int32)
        return self._array

    @property
    def findable(self) -> npt.NDArray[np.int32]:
        """The tokens that need not be computed if somebody has them."""
        return self.array[: self.num_prompt_tokens - 1 - self.num_unscored if self.num_unscored else -1]

    def scores_of(self, start: int, count: int) -> int:
        """How many of ``count`` positions from ``start`` say of a token of the prompt what is still to be told."""
        last = self.num_prompt_tokens - 1
        return max(0, min(start + count, last) - max(start, last - self.num_unscored))

    @property
    def num_lacking_tokens(self) -> int:
        return len(self.tokens) - self.num_computed_tokens

    def append(self, token: int) -> None:
        self.tokens.append(token)
        if self.matcher is not None:
            self.matcher.consume(token)
        if self.token_counts is not None:
            self.token_counts.setdefault(token, [0, 0])[1] += 1

    def finish_after(self, token: int, end_tokens: Collection[int]) -> tuple[FinishReason | str, bool]:
        """Whether ``token``, the last one, ends the sequence ("" if not), and whether it is text.

        NO_TOKEN is of one whose grammar allows none.
        """
        params, matcher = self.request.params, self.matcher
        if token == NO_TOKEN:
            return FinishReason.GRAMMAR, False
        if token in end_tokens and (matcher is not None or not params.ignore_eos):
            return FinishReason.STOP, False
        if token in params.stop_token_ids:
            return FinishReason.STOP, False
        if matcher is not None and matcher.stopped:
            return FinishReason.STOP, True
        return FinishReason.LENGTH if len(self.tokens) >= self.limit else "", True

    def end_output(self, reason: FinishReason) -> TokenOutput:
        """What tells that the sequence ended for ``reason``, without a token."""
        return TokenOutput(self.request.request_id, self.index, NO_TOKEN, reason, False)

    @property
    def name(self) -> str:
        return f"{self.request.request_id}.{self.index}"

    @property
    def num_output_tokens(self) -> int:
        return len(self.tokens) - self.num_prompt_tokens

    def __repr__(self) -> str:
        return f"<{self.name} {self.status.value} {self.num_computed_tokens}/{self.num_tokens} seq_id={self.seq_id}>"

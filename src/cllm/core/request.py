"""Requests to generate and to embed."""

from __future__ import annotations

import enum
import secrets
from typing import Literal, NamedTuple

import msgspec

from cllm.core.model_info import ModelInfo
from cllm.core.params import SamplingParams
from cllm.errors import BadRequest, PromptTooLong


class Priority(enum.IntEnum):
    """Classes of service; a lower number is served before a higher one."""

    INTERACTIVE = 0
    NORMAL = 1
    BATCH = 2


PriorityName = Literal["interactive", "normal", "batch"]
"""A class as users write it: in requests, options and files."""

Adapters = tuple[tuple[str, float], ...]
"""LoRA adapters, by name, each with the scale of its change to the model."""


class AdapterFile(NamedTuple):
    """A file with a LoRA adapter, and the ``hash`` of its content.

    An activated LoRA changes the model only from the tokens ``invocation`` on. Other adapters
    change it from the beginning, and have none.
    """

    hash: str
    invocation: tuple[int, ...] = ()


class Request(msgspec.Struct, frozen=True):
    """One prompt and how to continue it; it becomes ``params.n`` sequences.

    Its ``request_id`` is never used again. The token ids of ``prompt`` have passed
    ``check_prompt``. The accounts of one priority class are served fairly. The request must start
    within ``queue_timeout`` seconds of its arrival, and finish within ``deadline`` seconds.

    Requests share cached prefixes only if their ``cache_salt`` is equal. The prompt's first
    ``num_base_tokens`` are computed without ``adapters``, because an activated LoRA changes the
    model only from there on. Requests with other adapters have other salts, unless all that they
    can share is computed without adapters. Later prompts are expected to agree with this one up to
    one of the ``boundaries``, numbers of tokens. If it ``reports_prefill``, its outputs tell how
    far its prompt is; if it ``is_traced``, its times have the chunks of its prompt. Requests share
    results only if their ``reading`` is equal, a text that differs if the readers of their outputs
    may end these at other places.
    """

    request_id: str
    prompt: list[int]
    params: SamplingParams
    account: str = ""
    priority: Priority = Priority.NORMAL
    deadline: float | None = None
    queue_timeout: float | None = None
    cache_salt: str = ""
    adapters: Adapters = ()
    num_base_tokens: int = 0
    reports_prefill: bool = False
    reading: str = ""
    is_traced: bool = False
    boundaries: tuple[int, ...] = ()

    @property
    def key(self) -> str:
        """The former name of ``account``, for policies that users wrote."""
        return self.account

    def with_seed(self) -> Request:
        """Return the request with a seed, which is drawn if it has none and needs one.

        Computing it again, also in another engine, then gives the same text.
        """
        if self.params.is_greedy or self.params.seed is not None:
            return self
        params = self.params.replace_unchecked(seed=secrets.randbits(63))
        return msgspec.structs.replace(self, params=params)


class SequenceProgress(msgspec.Struct, frozen=True, array_like=True):
    """The delivered part of one sequence, and everything else that another engine needs to continue
    it.

    Its output is ``tokens``, and it has reported ``num_prompt_logprobs``. TokenOutput explains
    ``mirostat_mu``.
    """

    tokens: list[int] = []
    num_prompt_logprobs: int = 0
    mirostat_mu: float | None = None


class EmbeddingRequest(msgspec.Struct, frozen=True):
    """Texts to embed, as checked token ids; each gets one embedding."""

    request_id: str
    texts: list[list[int]]
    account: str = ""
    priority: Priority = Priority.NORMAL


def check_generates(info: ModelInfo, routes: str = "") -> None:
    """Raise BadRequest for a model that does not generate text. The error names ``routes``, which
    such a model serves.
    """
    if not info.generates:
        use = f" ({routes})" if routes else ""
        message = f"This model computes embeddings{use}; it does not generate text."
        raise BadRequest(message, param="model", code="unsupported_model")


def check_prompt(prompt: list[int], vocabulary_size: int, context_length: int, param: str) -> None:
    """Raise BadRequest, naming the field ``param``, for a prompt that can never be computed."""
    if not prompt:
        raise BadRequest(
            f"Invalid '{param}': the prompt is empty.", param=param, code="empty_prompt"
        )
    if min(prompt) < 0 or max(prompt) >= vocabulary_size:
        message = f"Invalid '{param}': token ids must be between 0 and {vocabulary_size - 1}."
        raise BadRequest(message, param=param, code="invalid_value")
    if len(prompt) >= context_length:
        raise PromptTooLong(len(prompt), context_length, param)

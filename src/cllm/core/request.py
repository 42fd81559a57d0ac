"""What was asked."""

from __future__ import annotations

import enum

import msgspec

from cllm.core.params import SamplingParams
from cllm.errors import BadRequest, context_length_exceeded


class Priority(enum.IntEnum):
    """Classes of service; a lower number is served before a higher one."""

    INTERACTIVE = 0
    NORMAL = 1
    BATCH = 2


class Request(msgspec.Struct, frozen=True):
    """One prompt and how to continue it; ``params.n`` sequences are made of it.

    prompt: token ids that ``check_prompt`` has let pass. ``request_id`` names it for ever and is unique. key: on
    whose account it goes; those of one class share fairly. Seconds from arrival: it may wait at most queue_timeout,
    and must have finished within deadline. cache_salt: what is computed is shared only among requests with the same.
    """

    request_id: str
    prompt: list[int]
    params: SamplingParams
    key: str = ""
    priority: Priority = Priority.NORMAL
    deadline: float | None = None
    queue_timeout: float | None = None
    cache_salt: str = ""


class EmbeddingRequest(msgspec.Struct, frozen=True):
    """Texts, as token ids that have been checked, of each of which a vector is wanted; key as in Request."""

    request_id: str
    texts: list[list[int]]
    key: str = ""
    priority: Priority = Priority.NORMAL


def check_prompt(prompt: list[int], vocabulary_size: int, context_length: int, param: str) -> None:
    """Raise BadRequest, naming the field ``param``, for a prompt that can never be computed."""
    if not prompt:
        raise BadRequest(f"Invalid '{param}': the prompt is empty.", param=param, code="empty_prompt")
    if min(prompt) < 0 or max(prompt) >= vocabulary_size:
        message = f"Invalid '{param}': token ids must be between 0 and {vocabulary_size - 1}."
        raise BadRequest(message, param=param, code="invalid_value")
    if len(prompt) >= context_length:
        raise context_length_exceeded(len(prompt), context_length, param)

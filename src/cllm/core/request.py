"""What was asked."""

from __future__ import annotations

import msgspec

from cllm.core.params import SamplingParams


class Request(msgspec.Struct, frozen=True):
    """One prompt and how to continue it; ``params.n`` sequences are made of it.

    prompt: token ids, at least one, all inside the vocabulary and together shorter than the context: whoever makes
    a Request has checked that. ``request_id`` names it for ever and is unique.
    """

    request_id: str
    prompt: list[int]
    params: SamplingParams

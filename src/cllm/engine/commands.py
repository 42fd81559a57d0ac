"""Commands to an engine."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from cllm.core.request import EmbeddingRequest, Request

if TYPE_CHECKING:
    from cllm.core.sequence import Sequence


class Add(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """A new request."""

    request: Request


class Embed(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """A new request to embed texts."""

    request: EmbeddingRequest


class Abort(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """End a request, or only its sequence with ``index``. Unknown ones are ignored."""

    request_id: str
    index: int | None = None

    def applies_to(self, seq: Sequence) -> bool:
        return seq.request.request_id == self.request_id and self.index in (None, seq.index)


class Explain(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Report the last ``num_steps`` steps, the running sequences, and what the others wait for."""

    num_steps: int


class Close(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Stop the engine, even if sequences are running."""


Command = Add | Embed | Abort | Explain | Close

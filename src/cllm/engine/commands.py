"""What an engine is told."""

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
    """Texts of which vectors are wanted."""

    request: EmbeddingRequest


class Abort(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """End a request, or the one of its sequences with ``index``; unknown ones are ignored."""

    request_id: str
    index: int | None = None

    def means(self, seq: Sequence) -> bool:
        return seq.request.request_id == self.request_id and self.index in (None, seq.index)


class Explain(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Say why: the last ``num_steps`` steps, who runs, who waits for what."""

    num_steps: int


class Close(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Leave the loop, whatever is running."""


Command = Add | Embed | Abort | Explain | Close

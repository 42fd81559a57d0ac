"""The messages between the processes. Each is a 4-byte length and MessagePack, over the child's
stdin and stdout.

The parent sends Start once, then commands (engine/commands.py), Tokenize, Abandon and Ping. The
child sends the other structs below, and an engine's replies (engine/commands.py).
"""

from __future__ import annotations

import struct
from typing import Any

import msgspec

from cllm.core.model_info import ModelInfo
from cllm.core.output import Stats, TokenOutput
from cllm.core.segments import Segment
from cllm.core.vocabulary import VocabularyTable
from cllm.engine.commands import Reply
from cllm.engine.params import EngineParams

LENGTH = struct.Struct("<I")


class Start(msgspec.Struct, frozen=True, array_like=True):
    """Load the model, and record each step in the file at the path ``step_record``."""

    params: EngineParams
    step_record: str


class Loading(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The loaded share of the model, 0 to 1."""

    share: float


class Ready(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The engine is ready.

    ``params`` are the parameters of Start with the chosen sizes. The engine takes at most
    ``max_bytes`` of RAM, or of GPU memory if the model is there; 0 if unknown.
    """

    info: ModelInfo
    vocabulary: VocabularyTable
    params: EngineParams


class Failed(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The engine cannot start; ``reason`` is one line of text for the user."""

    reason: str


class Stepped(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """All outputs of one step, for all sequences."""

    outputs: list[TokenOutput]
    stats: Stats


class Tokenize(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Texts to tokenize; the answer is one or more Tokenized with the same ``number``."""

    number: int
    texts: list[list[Segment]]


class Abandon(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The answer to the Tokenize with this ``number`` is not needed any longer."""

    number: int


class Ping(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """A message without effect, for a process that has not answered. The step record shows whether
    the process reads it.
    """


class Tokenized(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The token ids of each text, or None if that failed.

    With ``more``, another message follows, whose first list continues the last one of this message.
    """

    number: int
    tokens: list[list[int]] | None
    more: bool = False


FromChild = Loading | Ready | Failed | Stepped | Tokenized | Reply

_encoder = msgspec.msgpack.Encoder()


def frame(message: Any) -> bytes:
    """Return a message as bytes: its length, then its body."""
    body = _encoder.encode(message)
    return LENGTH.pack(len(body)) + body

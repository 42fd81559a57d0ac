"""What the client of a stream has received, so that another server can continue the stream."""

from __future__ import annotations

import hashlib
import re
import secrets
import struct
from array import array
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Annotated

import msgspec

from cllm.core.model_info import ModelInfo
from cllm.core.output import FAILURES, Logprobs, TokenOutput
from cllm.core.request import Request, SequenceProgress
from cllm.errors import BadRequest, EngineError, FatalRequest
from cllm.store.charges import Count
from cllm.text.output_reader import Delta, OutputReader, Usage

LENGTH = struct.Struct(">I")
MAX_PROGRESS_BYTES = 16_000_000  # of one stream; one that has more cannot be continued

# what the id of an answer's rest has more than that of the answer, in the name of a sequence
AGAIN = re.compile(r"-again[0-9a-f]{8}(?=-\d+\.\d+\b)")

# the id of a request to engines, for one of the prompts of an answer
PART = re.compile(r"(?P<answer>.*?)(?:-again[0-9a-f]{8})?-\d+")


class Origin(msgspec.Struct, frozen=True, array_like=True):
    """What another server needs to make the request of a stream again.

    ``created`` is the time of the answer, in seconds since 1970. ``seeds`` are those of the
    prompts, and ``inputs`` is a digest of the model and the prompts (``digest_inputs``). Of the
    ``num_prompt_tokens`` tokens of the prompts, ``num_reused_tokens`` were not computed because an
    equal request shared its result.
    """

    request_id: Annotated[str, msgspec.Meta(pattern=r"^[0-9A-Za-z_-]{1,200}\Z")]
    created: Annotated[float, msgspec.Meta(ge=0, le=1e11)]
    seeds: list[Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)] | None]
    inputs: bytes
    num_reused_tokens: Count
    num_prompt_tokens: Count = 0

    def make_engine_id(self) -> str:
        """Return an id, never used again, for the rest of the answer in a server's engines."""
        return f"{self.request_id}-again{secrets.token_hex(4)}"


class Ending(msgspec.Struct, frozen=True, array_like=True):
    """The end of a stream, with the token counts of the whole answer.

    If the stream ended with an error, ``error`` is its message. Then ``may_continue`` says whether
    another server could compute the rest, and ``is_draining`` whether the server shuts down.
    """

    prompt_tokens: Count
    completion_tokens: Count
    cached_tokens: Count
    reasoning_tokens: Count
    error: str = ""
    may_continue: bool = False
    is_draining: bool = False


class Delivery(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One TokenOutput, of the choice ``choice`` of all prompts together. The other fields have the
    names and meanings of TokenOutput.
    """

    choice: Count
    token: int
    finish: str = ""
    is_text: bool = True
    num_cached_tokens: Count = 0
    logprobs: Logprobs | None = None
    prompt_logprobs: list[Logprobs] | None = None
    mirostat_mu: float | None = None


class Progress(msgspec.Struct, frozen=True, array_like=True):
    """The progress of one frame: what was read together. The first frame of a stream has the
    ``origin``, and the last one the ``ending``. One frame ``ends_reasoning`` if the client has
    asked for that.
    """

    outputs: list[Delivery] = []
    origin: Origin | None = None
    ending: Ending | None = None
    ends_reasoning: bool = False


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Progress)


class ProgressRecorder:
    """Records what is read from an answer, as the progress of frames."""

    def __init__(self, requests: Sequence[Request], origin: Origin, usage: Usage) -> None:
        """``requests`` are those of the answer, and ``usage`` counts their tokens."""
        self._first = {
            request.request_id: i * request.params.n for i, request in enumerate(requests)
        }
        self._origin: Origin | None = origin
        self._usage = usage
        self._outputs: list[Sequence[object]] = []
        self._ends_reasoning: bool | None = None  # None until it was asked for
        self.error: Exception | None = None  # with which the stream ends

    def add(self, outputs: Sequence[TokenOutput]) -> None:
        """Note outputs that are read. Those from the first failure on are never read."""
        for output in outputs:
            if output.finish in FAILURES:
                return
            if output.prefill is not None:  # another server has its own
                continue
            choice = self._first[output.request_id] + output.index
            head = choice, output.token
            # the order and the defaults are those of Delivery
            rest = (
                output.finish,
                output.is_text,
                output.num_cached_tokens,
                output.logprobs,
                output.prompt_logprobs,
                output.mirostat_mu,
            )
            self._outputs.append(head if rest == PLAIN else head + rest)

    def end_reasoning(self) -> None:
        """Note that the client has asked for the end of the reasoning. May be called again."""
        if self._ends_reasoning is None:
            self._ends_reasoning = True

    def take(self, *, is_last: bool) -> bytes:
        """Return the encoded Progress since the last call."""
        outputs, self._outputs = self._outputs, []
        ends_reasoning = bool(outputs and self._ends_reasoning)
        if not (is_last or self._origin or ends_reasoning):
            return _encoder.encode((outputs,))
        origin, self._origin = self._origin, None
        ending = self._make_ending() if is_last else None
        if not ends_reasoning:
            return _encoder.encode((outputs, origin, ending))
        self._ends_reasoning = False
        return _encoder.encode((outputs, origin, ending, True))

    def _make_ending(self) -> Ending:
        usage, error = self._usage, self.error
        return Ending(
            usage.prompt_tokens,
            usage.completion_tokens,
            usage.cached_tokens,
            usage.reasoning_tokens,
            "" if error is None else str(error) or type(error).__name__,
            isinstance(error, EngineError) and not isinstance(error, FatalRequest),
            isinstance(error, EngineError) and error.reason == "draining",
        )


PLAIN = ("", True, 0, None, None, None)


class Delivered:
    """The part of a stream that its client has, ``elapsed`` seconds after its request came."""

    def __init__(self, progress: bytes, elapsed: float) -> None:
        """``progress`` has the progress of all frames, in order, each after its length (LENGTH).

        Raises BadRequest if it cannot be read.
        """
        self.elapsed = elapsed
        try:
            frames = [_decoder.decode(part) for part in split_progress(progress)]
        except (msgspec.MsgspecError, ValueError) as error:
            raise cannot_continue("its progress cannot be read") from error
        if not frames or frames[0].origin is None:
            raise cannot_continue("its progress has no beginning")
        self.origin = frames[0].origin
        self.ends_reasoning = any(frame.ends_reasoning for frame in frames)
        self._frames = frames

    def restore(self, requests: Sequence[Request], inputs: bytes) -> list[Request]:
        """Return ``requests``, which are those of the stream, with the seeds of the stream.

        ``inputs`` is their digest. Raises BadRequest if it is another one than that of the stream.
        """
        if inputs != self.origin.inputs or len(requests) != len(self.origin.seeds):
            raise cannot_continue("this server has another model or makes another prompt of it")
        return [
            msgspec.structs.replace(request, params=request.params.replace_unchecked(seed=seed))
            for request, seed in zip(requests, self.origin.seeds, strict=True)
        ]

    def read(self, reader: OutputReader, requests: Sequence[Request]) -> list[list[Delta]]:
        """Feed ``reader`` with what was delivered, in the same parts, and return its deltas.

        Raises BadRequest for progress that no stream of ``requests`` has.
        """
        n = requests[0].params.n
        try:
            return [
                reader.read(
                    TokenOutput(
                        requests[one.choice // n].request_id,
                        one.choice % n,
                        one.token,
                        one.finish,
                        one.is_text,
                        one.num_cached_tokens,
                        one.logprobs,
                        one.prompt_logprobs,
                        one.mirostat_mu,
                    )
                    for one in frame.outputs
                )[0]
                for frame in self._frames
                if frame.outputs
            ]
        except (IndexError, KeyError) as error:
            raise cannot_continue("its progress does not belong to it") from error

    def list_begun(
        self, requests: Sequence[Request], unfinished: Sequence[int]
    ) -> dict[str, dict[int, SequenceProgress]]:
        """Return what the choices ``unfinished`` have delivered, by request id and index."""
        tokens: dict[int, list[int]] = {choice: [] for choice in unfinished}
        scored: dict[int, int] = defaultdict(int)
        mirostat_mus: dict[int, float | None] = {}
        for frame in self._frames:
            for one in frame.outputs:
                if one.choice in tokens:
                    if one.token >= 0:
                        tokens[one.choice].append(one.token)
                        mirostat_mus[one.choice] = one.mirostat_mu
                    scored[one.choice] += len(one.prompt_logprobs or ())
        n = requests[0].params.n
        return {
            request.request_id: {
                choice - i * n: SequenceProgress(
                    tokens[choice], scored[choice], mirostat_mus.get(choice)
                )
                for choice in range(i * n, i * n + n)
                if choice in tokens
            }
            for i, request in enumerate(requests)
        }


def split_progress(data: bytes) -> Iterator[memoryview]:
    """Yield the parts of ``data``, each of which follows its length.

    Raises ValueError for data that ends within a part.
    """
    view, at = memoryview(data), 0
    while at < len(data):
        if at + LENGTH.size > len(data):
            raise ValueError("the last length is cut off")
        begin = at + LENGTH.size
        at = begin + LENGTH.unpack_from(data, at)[0]
        if at > len(data):
            raise ValueError("the last part is cut off")
        yield view[begin:at]


def digest_inputs(model: ModelInfo | None, requests: Sequence[Request], adapters: str) -> bytes:
    """Return a digest of all that decides what tokens may follow: the model's fingerprint, the
    ``contents`` of the adapters, and the prompts of ``requests``.
    """
    digest = hashlib.sha256((model.fingerprint if model else "").encode())
    for request in requests:
        used = adapters if request.adapters else ""
        uses = repr((len(request.prompt), used, request.num_base_tokens))
        digest.update(uses.encode() + array("q", request.prompt).tobytes())
    return digest.digest()


def cannot_continue(reason: str) -> BadRequest:
    """Return the error for a stream that this server cannot continue."""
    return BadRequest(
        f"The stream cannot be continued: {reason}.", code="cannot_continue", status=409
    )


def find_first_name(text: str) -> str:
    """Return the name of an engine's sequence, or a text with such names, as the name was on the
    server that has begun the answer.
    """
    return AGAIN.sub("", text)


def find_answer_id(request_id: str) -> str:
    """Return the id of the answer for which a request with this id was sent to the engines."""
    found = PART.fullmatch(request_id)
    return found["answer"] if found else ""

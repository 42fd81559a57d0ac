"""Keeps what the client of a stream has received, so that another replica can continue it."""

from __future__ import annotations

import struct
import time

import msgspec

from cllm.cluster.leases import Replica
from cllm.process.suspects import MAX_ENDS
from cllm.server.cluster.continuation import Continue
from cllm.serving.delivered import LENGTH, MAX_PROGRESS_BYTES, Ending, Progress
from cllm.store.charges import UsageCounts

HEAD = struct.Struct(">II")  # of a frame: the lengths of its progress and of its data
MAX_KEPT_BYTES = 256_000_000  # of the progress of all streams of a front
MAX_FRAME_BYTES = 64_000_000  # an echoed prompt with its logprobs takes less
OUTPUTS_ONLY = 0x91  # first byte of a progress with nothing but outputs: an array of one element

_decoder = msgspec.msgpack.Decoder(Progress)


class ReplayMemory:
    """The bytes that all streams of a front keep."""

    def __init__(self) -> None:
        self.num_bytes = 0


class Replay:
    """One stream in frames, from one replica after the other. Close it.

    ``ending`` is what the last replica has said about the end of the stream. If another replica may
    continue, ``fault`` has the bytes with which that replica ended it, which the client has not
    got. ``num_deaths`` counts the replicas that have ended since the client has got the latest
    token, except by a shutdown. ``tried`` has the runs of replicas that have not continued since
    then.
    """

    def __init__(
        self,
        memory: ReplayMemory,
        begun: float | None = None,
        received: UsageCounts | None = None,
    ) -> None:
        """The request arrived at the time ``begun`` of the monotonic clock, by default now. The
        tokens that the client gets are counted in ``received``.
        """
        self._memory = memory
        self._received = UsageCounts() if received is None else received
        self._begun = time.monotonic() if begun is None else begun
        self._kept: bytearray | None = bytearray()  # None if it has become too long
        self._rest = bytearray()  # the beginning of the next frame
        self.is_broken = False
        self.has_begun = False  # whether there has been a frame
        self.has_outputs = False  # whether the latest replica has computed a token
        self.ending: Ending | None = None
        self._is_drained = False  # whether the latest replica has ended it to shut down
        self.fault = b""
        self.num_deaths = 0
        self.tried: set[tuple[str, str]] = set()

    def feed(self, data: bytes | bytearray) -> bytes:
        """Take bytes from the replica, and return those for the client.

        If the bytes are not frames, or come after the last one, ``is_broken`` is set, and nothing
        that follows is read.
        """
        if self._rest:
            self._rest += data
            data = self._rest
        at, parts = 0, []
        while len(data) - at >= HEAD.size:
            length, size = HEAD.unpack_from(data, at)
            begin = at + HEAD.size
            if length + size > MAX_FRAME_BYTES or self.is_complete:
                self.is_broken = True
                break
            if begin + length + size > len(data):
                break
            at = begin + length + size
            try:
                is_for_client = self._take(bytes(data[begin : begin + length]))
            except msgspec.MsgspecError:
                self.is_broken = True
                break
            if is_for_client:
                parts.append(bytes(data[begin + length : at]))
            else:
                self.fault = bytes(data[begin + length : at])
        if data is self._rest:
            del self._rest[:at]
        else:
            self._rest += data[at:]
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def _take(self, progress: bytes) -> bool:
        """Keep the progress of a frame. Return whether the client gets the frame's data."""
        if progress[:1] != bytes([OUTPUTS_ONLY]):
            decoded = _decoder.decode(progress)
            self.ending = decoded.ending
            if self.ending is not None:
                self._is_drained = self.ending.is_draining
                return not self.ending.may_continue
            has_outputs = bool(decoded.outputs)
            if self.has_begun and not has_outputs:
                return True
            if decoded.origin is not None and not self.has_begun:
                self._received.prompt_tokens = decoded.origin.num_prompt_tokens
                self._received.cached_tokens = decoded.origin.num_reused_tokens
            self.has_begun = True
        else:
            has_outputs = len(progress) > 2
            if not has_outputs:  # a heartbeat
                return True
            decoded = _decoder.decode(progress)
        for one in decoded.outputs:
            self._received.cached_tokens += one.num_cached_tokens
            self._received.completion_tokens += one.token >= 0
        if has_outputs:
            self.has_outputs, self.num_deaths, self.fault = True, 0, b""
            self.tried.clear()
        self._keep(progress)
        return True

    def _keep(self, progress: bytes) -> None:
        if self._kept is None:
            return
        size = LENGTH.size + len(progress)
        self._kept += LENGTH.pack(len(progress)) + progress
        self._memory.num_bytes += size
        if len(self._kept) > MAX_PROGRESS_BYTES or self._memory.num_bytes > MAX_KEPT_BYTES:
            self.close()

    def close(self) -> None:
        """Forget what was kept, so that the stream cannot be continued."""
        if self._kept is not None:
            self._memory.num_bytes -= len(self._kept)
            self._kept = None

    @property
    def is_complete(self) -> bool:
        """Whether the client has the whole stream, or its last error."""
        return self.ending is not None and not self.ending.may_continue

    @property
    def can_continue(self) -> bool:
        """Whether another replica may be asked to continue. After MAX_ENDS deaths without a token,
        the request may be the cause, although replicas survive requests that kill engines.
        """
        return (
            self.has_begun
            and self._kept is not None
            and not self.is_complete
            and self.num_deaths < MAX_ENDS
        )

    def lose(self, replica: Replica) -> None:
        """Note that ``replica`` has ended. A part of a frame that it has sent is dropped."""
        self.note_refusal(replica)
        self.has_outputs = self.is_broken = False
        is_draining = replica.lease is not None and replica.lease.status == "draining"
        self.num_deaths += not (is_draining or self._is_drained)
        self._is_drained = False

    def note_refusal(self, replica: Replica) -> None:
        """Note that ``replica`` cannot continue."""
        self._rest.clear()
        self.tried.add(name_run(replica))

    def may_try(self, replica: Replica) -> bool:
        """Return whether a replica has not been tried since the latest token, or has been started
        again.
        """
        return name_run(replica) not in self.tried

    def make_body(self, path: str, query: bytes, content_type: str, body: bytes) -> bytes:
        """Return the body of the request that asks a replica to continue."""
        assert self._kept is not None
        asked = Continue(
            path, query, content_type, body, bytes(self._kept), time.monotonic() - self._begun
        )
        return msgspec.msgpack.encode(asked)


def name_run(replica: Replica) -> tuple[str, str]:
    """Return the address of a replica, and a text that differs after each of its starts."""
    return replica.url, "" if replica.lease is None else replica.lease.epoch

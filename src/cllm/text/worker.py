"""The child process of workers.py: ``python -m cllm.text.worker MODULE FUNCTION CPU_LIMIT``.

A frame on stdin or stdout is a 4-byte length and JSON. The first frame is the argument of FUNCTION,
which returns the Work. The child then sends READY, so that no question pays for this start.
Questions follow, one at a time, and the child answers each with a Reply.

Several of these processes may run, so this file and the modules that it runs import as little as
possible.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import signal
import sys
import traceback
from collections.abc import Callable
from typing import IO, Any, NamedTuple

from cllm.errors import BadRequest, EngineError

HEAD = 4  # bytes of a frame's length
READY = b'"+"'
START_CPU_LIMIT = 60.0  # seconds of CPU time until a process is ready
MEMORY_LIMIT = 1 << 30  # bytes of address space

Work = Callable[[Any], str]  # may raise BadRequest


class Reply(NamedTuple):
    """A text, or the ``error`` message of a BadRequest, or of an EngineError if ``is_ours``."""

    text: str
    error: str = ""
    param: str | None = None
    code: str | None = None
    is_ours: bool = False

    def get(self) -> str:
        """Return the text, or raise the error."""
        if self.is_ours:
            raise EngineError(self.error)
        if self.error:
            raise BadRequest(self.error, param=self.param, code=self.code)
        return self.text


def describe_refusal(error: BadRequest) -> Reply:
    return Reply("", str(error), error.param, error.code)


def to_json(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False).encode("utf-8", "surrogatepass")


def encode_frame(body: bytes) -> bytes:
    return len(body).to_bytes(HEAD, "little") + body


def read_frame(stream: IO[bytes]) -> Any:
    """Return the value of the next frame. Raises EOFError at the end of the stream."""
    size = int.from_bytes(stream.read(HEAD), "little")
    body = stream.read(size)
    if not body or len(body) < size:
        raise EOFError
    return json.loads(body)


def limit_time(seconds: float) -> None:
    """Let the system kill this process after ``seconds`` of CPU time, whatever code it runs; 0
    means no limit.
    """
    if hasattr(signal, "setitimer"):  # not on Windows, where only the parent ends a process
        signal.setitimer(signal.ITIMER_PROF, seconds)


def serve(prepare: Callable[[Any], Work], cpu_limit: float, output: IO[bytes]) -> None:
    argument = read_frame(sys.stdin.buffer)
    limit_time(START_CPU_LIMIT)
    work = prepare(argument)
    limit_time(0)
    answer = READY
    while True:
        output.write(encode_frame(answer))
        output.flush()
        question = read_frame(sys.stdin.buffer)
        limit_time(cpu_limit)
        try:
            reply = Reply(work(question))
        except BadRequest as error:
            reply = describe_refusal(error)
        except MemoryError:
            raise
        except Exception as error:  # noqa: BLE001  # a bug must not look like a limit
            traceback.print_exc()
            why = f"Internal error ({type(error).__name__}); see the server's log."
            reply = Reply("", why, is_ours=True)
        answer = to_json(reply)
        limit_time(0)


def main(module: str, function: str, cpu_limit: str) -> None:
    own_stdout = os.dup(1)
    os.dup2(2, 1)  # what libraries print goes to stderr
    with contextlib.suppress(ImportError, OSError, ValueError):
        import resource

        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_LIMIT, MEMORY_LIMIT))
    # the parent is gone
    with contextlib.suppress(EOFError, BrokenPipeError), os.fdopen(own_stdout, "wb") as output:
        serve(getattr(importlib.import_module(module), function), float(cpu_limit), output)


if __name__ == "__main__":
    main(*sys.argv[1:])

"""A process that renders chat templates, ``python -m cllm.text.render_child``: started and killed by rendering.py.

Over stdin and stdout go frames of a 4-byte length and JSON: first the texts of the vocabulary that a template needs,
then what is to be rendered, one at a time. An answer is a text, or why there is none.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import struct
import sys
from typing import IO, TYPE_CHECKING, Any, NamedTuple, cast

from cllm.errors import BadRequest
from cllm.text.chat_template import ChatTemplate

if TYPE_CHECKING:
    from cllm.backends.base import Vocabulary

LENGTH = struct.Struct("<I")
MEMORY_LIMIT = 1 << 30  # bytes of address space
CPU_LIMIT = 2.0  # seconds for one text


class Texts(NamedTuple):
    """What of a vocabulary a template needs."""

    chat_template: str | None
    control_tokens: list[str]
    special_texts: dict[str, Any]


def frame(value: Any) -> bytes:
    body = json.dumps(value, ensure_ascii=False).encode("utf-8", "surrogatepass")
    return LENGTH.pack(len(body)) + body


def read_frame(stream: IO[bytes]) -> Any:
    """The next value. Raises EOFError at the end of the stream."""
    head = stream.read(LENGTH.size)
    if len(head) < LENGTH.size:
        raise EOFError
    body = stream.read(size := LENGTH.unpack(head)[0])
    if len(body) < size:
        raise EOFError
    return json.loads(body)


def limit_resources() -> None:
    """Not on Windows, where only the parent's clock ends a text that takes too long."""
    with contextlib.suppress(ImportError, OSError, ValueError):
        import resource

        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_LIMIT, MEMORY_LIMIT))


def allow(seconds: float) -> None:
    """The system ends this process when it has computed for so long; 0: never."""
    if hasattr(signal, "setitimer"):
        signal.setitimer(signal.ITIMER_PROF, seconds)


def answer(template: ChatTemplate, asked: dict[str, Any]) -> dict[str, Any]:
    try:
        return {"text": template.render(asked["messages"], asked["tools"], **asked["variables"])}
    except BadRequest as error:
        return {"error": str(error), "param": error.param, "code": error.code}


def main() -> None:
    own_stdout = os.dup(1)
    os.dup2(2, 1)  # whatever libraries print
    limit_resources()
    with contextlib.suppress(EOFError), os.fdopen(own_stdout, "wb") as output:
        texts = Texts(**read_frame(sys.stdin.buffer))
        allow(CPU_LIMIT)
        template = ChatTemplate(cast("Vocabulary", texts))
        allow(0)
        while True:
            asked = read_frame(sys.stdin.buffer)
            allow(CPU_LIMIT)
            data = frame(answer(template, asked))
            allow(0)
            output.write(data)
            output.flush()


if __name__ == "__main__":
    main()

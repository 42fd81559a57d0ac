"""Chat templates in processes of their own. A template, or a message that it chokes on, can take for ever and all
memory there is; whoever renders must be able to be killed.
"""

from __future__ import annotations

import asyncio
import logging
import os
import subprocess
import sys
import threading
from typing import Any

from cllm.backends.base import Vocabulary
from cllm.errors import BadRequest
from cllm.text.render_child import CPU_LIMIT, MEMORY_LIMIT, Texts, frame, read_frame

MAX_PROCESSES = 2
WALL_LIMIT = 15.0  # seconds for one text, on a machine that is busy with something else
INHERITED = ("PATH", "PYTHONPATH", "PYTHONHOME", "LANG", "LC_ALL", "TZ", "SYSTEMROOT", "TMPDIR")

log = logging.getLogger("cllm.text")


class Renderer:
    """Processes that are started when they are needed, and kept. One text at a time goes to each."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        texts = Texts(vocabulary.chat_template, vocabulary.control_tokens, vocabulary.special_texts)
        self._texts = frame(texts._asdict())
        self._free = asyncio.Semaphore(MAX_PROCESSES)
        self._idle: list[RenderProcess] = []
        self._busy: set[RenderProcess] = set()

    async def render(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]], **variables: Any) -> str:
        """As ChatTemplate.render. Raises BadRequest, also if it takes too long or too much memory."""
        asked = {"messages": messages, "tools": tools, "variables": variables}
        async with self._free:
            process = self._idle.pop() if self._idle else RenderProcess(self._texts)
            self._busy.add(process)
            answer: dict[str, Any] | None = None
            try:
                answer = await asyncio.wait_for(asyncio.to_thread(process.ask, asked), WALL_LIMIT)
            except TimeoutError:
                log.warning("a chat template took more than %g s and was ended", WALL_LIMIT)
            finally:
                self._busy.discard(process)
                if answer is None:
                    process.kill()
                else:
                    self._idle.append(process)
        if answer is None:
            message = (
                f"The chat template failed: for these messages it takes more than {CPU_LIMIT:g} seconds, or more than "
                f"{MEMORY_LIMIT >> 20} MiB of memory."
            )
            raise BadRequest(message, param="messages", code="template_limit")
        if "error" in answer:
            raise BadRequest(answer["error"], param=answer["param"], code=answer["code"])
        return str(answer["text"])

    def close(self) -> None:
        for process in [*self._idle, *self._busy]:
            process.kill()


class RenderProcess:
    """One process; used by one thread at a time, killed by any."""

    def __init__(self, texts: bytes) -> None:
        self._texts = texts
        self._lock = threading.Lock()
        self._is_killed = False
        self._process: subprocess.Popen[bytes] | None = None

    def ask(self, asked: dict[str, Any]) -> dict[str, Any] | None:
        """The answer; None if the process has come to its end."""
        try:
            data = frame(asked)
        except RecursionError:
            return {"error": "The messages or tools are nested too deeply.", "param": "messages", "code": None}
        try:
            process = self._process or self._start()
            assert process.stdin
            assert process.stdout
            process.stdin.write(data)
            process.stdin.flush()
            answer: dict[str, Any] = read_frame(process.stdout)
        except (OSError, EOFError, ValueError):  # ValueError: its end of the pipe was closed
            return None
        return answer

    def _start(self) -> subprocess.Popen[bytes]:
        with self._lock:
            if self._is_killed:
                raise OSError
            process = self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "cllm.text.render_child"],  # -P: not what lies in the current folder
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env={name: os.environ[name] for name in INHERITED if name in os.environ},
                start_new_session=True,
            )
        assert process.stdin
        process.stdin.write(self._texts)
        return process

    def kill(self) -> None:
        """End the process; whoever reads from it gets None."""
        with self._lock:
            self._is_killed = True
            if self._process is None:
                return
        self._process.kill()
        threading.Thread(target=self._bury, daemon=True).start()

    def _bury(self) -> None:
        assert self._process
        with self._process:  # closes the pipes, and waits
            pass

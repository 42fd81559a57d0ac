"""The process that sends the requests of load runs, and reads and compares reports.

It imports what this process does not need, and a fault in a report that a client has uploaded ends
only the process that reads it.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
from asyncio.subprocess import Process
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager, suppress

import msgspec

from cllm.environment import child_environment
from cllm.errors import CLLMError
from cllm.server.bench.messages import MAX_LINE, Done, Failed, Message, Order, Running

PROGRAM = "cllm.cli.bench.worker"  # an import of it would go up

decode = msgspec.json.Decoder[Message](Message).decode


class Refused(CLLMError):
    """The process cannot carry out its order."""


async def carry_out(order: Order, note: Callable[[Running], None] = lambda _: None) -> bytes:
    """Let a process carry out an order, and return the result, JSON. ``note`` is called with each
    message about the progress. If this is cancelled, the process ends. Raises Refused.
    """
    try:
        async with running_process() as process:
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.write(msgspec.json.encode(order) + b"\n")
            while line := await process.stdout.readline():
                match decode(line):
                    case Running() as progress:
                        note(progress)
                    case Done(result):
                        return bytes(result)
                    case Failed(reason):
                        raise Refused(reason)
    except (OSError, RuntimeError) as error:  # uvloop raises RuntimeError if a pipe is closed
        raise Refused(f"Its process has failed: {error}") from error
    raise Refused("Its process has ended early; the server's log may say why.")


@asynccontextmanager
async def running_process() -> AsyncGenerator[Process, None]:
    """Start a process, and kill it at the end of the context."""
    starting = asyncio.ensure_future(
        asyncio.create_subprocess_exec(
            *(sys.executable, "-P", "-m", PROGRAM),  # -P: import nothing from the current folder
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=child_environment(),
            limit=MAX_LINE,
            creationflags=getattr(subprocess, "BELOW_NORMAL_PRIORITY_CLASS", 0),  # Windows
            start_new_session=True,  # Ctrl-C is for the server, which ends it
        )
    )
    try:
        yield await asyncio.shield(starting)
    finally:
        process = await starting  # uvloop would leak it if its start were cancelled
        if process.returncode is None:
            with suppress(ProcessLookupError):
                process.kill()
        await process.communicate()

"""``python watched_serve.py REPORT ARGUMENT...``: ``cllm``, and how long callbacks of its event
loop take.

REPORT gets a line for each callback that takes more than LEAST seconds of CPU time on the loop's
thread, and for each time that the loop had to wait while this process computed for as long: a
thread had the GIL. Only CPU time counts, so that a machine which is busy with something else
changes nothing.
"""

import asyncio
import runpy
import sys
import time
from collections.abc import Callable
from pathlib import Path

LEAST = 0.05
BEAT = 0.01  # seconds


class Watch:
    def __init__(self, report: str) -> None:
        self.report = Path(report).open("a", buffering=1)  # noqa: SIM115  # for as long as the process lives
        self.last_beat = 0.0
        self.last_seconds = 0.0
        self.is_beating = False

    def run(self, handle: asyncio.Handle, run: Callable[[asyncio.Handle], None]) -> None:
        if not self.is_beating:
            self.is_beating = True
            self.beat()
        begun = time.thread_time()
        run(handle)
        seconds = time.thread_time() - begun
        if seconds > LEAST:
            self.report.write(f"{seconds:.3f} callback {handle}\n")

    def beat(self) -> None:
        """Run every BEAT seconds, unless the loop is kept from it."""
        seconds = time.process_time()
        if self.last_seconds and seconds - self.last_seconds > LEAST:
            self.report.write(f"{seconds - self.last_seconds:.3f} wait\n")
        self.last_seconds = seconds
        asyncio.get_running_loop().call_later(BEAT, self.beat)


def main() -> None:
    sys.modules["uvloop"] = None  # type: ignore[assignment]  # its callbacks cannot be watched
    watch, run = Watch(sys.argv[1]), vars(asyncio.Handle)["_run"]

    def run_watched(self: asyncio.Handle) -> None:
        watch.run(self, run)

    setattr(asyncio.Handle, "_run", run_watched)  # noqa: B010  # asyncio has no public hook
    sys.argv[1:] = sys.argv[2:]
    runpy.run_module("cllm", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()

"""The command ``cllm``, and ``python -m cllm``."""

from __future__ import annotations

import gc
import os
import signal
import sys
from types import FrameType

from cllm.process.launch import launch


def exit_at_once(number: int, _: FrameType | None) -> None:
    """There is nothing to unwind yet, and a KeyboardInterrupt in a callback of the import system would be ignored."""
    os._exit(128 + number)


def main() -> None:
    """Run the command line. Until its command has been imported, Ctrl-C ends the process where it stands."""
    if signal.getsignal(signal.SIGINT) != signal.SIG_IGN:  # as in a script's background
        signal.signal(signal.SIGINT, exit_at_once)
    launched = None
    if sys.argv[1:2] == ["serve"]:
        launched = launch()  # it imports its half of cLLM while we import ours
        gc.disable()  # until all is imported (server/run.py), which takes a tenth less so

    from cllm.cli.main import main as run

    run(launched=launched)


if __name__ == "__main__":
    main()

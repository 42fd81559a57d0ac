"""The command ``cllm``, and ``python -m cllm``."""

from __future__ import annotations

import gc
import os
import signal
import sys
from types import FrameType

from cllm.cli.streams import open_closed_streams
from cllm.process.launch import launch


def exit_at_once(number: int, _: FrameType | None) -> None:
    """Exit.

    There is nothing to unwind, and the import system's callbacks would ignore a KeyboardInterrupt.
    """
    os._exit(128 + number)


def main() -> None:
    """Run the command line.

    Until its command has been imported, Ctrl-C ends the process immediately.
    """
    open_closed_streams()
    if os.environ.get("CLLM_URL") == "":  # empty variables count as unset
        del os.environ["CLLM_URL"]
    if signal.getsignal(signal.SIGINT) != signal.SIG_IGN:  # background jobs of scripts ignore it
        signal.signal(signal.SIGINT, exit_at_once)
    launched = None
    if sys.argv[1:2] == ["serve"]:
        launched = launch()  # the engine imports its modules while this process imports its own
        gc.disable()  # until all modules are imported (server/run.py); saves a tenth of that time

    from cllm.cli.main import main as run

    run(launched=launched)


if __name__ == "__main__":
    main()

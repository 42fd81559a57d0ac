"""The command ``cllm``, and ``python -m cllm``."""

from __future__ import annotations

import os
import signal
from types import FrameType


def exit_at_once(number: int, _: FrameType | None) -> None:
    """There is nothing to unwind yet, and a KeyboardInterrupt in a callback of the import system would be ignored."""
    os._exit(128 + number)


def main() -> None:
    """Run the command line. Until its command has been imported, Ctrl-C ends the process where it stands."""
    signal.signal(signal.SIGINT, exit_at_once)

    from cllm.cli.main import main as run

    run()


if __name__ == "__main__":
    main()

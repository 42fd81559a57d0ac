"""Functions that test_workers.py runs in worker processes."""

import os
import signal
import sys
import time
from pathlib import Path

from cllm.errors import BadRequest

SLOWLY = 1.0  # seconds


def prepare(begin):
    """Each question is the name of a function below and its arguments; ``begin`` is "begin"."""
    assert begin == "begin"
    return lambda asked: globals()[asked[0]](*asked[1:])


def prepare_slowly(begin):
    """Compute for longer than a question may."""
    compute(SLOWLY)
    return prepare(begin)


def note_limit(begin):
    """Answer one question: the CPU time that it could have used."""
    seconds, _ = signal.getitimer(signal.ITIMER_PROF)
    return lambda asked: str(seconds)


def break_down(begin):
    return lambda asked: crash()


def fail(begin):
    raise RuntimeError(f"no work for {begin}")


def hang(begin):
    time.sleep(600)


def chat(begin):
    """Print before answering."""
    print("hello from a library", flush=True)  # noqa: T201
    os.write(1, b"and from one in C")
    return prepare(begin)


def echo(text):
    return text


def say(text):
    print(text, flush=True)  # noqa: T201
    return "said"


def pid():
    return str(os.getpid())


def surroundings():
    """Return what the process has of its parent: session, variables, and whether the current folder
    is on sys.path.
    """
    return " ".join([str(os.getsid(0)), *os.environ, *({"", str(Path.cwd())} & {*sys.path})])


def refuse(text):
    raise BadRequest(text, param="field", code="reason")


def crash():
    raise KeyError("a mistake of ours")


def spin():
    while True:
        pass


def sleep(seconds):
    time.sleep(seconds)
    return "slept"


def sleep_the_first_time(path):
    """Create ``path`` and sleep; answer if it is there."""
    if Path(path).exists():
        return "answered"
    Path(path).touch()
    return sleep(600)


def compute(seconds):
    """Compute for this many seconds of CPU time."""
    end = time.process_time() + seconds
    while time.process_time() < end:
        pass
    return "computed"


def eat():
    return str(len(bytearray(4 << 30)))


def die():
    os.kill(os.getpid(), signal.SIGKILL)

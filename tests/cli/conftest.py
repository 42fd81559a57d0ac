"""Runs the command line in the tests' process, because starting Python takes a second."""

from __future__ import annotations

import io
import os
import signal
import sys
from collections.abc import Callable
from typing import NamedTuple

import pytest
from rich.console import Console

from cllm.cli import main as command_line
from cllm.observe import log


class Result(NamedTuple):
    """The exit code and the output of a command."""

    code: int
    out: str
    err: str


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> None:
    """Remove all variables that the environment has for cLLM."""
    for variable in [name for name in os.environ if name.startswith("CLLM_")]:
        monkeypatch.delenv(variable)
    monkeypatch.setenv("COLUMNS", "200")
    # The one that the application makes has the width of the first test in this process.
    monkeypatch.setattr(command_line.app, "_console", Console(width=200))


@pytest.fixture
def cllm(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., Result]:
    """Return a function ``cllm(*arguments, text="")`` that runs a command with ``text`` on stdin."""
    monkeypatch.setattr(log, "configure", lambda *_, **__: None)  # it would outlive the test

    def run(*arguments: object, text: str = "") -> Result:
        monkeypatch.setattr(sys, "stdin", io.StringIO(text))
        code: int | str | None = 0
        handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            command_line.main([str(argument) for argument in arguments])
        except SystemExit as end:
            code = end.code
        finally:
            for number, handler in handlers.items():  # serve sets its own
                signal.signal(number, handler)
        output = capsys.readouterr()
        return Result(int(code or 0), output.out, output.err)

    return run

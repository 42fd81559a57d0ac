"""The command line, run in the process of the tests: to start Python anew takes a second."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Callable
from typing import NamedTuple

import pytest

from cllm.cli import main as command_line
from cllm.observe import log


class Result(NamedTuple):
    """What a command did."""

    code: int
    out: str
    err: str


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> None:
    """No variable of the person who runs the tests."""
    for variable in [name for name in os.environ if name.startswith("CLLM_")]:
        monkeypatch.delenv(variable)
    monkeypatch.setenv("COLUMNS", "200")


@pytest.fixture
def cllm(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., Result]:
    """``cllm(*arguments, text="")`` runs a command; ``text`` is what it finds on stdin."""
    monkeypatch.setattr(log, "configure", lambda level: None)  # it would outlive the test

    def run(*arguments: object, text: str = "") -> Result:
        monkeypatch.setattr(sys, "stdin", io.StringIO(text))
        code: int | str | None = 0
        try:
            command_line.main([str(argument) for argument in arguments])
        except SystemExit as end:
            code = end.code
        output = capsys.readouterr()
        return Result(int(code or 0), output.out, output.err)

    return run

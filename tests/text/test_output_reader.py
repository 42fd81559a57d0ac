"""The engine's outputs, turned into deltas and counts, and which choices the engine must end."""

from __future__ import annotations

import pytest

from cllm.core.output import FinishReason, TokenOutput
from cllm.core.params import SamplingParams
from cllm.core.request import Request
from cllm.text.output_reader import Ended, OutputReader

PIECES = [bytes([i]) for i in range(256)]


def reader(*names: str, **params) -> OutputReader:
    return OutputReader([Request(name, [1, 2], SamplingParams(**params)) for name in names], PIECES)


def output(name: str, index: int, text: str, finish: str = "") -> TokenOutput:
    return TokenOutput(name, index, ord(text), FinishReason(finish) if finish else None, True)


def test_choices_are_numbered_over_all_prompts_and_counted_together():
    """The second choice of the second prompt is choice 3."""
    read = reader("a", "b", n=2)
    deltas, ended = read.read([output("b", 1, "x"), output("a", 0, "y"), output("b", 1, "z")])
    assert [(delta.index, delta.text, delta.num_tokens) for delta in deltas] == [
        (3, "xz", 2),
        (0, "y", 1),
    ]
    assert (ended, read.finished, read.usage.completion_tokens) == ([], False, 3)
    assert (read.num_tokens("a"), read.num_tokens("b")) == ([1, 0], [0, 2])


def test_only_stop_strings_need_a_stop_command_to_the_engine():
    """Tokens sampled after the stop string are neither shown nor counted."""
    read = reader("a", n=2, stop="no")
    deltas, ended = read.read([output("a", 0, "n"), output("a", 0, "o"), output("a", 0, "!")])
    assert [(delta.text, delta.finish, delta.stop) for delta in deltas] == [("", "stop", "no")]
    assert ended == [Ended("a", 0, "stop", False)]
    deltas, ended = read.read([output("a", 0, "?"), output("a", 1, "e", "length")])
    assert [(delta.index, delta.finish) for delta in deltas] == [(1, "length")]
    assert ended == [Ended("a", 1, "length", True)]
    assert read.finished
    assert read.usage.completion_tokens == 3


@pytest.mark.parametrize("failure", ["error", "grammar", "timeout"])
def test_failure_is_reported_after_the_preceding_text(failure):
    """The caller raises the error."""
    read = reader("a", n=2)
    gone = TokenOutput("a", 1, -1, FinishReason(failure), False)
    deltas, ended = read.read([output("a", 0, "x"), gone, output("a", 0, "y")])
    assert [delta.text for delta in deltas] == ["x"]
    assert (read.failure, ended, read.finished) == (FinishReason(failure), [], False)

"""The engine's outputs, turned into deltas and counts, and which choices the engine must end."""

from __future__ import annotations

import itertools
from functools import partial

import pytest
from call_texts import FAMILIES, TOOLS, pieces_of, with_thoughts
from conftest import repeat
from hypothesis import given, settings
from hypothesis import strategies as st

from cllm.core.output import FinishReason, Logprobs, TokenOutput
from cllm.core.params import SamplingParams
from cllm.core.request import Request
from cllm.text.chat_format import OutputPlan
from cllm.text.output_reader import Ended, OutputReader
from cllm.text.tools.model_family import load_families
from cllm.text.tools.parser import Channel, Parser

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


OPEN, CLOSE = 256, 257
MARKED = [*PIECES, b"<think>", b"</think>"]


def plain_until_it_thinks(**params) -> OutputReader:
    """Return the reader of a choice that needs a parser only from the control token OPEN on."""
    control = {"<think>": OPEN, "</think>": CLOSE}
    parser = partial(Parser, load_families()["think"], {}, control=control)
    plan = OutputPlan(MARKED, parser, "", OPEN)
    requests = [Request("a", [1, 2], SamplingParams(**params))]
    return OutputReader(requests, [*PIECES, b"", b""], plan)


@pytest.mark.parametrize("size", [1, 2, 100])
@pytest.mark.parametrize(
    ("tokens", "texts"),
    [
        ((*b"a\n", OPEN, *b"hm", CLOSE, *b"\nb"), ["a\n", "hm", "\nb"]),
        ((*b"a", OPEN, *b"b\n", CLOSE, *b"c"), ["a<think>b\nc"]),
        ((*b"```\n", OPEN, *b"b\n```\n", OPEN, *b"h"), ["```\n<think>b\n```", "h"]),
        ((OPEN, *b"hm", CLOSE, *b"\nb"), ["hm", "b"]),
        ((CLOSE, *b"a<think>b"), ["a<think>b"]),
        (
            (*b"a\n", OPEN, *b"h", CLOSE, *b"b\n", OPEN, *b"m", CLOSE, *b"c"),
            ["a\n", "h", "b", "m", "\nc"],
        ),
    ],
)
def test_text_is_parsed_once_reasoning_resumes(tokens, texts, size):
    read = plain_until_it_thinks()
    outputs = [TokenOutput("a", 0, token) for token in tokens[:-1]]
    outputs.append(TokenOutput("a", 0, tokens[-1], FinishReason.STOP))
    groups = [outputs[i : i + size] for i in range(0, len(outputs), size)]
    deltas = [delta for group in groups for delta in read.read(group)[0]]
    grouped = itertools.groupby(deltas, key=lambda delta: delta.channel)
    joined = ["".join(delta.text for delta in group) for _, group in grouped]
    assert [text for text in joined if text] == texts
    assert sum(delta.num_tokens for delta in deltas) == len(tokens) == read.usage.completion_tokens
    thoughts = deltas and [delta for delta in deltas if delta.channel == Channel.REASONING]
    num_thoughts = sum(tokens.count(token) for token in (*b"hm", CLOSE)) if thoughts else 0
    assert read.usage.reasoning_tokens == num_thoughts
    assert read.finished


def test_held_text_and_its_logprobs_are_not_lost_when_reasoning_resumes():
    """The stop string may still come."""
    read = plain_until_it_thinks(stop="\nno", logprobs=0)
    tokens = (*b"a\n", OPEN, ord("h"), CLOSE, ord("o"))
    ends = [""] * 5 + [FinishReason.LENGTH]
    outputs = [
        TokenOutput("a", 0, token, end, logprobs=Logprobs(-1.0, []))
        for token, end in zip(tokens, ends, strict=True)
    ]
    deltas = [delta for one in outputs for delta in read.read([one])[0]]
    assert [delta.text for delta in deltas if delta.text] == ["a", "\n", "h", "o"]
    told = [one.token for delta in deltas for one in delta.logprobs]
    assert told == [*b"a\no"]


@pytest.mark.parametrize("failure", ["error", "grammar", "timeout"])
def test_failure_is_reported_after_the_preceding_text(failure):
    """The caller raises the error."""
    read = reader("a", n=2)
    gone = TokenOutput("a", 1, -1, FinishReason(failure), False)
    deltas, ended = read.read([output("a", 0, "x"), gone, output("a", 0, "y")])
    assert [delta.text for delta in deltas] == ["x"]
    assert (read.failure, ended, read.finished) == (FinishReason(failure), [], False)


def merge(deltas: list) -> dict[int, tuple]:
    """Return what each choice has got: its parts, tokens, reason to finish and stop string."""
    merged: dict[int, tuple] = {}
    for delta in deltas:
        parts, count, _, _ = merged.get(delta.index, ([], 0, "", ""))
        if parts and parts[-1][:2] == [delta.channel, delta.call] and not delta.name:
            parts[-1][3] += delta.text
        elif delta.text or delta.name:
            parts.append([delta.channel, delta.call, delta.name, delta.text])
        merged[delta.index] = (parts, count + delta.num_tokens, delta.finish, delta.stop)
    return merged


@pytest.mark.parametrize("name", [None, *FAMILIES])
@given(data=st.data())
@settings(max_examples=repeat(60, 15), deadline=None)
def test_grouping_of_outputs_changes_no_delta(name, data):
    """Two choices of random text, whose outputs arrive one by one or in random groups."""
    family = with_thoughts(name) if name else None
    words = pieces_of(name) if name else ["a", "no", "n", "\u00e9", " "]
    messages = [
        "".join(data.draw(st.lists(st.sampled_from(words), max_size=8))) + "." for _ in range(2)
    ]
    finish = [data.draw(st.sampled_from(["stop", "length"])) for _ in range(2)]
    left = [list(message.encode()) for message in messages]
    outputs = []
    while any(left):
        index = data.draw(st.sampled_from([i for i in range(2) if left[i]]))
        token = left[index].pop(0)
        end = None if left[index] else FinishReason(finish[index])
        outputs.append(TokenOutput("a", index, token, end, True))
    cuts = data.draw(st.lists(st.integers(0, len(outputs)), max_size=6))
    edges = sorted({0, len(outputs), *cuts})
    stop = data.draw(st.sampled_from([(), ("no",), ("x",)]))
    results = []
    for groups in (
        [outputs],
        [[one] for one in outputs],
        [outputs[a:b] for a, b in itertools.pairwise(edges)],
    ):
        plan = OutputPlan(PIECES, lambda: Parser(family, TOOLS), "") if family else None
        params = SamplingParams(n=2, stop=stop)
        read = OutputReader([Request("a", [1], params)], PIECES, plan)
        deltas, ended = [], []
        for group in groups:
            new, done = read.read(group)
            deltas += new
            ended += done
        assert read.finished
        usage = (read.usage.completion_tokens, read.usage.reasoning_tokens)
        results.append((merge(deltas), sorted(one.index for one in ended), usage))
    assert results[0] == results[1] == results[2]

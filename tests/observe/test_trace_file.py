"""Traces: reading, errors, and recording."""

from __future__ import annotations

import re
from contextlib import closing
from pathlib import Path

import msgspec
import pytest

from cllm.core.params import SamplingParams
from cllm.core.request import Priority, Request
from cllm.errors import StartupError
from cllm.observe.trace_file import RECORDED_BLOCK, Recorder, TraceEntry, read_trace, write_trace

LINE = '{"timestamp": 27482, "input_length": 1000, "output_length": 52, "hash_ids": [46, 47]}'


def test_mooncake_lines_are_read_in_order_of_time(tmp_path: Path) -> None:
    """Mooncake's fields are sufficient, and unknown fields are ignored."""
    file = tmp_path / "trace.jsonl"
    file.write_text(
        f'{LINE}\n\n{LINE[:-1].replace("27482", "5")}, "turn": 3, "key": "a", "deadline_ms": '
        f"1.5}}\n"
    )
    first, second = read_trace(file)
    assert (first.arrived, second.arrived) == (0.005, 27.482)
    assert (first.account, first.deadline_ms, first.block_size, first.priority) == (
        "a",
        1.5,
        512,
        "normal",
    )
    assert second == TraceEntry(
        timestamp=27482, input_length=1000, output_length=52, hash_ids=[46, 47]
    )


def test_same_blocks_give_same_prompt() -> None:
    """Different blocks differ within the first few tokens. All tokens are bytes."""
    prompts = {i: prompt_of([i, i + 1], 600) for i in (0, 1, 255, 256, 70_000, 2**62)}
    assert {len(prompt) for prompt in prompts.values()} == {600}
    assert all(0 <= token < 256 for prompt in prompts.values() for token in prompt)
    assert len({tuple(prompt[:8]) for prompt in prompts.values()}) == len(prompts)
    assert prompts[0][512:] == prompts[1][:88]
    assert prompt_of([0, 1], 1024)[:600] == prompts[0]


def prompt_of(blocks: list[int], length: int) -> list[int]:
    return TraceEntry(
        timestamp=0, input_length=length, output_length=1, hash_ids=blocks
    ).make_prompt()


@pytest.mark.parametrize(
    ("change", "word"),
    [
        (("{", ""), "object"),
        (("27482", '"now"'), "timestamp"),
        (("27482", "-1"), "timestamp"),
        (('"input_length": 1000, ', ""), "input_length"),
        (("1000", "1025"), "hash_ids"),
        (("1000", "512"), "hash_ids"),
        (("52", "0"), "output_length"),
        (("[46, 47]", "[46, -47]"), r"hash_ids\[1\]"),
        (("[46, 47]", "46"), "hash_ids"),
        (("{", '{"priority": "high", '), "priority"),
        (("{", '{"block_size": 1, '), "block_size"),
        (("{", '{"deadline_ms": 0, '), "deadline_ms"),
        (("{", '{"key": 7, '), "key"),
    ],
)
def test_invalid_line_is_named_in_the_error(
    tmp_path: Path, change: tuple[str, str], word: str
) -> None:
    """The error is one line that names the file, the line and the field."""
    file = tmp_path / "trace.jsonl"
    file.write_text(f"{LINE}\n{LINE.replace(*change)}\n")
    with pytest.raises(StartupError, match=rf"^{re.escape(str(file))}, line 2: .*{word}") as raised:
        read_trace(file)
    assert len(str(raised.value).splitlines()) == 1


def test_unreadable_trace_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "empty").write_text("\n")
    (tmp_path / "bytes").write_bytes(b'{"timestamp": 1, "key": "\xff"}')
    for name, words in (
        ("empty", "no requests"),
        ("bytes", "line 1"),
        ("none", "cannot be read"),
        (".", "cannot be"),
    ):
        with pytest.raises(StartupError, match=words):
            read_trace(tmp_path / name)
    with pytest.raises(StartupError, match="cannot be written"):
        write_trace(tmp_path, [])


# --- recording ----------------------------------------------------------------------------------


def request(prompt: list[int], **changes) -> Request:
    return Request("A", prompt, SamplingParams(max_tokens=50), **changes)


def test_recorder_writes_one_line_per_answer(tmp_path: Path) -> None:
    """The line has lengths, times and classes. An answer without tokens is recorded with its
    max_tokens.
    """
    file = tmp_path / "trace.jsonl"
    with closing(Recorder(file)) as recorder:
        recorder.record(
            request([5] * 40, account="a", priority=Priority.BATCH, deadline=1.5), 10.0, [7, 0, 3]
        )
        recorder.record(request([5] * 40), 12.0, [1])
    earlier, *others = read_trace(file)
    assert (earlier.account, earlier.priority, earlier.deadline_ms) == ("", "normal", None)
    assert [entry.output_length for entry in others] == [7, 50, 3]
    assert {
        (entry.input_length, entry.account, entry.priority, entry.deadline_ms) for entry in others
    } == {(40, "a", "batch", 1500.0)}
    assert others[0].arrived - earlier.arrived == pytest.approx(2.0, abs=0.5)


def test_answer_without_tokens_is_recorded_with_the_mean_length(tmp_path: Path) -> None:
    """Otherwise a simulation of an overload would treat rejected requests as short ones."""
    file = tmp_path / "trace.jsonl"
    rejected = msgspec.structs.replace(request([5] * 40), params=SamplingParams())
    with closing(Recorder(file)) as recorder:
        recorder.record(rejected, 30.0, [0])
        recorder.record(request([5] * 40), 20.0, [10, 30, 0])
        recorder.record(rejected, 10.0, [0, 0])
    assert [entry.output_length for entry in read_trace(file)] == [1, 10, 30, 50, 20, 20]


def test_hash_ids_are_equal_for_equal_prefixes_only(tmp_path: Path) -> None:
    """Equal blocks after different prefixes have different ids, and so have equal prefixes in
    another recording.
    """
    file = tmp_path / "trace.jsonl"
    shared, size = list(range(1000, 1000 + 3 * RECORDED_BLOCK)), RECORDED_BLOCK
    with closing(Recorder(file)) as recorder:
        for prompt in ([*shared, 1, 2], [*shared, 3], [9, *shared[1:]]):
            recorder.record(request(prompt), 0.0, [1])
    with closing(Recorder(file)) as recorder:
        recorder.record(request(shared), 0.0, [1])
    a, b, c, d = (entry.hash_ids for entry in read_trace(file))
    assert (a[:3], len(a)) == (b[:3], 3 + 1)
    assert a[3] != b[3]
    assert not set(a) & set(c)
    assert not set(a) & set(d)
    simulated = [entry.make_prompt() for entry in read_trace(file)]
    assert simulated[0][: 3 * size] == simulated[1][: 3 * size]


def test_recorder_rejects_unwritable_path(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match="cannot be written"):
        Recorder(tmp_path)

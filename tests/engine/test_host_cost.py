"""The work of cLLM's own Python code for each token: in the engine, apart from the backend, and
from its outputs to the chunks of a stream.

Counted, not timed: function calls and lines are the same on every machine and under any load. A
change that needs more raises the numbers here, and says why.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import FrameType
from typing import Any, Self

import pytest

import cllm
from cllm.core.output import TokenOutput
from cllm.core.params import SamplingParams
from cllm.core.request import Request
from cllm.server.openai.stream import Chunks
from cllm.serving.answer import Generation
from cllm.text.output_reader import OutputReader

# Other versions run other numbers of lines and calls for the same code.
pytestmark = pytest.mark.skipif(
    sys.version_info[:2] != (3, 11), reason="the budgets were counted with Python 3.11"
)

SOURCES = str(Path(cllm.__file__).parent)
BACKEND = str(Path(SOURCES, "backends"))
NUM_STEPS = 40
TOLERANCE = 1.1


class Counter:
    """Counts the calls, of Python and C functions, and the lines of cLLM's own code."""

    def __init__(self) -> None:
        self.num_calls = self.num_lines = 0

    def __enter__(self) -> Self:
        self._before = sys.gettrace(), sys.getprofile()
        sys.setprofile(self._profile)
        sys.settrace(self._trace)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(self._before[0])
        sys.setprofile(self._before[1])

    def _profile(self, frame: FrameType, event: str, argument: object) -> None:
        if event in ("call", "c_call") and is_counted(frame):
            self.num_calls += 1

    def _trace(self, frame: FrameType, event: str, argument: object) -> Any:
        if not is_counted(frame):
            return None
        if event == "line":
            self.num_lines += 1
        return self._trace


def is_counted(frame: FrameType) -> bool:
    file = frame.f_code.co_filename
    return file.startswith(SOURCES) and not file.startswith(BACKEND)


def count_per_token(fake_engine, num_seqs: int, **params: object) -> tuple[float, float]:
    """Return the calls and the lines for each token while ``num_seqs`` sequences decode."""
    engine = fake_engine(max_num_seqs=num_seqs, length=500, engine_check=False)
    for i in range(num_seqs):
        engine.add(f"r{i}", [i + 1, i + 2, i + 3], max_tokens=200, ignore_eos=True, **params)
    for _ in range(20):  # prompts, and what happens once
        engine.engine.step()
    num_tokens = 0
    with Counter() as counter:
        for _ in range(NUM_STEPS):
            num_tokens += len(engine.engine.step())
            engine.engine.stats()
    assert num_tokens == NUM_STEPS * num_seqs
    return counter.num_calls / num_tokens, counter.num_lines / num_tokens


# by the number of sequences and what they ask for: calls and lines for each token
BUDGETS = [
    (1, {}, 222, 510),
    (8, {}, 87, 196),
    (32, {}, 73, 162),
    (8, {"temperature": 0.8, "top_p": 0.9}, 104, 232),
]


@pytest.mark.parametrize(("num_seqs", "params", "calls", "lines"), BUDGETS)
def test_cost_of_a_token_stays_within_its_budget(fake_engine, num_seqs, params, calls, lines):
    found = count_per_token(fake_engine, num_seqs, **params)
    assert found[0] <= calls * TOLERANCE, found
    assert found[1] <= lines * TOLERANCE, found


def test_cost_of_a_streamed_token_stays_within_its_budget():
    """From the engine's output to the chunk of a chat, when each token comes alone."""
    params = SamplingParams(max_tokens=200)
    reader = OutputReader([Request("a", [1, 2], params)], [bytes([i]) for i in range(256)])
    chunks = Chunks(Generation("a", [[1, 2]], params), {"id": "a"}, chat=True, options=None)
    outputs = [TokenOutput("a", 0, 65 + i % 26) for i in range(20 + NUM_STEPS)]
    sent = [chunks.deltas(reader.read([output])[0]) for output in outputs[:20]]
    with Counter() as counter:
        sent += [chunks.deltas(reader.read([output])[0]) for output in outputs[20:]]
    assert all(sent)
    found = counter.num_calls / NUM_STEPS, counter.num_lines / NUM_STEPS
    assert found[0] <= 13 * TOLERANCE, found
    assert found[1] <= 52 * TOLERANCE, found


def test_counts_do_not_depend_on_the_machine(fake_engine):
    """They are the same each time."""
    assert count_per_token(fake_engine, 4) == count_per_token(fake_engine, 4)


def test_one_more_call_for_each_token_in_ten_is_noticed(fake_engine, monkeypatch):
    """A budget that nothing could exceed would be useless."""
    before = count_per_token(fake_engine, 8)
    from cllm.scheduler.scheduler import Scheduler

    append = Scheduler._append

    def slow(self, seq, *args):
        for _ in range(5):
            assert seq.num_tokens  # a property of cLLM's own: a call and a line
        return append(self, seq, *args)

    monkeypatch.setattr(Scheduler, "_append", slow)
    assert count_per_token(fake_engine, 8)[0] >= before[0] + 5

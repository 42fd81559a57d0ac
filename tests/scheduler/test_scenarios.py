"""Replays the scenarios, short stories of who arrives when and what each step computes, and
compares every letter.

A file has a title, the limits, the events, and the table. There is a column for each seq_id; ``A
0+3 sample`` says that three tokens of A from position 0 are computed and that the last one's logits
are sampled. ``before`` are the operations on the cache: ``1 keep 0`` (seq_id 1 is emptied), ``0 ->
1 20`` (20 tokens of seq_id 0 are copied to 1), ``1 save s0`` and ``s0 -> 1 20`` (to RAM and back).
The last columns count cells after the step; they always add up. After ``--update-scenarios`` the
table is what happens now, and the diff is for you to judge.

Prompts: ``prompt=5`` are five tokens that no other prompt begins with, ``prompt=A+5`` all tokens of
A and five more.
"""

from __future__ import annotations

from pathlib import Path

import pytest

SCENARIOS = sorted((Path(__file__).parent / "scenarios").glob("*.txt"))
MAX_STEPS = 100


class Play:
    """One scenario on the stage."""

    def __init__(self, fake_engine, script: list[str]) -> None:
        limits, *events = [line for line in script if line.strip() and not line.startswith("#")]
        options = numbers(limits.split())
        expected_output = options.pop("expected_output", None)
        self.stage = fake_engine(**options)
        if expected_output is not None:
            self.stage.scheduler.expected.output = expected_output
        self.events = [line.split() for line in events]
        self.requests = {}

    def happen(self, now: int) -> list[str]:
        """Let arrive and abort who does so before step ``now``; what the aborts ended."""
        ended = []
        for time, name, verb, *words in self.events:
            if time != f"t={now}":
                continue
            if verb == "arrives":
                options = dict(word.split("=") for word in words)
                prompt = self.prompt(options.pop("prompt"))
                self.requests[name] = self.stage.add(
                    name, prompt, **numbers(f"{k}={v}" for k, v in options.items())
                )
            else:
                assert verb == "aborts", verb
                request_id, _, index = name.partition(".")
                ended += self.stage.abort(request_id, int(index) if index else None)
        return [f"{self.name(output.request_id, output.index)} {output.finish}" for output in ended]

    def prompt(self, text: str) -> list[int]:
        before, _, count = text.rpartition("+")
        start = 20 + 40 * len(self.requests)
        own = [(start + i) % 256 for i in range(int(count))]
        if not before:
            return own
        return [
            *self.requests[before].prompt,
            *[t for t in self.stage.tokens(before) if t < 256],
            *own,
        ]

    def name(self, request_id: str, index: int) -> str:
        """``A``, or ``A.1`` for one of several."""
        return request_id if self.requests[request_id].params.n == 1 else f"{request_id}.{index}"

    def line(self, now: int) -> list[str]:
        """One step: its cells of the table."""
        backend, scheduler = self.stage.backend, self.stage.scheduler
        then = self.happen(now)
        running, num_outputs = list(scheduler.running), len(self.stage.outputs)
        assert self.stage.step(), f"nothing to do at t={now}: let something happen earlier"
        then += [
            f"{self.name(s.request.request_id, s.index)} parked"
            for s in running
            if s in scheduler.waiting
        ]
        then += [
            f"{self.name(o.request_id, o.index)} {o.finish}"
            for o in self.stage.outputs[num_outputs:]
            if o.finish
        ]
        batch = backend.batches[-1]
        rows = {
            seq_id: f"{self.name(row.seq.request.request_id, row.seq.index)} "
            f"{str(row).partition(' ')[2]}"
            for seq_id, row in zip(backend.seq_ids[-1], batch.rows, strict=True)
        }
        before = [str(operation) for operation in batch.operations]
        held = self.stage.ledger.cells
        cells = f"{held.num_held:4} {held.num_idle:4} {held.num_free:4}"
        columns = [rows.get(i, "") for i in range(backend.info.max_num_seqs)]
        return [str(now), *columns, ", ".join(before) or "-", ", ".join(then) or "-", cells]

    def table(self) -> list[str]:
        """Play to the end; the laws of every step and the text of every sequence are checked on the
        way.
        """
        seq_ids = [f"seq_id {i}" for i in range(self.stage.backend.info.max_num_seqs)]
        lines = [["step", *seq_ids, "before", "then", "held idle free"]]
        last = max(int(event[0].removeprefix("t=")) for event in self.events)
        while len(lines) - 1 <= last or self.stage.scheduler.has_work():
            lines.append(self.line(len(lines) - 1))
            assert len(lines) < MAX_STEPS, "the story has no end"
        for name, request in self.requests.items():
            right = self.stage.right_tokens(request)
            for index in range(request.params.n):
                tokens = self.stage.tokens(name, index)
                aborted = self.stage.ends()[f"{name}.{index}"] == "abort"
                assert tokens == (right[: len(tokens)] if aborted else right), (
                    f"{name}.{index} got a wrong text"
                )
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        return [
            "   ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
            for line in lines
        ]


def numbers(words) -> dict[str, int]:
    return {key: int(value) for key, value in (word.split("=") for word in words)}


@pytest.mark.parametrize("path", SCENARIOS, ids=lambda path: path.stem)
def test_scenario(path, fake_engine, update_scenarios):
    """What the file tells is what happens, letter by letter."""
    told = path.read_text()
    script = told.partition("\nstep ")[0].rstrip().splitlines()
    happened = "\n".join([*script, "", *Play(fake_engine, script).table(), ""])
    if update_scenarios:
        path.write_text(happened)
    assert happened.splitlines() == path.read_text().splitlines()


def test_there_are_scenarios():
    """A folder that has moved does not pass for a folder of passing scenarios."""
    assert SCENARIOS

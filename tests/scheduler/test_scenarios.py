"""Replays the scenarios, which tell what arrives when and what each step computes, and compares
every character.

A file has a title, the limits, the events and the table. The table has a column for each seq_id.
``A 0+3 sample`` means that three tokens of A from position 0 are computed and that the last one's
logits are sampled. ``before`` lists the operations on the cache: ``1 keep 0`` (seq_id 1 is
emptied), ``0 -> 1 20`` (20 tokens of seq_id 0 are copied to 1), ``1 save s0`` and ``s0 -> 1 20``
(to RAM and back). The last columns count cells after the step, and their sum is constant.
``--update-scenarios`` writes the present behaviour into the tables; judge the diff.

Prompts: ``prompt=5`` is five tokens with which no other prompt begins, ``prompt=A+5`` is all tokens
of A and five more.
"""

from __future__ import annotations

from pathlib import Path

import pytest

SCENARIOS = sorted((Path(__file__).parent / "scenarios").glob("*.txt"))
MAX_STEPS = 100


class Replay:
    """Replays one scenario."""

    def __init__(self, fake_engine, script: list[str]) -> None:
        limits, *events = [line for line in script if line.strip() and not line.startswith("#")]
        options = numbers(limits.split())
        expected_output = options.pop("expected_output", None)
        self.engine = fake_engine(**options)
        if expected_output is not None:
            self.engine.scheduler.sequences.length_estimates.output = expected_output
        self.events = [line.split() for line in events]
        self.requests = {}

    def apply_events(self, now: int) -> list[str]:
        """Apply the events before step ``now``; return the ends of aborted sequences."""
        ended = []
        for time, name, verb, *words in self.events:
            if time != f"t={now}":
                continue
            if verb == "arrives":
                options = dict(word.split("=") for word in words)
                prompt = self.prompt(options.pop("prompt"))
                self.requests[name] = self.engine.add(
                    name, prompt, **numbers(f"{k}={v}" for k, v in options.items())
                )
            else:
                assert verb == "aborts", verb
                request_id, _, index = name.partition(".")
                ended += self.engine.abort(request_id, int(index) if index else None)
        return [f"{self.name(output.request_id, output.index)} {output.finish}" for output in ended]

    def prompt(self, text: str) -> list[int]:
        before, _, count = text.rpartition("+")
        start = 20 + 40 * len(self.requests)
        own = [(start + i) % 256 for i in range(int(count))]
        if not before:
            return own
        return [
            *self.requests[before].prompt,
            *[t for t in self.engine.tokens(before) if t < 256],
            *own,
        ]

    def name(self, request_id: str, index: int) -> str:
        """Return ``A``, or ``A.1`` for one of several sequences of a request."""
        return request_id if self.requests[request_id].params.n == 1 else f"{request_id}.{index}"

    def line(self, now: int) -> list[str]:
        """Compute one step; return its line of the table."""
        backend, scheduler = self.engine.backend, self.engine.scheduler
        then = self.apply_events(now)
        running, num_outputs = list(scheduler.sequences.running), len(self.engine.outputs)
        assert self.engine.step(), f"nothing to do at t={now}: schedule the next event earlier"
        then += [
            f"{self.name(s.request.request_id, s.index)} parked"
            for s in running
            if s in scheduler.sequences.waiting
        ]
        then += [
            f"{self.name(o.request_id, o.index)} {o.finish}"
            for o in self.engine.outputs[num_outputs:]
            if o.finish
        ]
        batch = backend.batches[-1]
        rows = {
            seq_id: f"{self.name(row.seq.request.request_id, row.seq.index)} "
            f"{str(row).partition(' ')[2]}"
            for seq_id, row in zip(backend.seq_ids[-1], batch.rows, strict=True)
        }
        before = [str(operation) for operation in batch.operations]
        held = self.engine.kv_cache.cells
        cells = f"{held.num_held:4} {held.num_idle:4} {held.num_free:4}"
        columns = [rows.get(i, "") for i in range(backend.info.max_num_seqs)]
        return [str(now), *columns, ", ".join(before) or "-", ", ".join(then) or "-", cells]

    def table(self) -> list[str]:
        """Replay to the end, checking the invariants after every step and the text of every
        sequence.
        """
        seq_ids = [f"seq_id {i}" for i in range(self.engine.backend.info.max_num_seqs)]
        lines = [["step", *seq_ids, "before", "then", "held idle free"]]
        last = max(int(event[0].removeprefix("t=")) for event in self.events)
        while len(lines) - 1 <= last or self.engine.scheduler.sequences.has_work():
            lines.append(self.line(len(lines) - 1))
            assert len(lines) < MAX_STEPS, "the scenario does not end"
        for name, request in self.requests.items():
            expected = self.engine.right_tokens(request)
            for index in range(request.params.n):
                tokens = self.engine.tokens(name, index)
                aborted = self.engine.ends()[f"{name}.{index}"] == "abort"
                assert tokens == (expected[: len(tokens)] if aborted else expected), (
                    f"{name}.{index} has a wrong text"
                )
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        return [
            "   ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
            for line in lines
        ]


def numbers(words) -> dict[str, int]:
    return {key: int(value) for key, value in (word.split("=") for word in words)}


@pytest.mark.parametrize("path", SCENARIOS, ids=lambda path: path.stem)
def test_scenario_is_computed_as_described(path, fake_engine, update_scenarios):
    """The file equals what happens, character by character."""
    text = path.read_text()
    script = text.partition("\nstep ")[0].rstrip().splitlines()
    happened = "\n".join([*script, "", *Replay(fake_engine, script).table(), ""])
    if update_scenarios:
        path.write_text(happened)
    assert happened.splitlines() == path.read_text().splitlines()


def test_folder_contains_scenarios():
    """Without this test, a folder that has moved would pass."""
    assert SCENARIOS

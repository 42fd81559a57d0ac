"""Sequences that follow a grammar, in an engine over the fake backend, which counts on wherever it
may.
"""

from __future__ import annotations

import json
import threading
import time

import jsonschema
import pytest

from cllm.backends.fake.backend import FakeBackend, Faults
from cllm.backends.fake.vocabulary import END
from cllm.core.params import SamplingParams
from cllm.core.request import Request
from cllm.engine import grammars
from cllm.engine.build import build_engine
from cllm.engine.commands import Abort, Add
from cllm.engine.engine import Engine
from cllm.engine.grammars import MAX_GRAMMARS
from cllm.engine.params import EngineParams
from cllm.engine.side_jobs import carry_out
from cllm.sampling.grammar import Grammar

DIGITS = "start: /[0-9]{3}/"


class Answers:
    """What an engine says to all that it is asked, text and reason of the end, by name and
    index.
    """

    def __init__(self, speculation: str = "off", **options) -> None:
        self.engine = build_engine(
            FakeBackend(**{"max_num_seqs": 4, **options}),
            EngineParams(check=True, speculation=speculation),
        )
        self.texts: dict[tuple[str, int], bytes] = {}
        self.ends: dict[tuple[str, int], str] = {}

    def ask(self, name: str, **params) -> None:
        request = Request(
            name, list(b"prompt " + name.encode()), SamplingParams(**{"temperature": 0.0, **params})
        )
        self.take(self.engine.handle(Add(request)))

    def take(self, outputs) -> None:
        for output in outputs:
            at = output.request_id, output.index
            if output.is_text:
                self.texts[at] = self.texts.get(at, b"") + bytes([output.token])
            if output.finish:
                self.ends[at] = str(output.finish)

    def run(self, seconds: float = 30) -> Answers:
        """For so many seconds of CPU time at most."""
        until = time.process_time() + seconds
        while self.engine.has_work() and time.process_time() < until:
            self.take(self.engine.step())
        assert not self.engine.has_work()
        return self


def answer(grammar: str, **params) -> tuple[bytes, str]:
    answers = Answers()
    answers.ask("A", grammar=grammar, **params)
    answers.run()
    return answers.texts.get(("A", 0), b""), answers.ends["A", 0]


@pytest.mark.parametrize("temperature", [0.0, 1.0, 50.0])
def test_the_text_follows_the_grammar_and_ends_with_it(temperature):
    text, end = answer(DIGITS, temperature=temperature, seed=3)
    assert len(text) == 3
    assert text.isdigit()
    assert end == "stop"


def test_the_grammar_wins_against_ignore_eos():
    assert answer('start: "ab"', ignore_eos=True) == (b"ab", "stop")
    text, end = answer("start: /[0-9]+/", ignore_eos=True, temperature=90.0, seed=1)
    assert text.isdigit()
    assert end == "stop"


def test_limits_of_length_hold():
    assert answer('start: "abcdef"', max_tokens=2) == (b"ab", "length")
    assert answer('start: "ab"', max_tokens=2) == (b"ab", "stop")


def test_every_sequence_of_a_request_follows_it():
    answers = Answers()
    answers.ask("A", grammar=DIGITS, n=4, temperature=9.0, seed=5)
    answers.run()
    texts = [answers.texts["A", i] for i in range(4)]
    assert all(text.isdigit() and len(text) == 3 for text in texts)
    assert len(set(texts)) > 1


@pytest.mark.parametrize("grammar", ["start: b", "start: a\na: a", '{"grammars": 5}'])
def test_a_grammar_that_cannot_be_followed_ends_its_sequences_alone(grammar):
    answers = Answers()
    answers.ask("A", grammar=grammar, n=2)
    answers.ask("B", max_tokens=3)
    answers.run()
    assert answers.ends == {("A", 0): "grammar", ("A", 1): "grammar", ("B", 0): "length"}


# every x is followed by !
EXCLAIMS = 'start: (shout "!")* rest\nshout[lazy]: /(?s:.*)x/\nrest: /(?s:.*)/'


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_loose_grammar_changes_only_what_it_refuses(temperature):
    params = {
        "max_tokens": 600,
        "min_tokens": 600,
        "temperature": temperature,
        "seed": 5,
        "logit_bias": {END: -100},
    }
    texts = []
    for grammar in ("", EXCLAIMS):
        answers = Answers(length=10_000, context_length=1000)
        answers.ask("A", grammar=grammar, grammar_is_loose=True, **params)
        answers.run()
        texts.append(answers.texts["A", 0])
    free, text = texts
    assert len(text) == 600
    assert text.count(b"x") == text.count(b"x!") > 2
    assert text.startswith(free[: free.index(b"x") + 1])


def test_a_loose_grammar_that_cannot_be_compiled_binds_nothing():
    free, bound = answer("", max_tokens=9), answer("start: b", grammar_is_loose=True, max_tokens=9)
    assert bound == free


class Gate:
    """A tokenizer that is not there before it is let through."""

    def __init__(self, engine: Engine) -> None:
        self.opened = threading.Event()
        vocabulary = engine.backend.vocabulary

        def make():
            self.opened.wait()
            return vocabulary.grammar_tokenizer(engine.backend.info.end_tokens)

        engine._grammars._make_tokenizer = make


def test_who_waits_for_a_grammar_holds_nobody_up():
    """Others come and go in the meantime, and the step does not wait."""
    answers = Answers(max_num_seqs=1)
    gate = Gate(answers.engine)
    answers.ask("A", grammar=DIGITS)
    for name in "BC":
        answers.ask(name, max_tokens=5)
    while len(answers.ends) < 2:
        answers.take(answers.engine.step())
    assert answers.ends == {("B", 0): "length", ("C", 0): "length"}
    gate.opened.set()
    answers.run()
    assert answers.ends["A", 0] == "stop"


def test_who_waits_for_a_grammar_can_be_aborted():
    answers = Answers()
    gate = Gate(answers.engine)
    answers.ask("A", grammar=DIGITS, n=2)
    answers.ask("B", grammar=DIGITS)
    answers.take(answers.engine.handle(Abort("A", 1)))
    assert answers.ends == {("A", 1): "abort"}
    answers.take(answers.engine.handle(Abort("B")))
    gate.opened.set()
    answers.run()
    assert answers.ends == {("A", 1): "abort", ("B", 0): "abort", ("A", 0): "stop"}


def test_sequences_that_are_parked_go_on_where_they_were():
    """Everybody loses the cells in the middle of it, and computes again what was there."""
    answers = Answers()
    for name in "ABCD":
        answers.ask(name, grammar="start: /[0-9]{60}/", temperature=5.0)
    while answers.engine.scheduler.num_steps < 20:
        answers.take(answers.engine.step())
    scheduler = answers.engine.scheduler
    assert carry_out(answers.engine.backend, scheduler, scheduler.empty_cells())
    answers.run()
    assert scheduler.num_parked == 4
    assert all(len(text) == 60 and text.isdigit() for text in answers.texts.values())
    assert set(answers.ends.values()) == {"stop"}


def test_a_step_that_fails_is_not_taken_for_a_token():
    answers = Answers(faults=Faults(raise_at_step=4, raise_times=2))
    answers.ask("A", grammar='start: "abcdefgh"')
    answers.run()
    assert (answers.texts["A", 0], answers.ends["A", 0]) == (b"abcdefgh", "stop")


def test_guesses_are_for_those_who_are_free():
    """The same text with and without, although it repeats itself."""
    found = []
    for speculation in ("off", "prompt_lookup"):
        answers = Answers(speculation)
        answers.ask("A", grammar='start: ("0123456789"){6}')
        answers.run()
        found.append((answers.texts["A", 0], answers.engine.scheduler.num_guesses))
    assert found == [(b"0123456789" * 6, 0)] * 2


def test_a_grammar_is_compiled_once(monkeypatch):
    compiled = []
    monkeypatch.setattr(
        "cllm.engine.grammars.Grammar",
        lambda text, tokenizer: compiled.append(text) or Grammar(text, tokenizer),
    )
    answers = Answers()
    for name in "AB":
        answers.ask(name, grammar=DIGITS)
    answers.run()
    answers.ask("C", grammar=DIGITS)
    answers.run()
    assert compiled == [DIGITS]
    assert set(answers.ends.values()) == {"stop"}


def test_grammars_are_forgotten():
    """Those that were not asked for longest."""
    answers = Answers()
    for i in range(MAX_GRAMMARS + 5):
        answers.ask(f"r{i}", grammar=f'start: "x{i}"')
        answers.run()
    assert len(answers.engine._grammars._known) == MAX_GRAMMARS
    assert answers.engine._grammars.find('start: "x0"') is None
    assert answers.engine._grammars.find(f'start: "x{MAX_GRAMMARS}"') is not None


def test_large_grammars_leave_dozens_of_others(monkeypatch):
    """Grammars are forgotten by their size too."""
    monkeypatch.setattr(grammars, "MAX_SIZE", 5000)
    answers = Answers()
    for i in range(40):
        answers.ask(f"r{i}", grammar=f'start: "x{i}"')
    answers.run()
    assert len(answers.engine._grammars._known) == 40
    for i in range(3):
        answers.ask(f"s{i}", grammar=f'start: "{i}{"y" * 2000}"', max_tokens=1)
        answers.run()
    known = [*answers.engine._grammars._known]
    assert [len(text) > 2000 for text in known] == [True, True]
    assert sum(map(len, known)) <= 5000


SCHEMA = {
    "type": "object",
    "properties": {
        "id": {"type": "integer", "minimum": -3, "maximum": 12},
        "kind": {"enum": ["a", "b", None]},
        "parts": {"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 3},
        "note": {"type": "string", "maxLength": 8},
    },
    "required": ["id", "kind", "parts", "note"],
    "additionalProperties": False,
}


def test_a_schema():
    answers = Answers()
    grammar = "start: %json " + json.dumps({**SCHEMA, "x-guidance": {"whitespace_flexible": False}})
    for name in "ABCDEFGH":
        answers.ask(name, grammar=grammar, temperature=80.0)
    answers.run()
    for name in "ABCDEFGH":
        assert answers.ends[name, 0] == "stop"
        jsonschema.validate(json.loads(answers.texts[name, 0]), SCHEMA)


def test_a_sequence_that_cannot_be_queued_does_not_take_others_with_it(monkeypatch):
    """They wait for grammars that are ready in the same step."""
    answers = Answers()
    other = "start: /[a-c]{2}/"
    for name, grammar in ("A", DIGITS), ("B", other), ("C", DIGITS):
        answers.ask(name, grammar=grammar)
    held, compiled = answers.engine._grammars, {}
    while len(compiled) < 2:
        compiled |= held.results(1.0)
    add = answers.engine.scheduler.add

    def faulty(seq, now):
        if seq.request.request_id == "A":
            raise ZeroDivisionError
        return add(seq, now)

    monkeypatch.setattr(held, "results", lambda wait: compiled if held._held else {})
    monkeypatch.setattr(answers.engine.scheduler, "add", faulty)
    answers.run()
    assert answers.ends == {("A", 0): "error", ("B", 0): "stop", ("C", 0): "stop"}
    assert len(answers.texts["C", 0]) == 3

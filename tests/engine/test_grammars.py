"""Sequences that follow a grammar, in an engine with the fake backend, which counts on wherever the
grammar allows it.
"""

from __future__ import annotations

import json
import threading
import time

import jsonschema
import pytest

from cllm.backends.fake.backend import FailingSteps, FakeBackend
from cllm.backends.fake.vocabulary import END
from cllm.core.params import SamplingParams
from cllm.core.request import Request
from cllm.engine import grammars
from cllm.engine.build import build_engine
from cllm.engine.commands import Abort, Add
from cllm.engine.engine import Engine
from cllm.engine.grammars import MAX_GRAMMARS
from cllm.engine.params import EngineParams
from cllm.engine.side_jobs import run_operations
from cllm.sampling.grammar import Grammar

DIGITS = "start: /[0-9]{3}/"


class Answers:
    """Runs requests in an engine and collects their texts and finish reasons, by name and index."""

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
        """Step until there is no work, for at most ``seconds`` of CPU time."""
        until = time.process_time() + seconds
        while self.engine.has_work() and time.process_time() < until:
            self.take(self.engine.step())
        assert not self.engine.has_work()
        return self


def generate(grammar: str, **params) -> tuple[bytes, str]:
    answers = Answers()
    answers.ask("A", grammar=grammar, **params)
    answers.run()
    return answers.texts.get(("A", 0), b""), answers.ends["A", 0]


@pytest.mark.parametrize("temperature", [0.0, 1.0, 50.0])
def test_text_follows_grammar_and_ends_with_it(temperature):
    text, end = generate(DIGITS, temperature=temperature, seed=3)
    assert len(text) == 3
    assert text.isdigit()
    assert end == "stop"


def test_grammar_overrides_ignore_eos():
    assert generate('start: "ab"', ignore_eos=True) == (b"ab", "stop")
    text, end = generate("start: /[0-9]+/", ignore_eos=True, temperature=90.0, seed=1)
    assert text.isdigit()
    assert end == "stop"


def test_max_tokens_ends_constrained_text():
    assert generate('start: "abcdef"', max_tokens=2) == (b"ab", "length")
    assert generate('start: "ab"', max_tokens=2) == (b"ab", "stop")


def test_every_sequence_of_request_follows_grammar():
    answers = Answers()
    answers.ask("A", grammar=DIGITS, n=4, temperature=9.0, seed=5)
    answers.run()
    texts = [answers.texts["A", i] for i in range(4)]
    assert all(text.isdigit() and len(text) == 3 for text in texts)
    assert len(set(texts)) > 1


@pytest.mark.parametrize("grammar", ["start: b", "start: a\na: a", '{"grammars": 5}'])
def test_invalid_grammar_ends_only_its_sequences(grammar):
    answers = Answers()
    answers.ask("A", grammar=grammar, n=2)
    answers.ask("B", max_tokens=3)
    answers.run()
    assert answers.ends == {("A", 0): "grammar", ("A", 1): "grammar", ("B", 0): "length"}


# every x is followed by !
EXCLAIMS = 'start: (shout "!")* rest\nshout[lazy]: /(?s:.*)x/\nrest: /(?s:.*)/'


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_loose_grammar_changes_only_forbidden_tokens(temperature):
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


def test_invalid_loose_grammar_is_ignored():
    free, bound = (
        generate("", max_tokens=9),
        generate("start: b", grammar_is_loose=True, max_tokens=9),
    )
    assert bound == free


class Gate:
    """Delays the tokenizer that grammars need until it is opened."""

    def __init__(self, engine: Engine) -> None:
        self.opened = threading.Event()
        vocabulary = engine.backend.vocabulary

        def make():
            self.opened.wait()
            return vocabulary.grammar_tokenizer(engine.backend.info.end_tokens)

        engine._grammars._make_tokenizer = make


def test_waiting_for_grammar_does_not_delay_others():
    """Other requests start and finish meanwhile, and no step waits."""
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


def test_sequence_waiting_for_grammar_can_be_aborted():
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


def test_parked_sequences_resume_their_grammar():
    """All sequences lose their cells in the middle and recompute them."""
    answers = Answers()
    for name in "ABCD":
        answers.ask(name, grammar="start: /[0-9]{60}/", temperature=5.0)
    while answers.engine.scheduler.statistics.num_steps < 20:
        answers.take(answers.engine.step())
    scheduler = answers.engine.scheduler
    assert run_operations(answers.engine.backend, scheduler, scheduler.sequences.empty_cells())
    answers.run()
    assert scheduler.statistics.num_parked == 4
    assert all(len(text) == 60 and text.isdigit() for text in answers.texts.values())
    assert set(answers.ends.values()) == {"stop"}


def test_failed_step_does_not_advance_grammar():
    answers = Answers(failing=FailingSteps(raise_at_step=4, raise_times=2))
    answers.ask("A", grammar='start: "abcdefgh"')
    answers.run()
    assert (answers.texts["A", 0], answers.ends["A", 0]) == (b"abcdefgh", "stop")


def test_constrained_sequences_get_no_draft_tokens():
    """The text is the same with and without speculation, although it is repetitive."""
    found = []
    for speculation in ("off", "prompt_lookup"):
        answers = Answers(speculation)
        answers.ask("A", grammar='start: ("0123456789"){6}')
        answers.run()
        found.append((answers.texts["A", 0], answers.engine.scheduler.statistics.num_guesses))
    assert found == [(b"0123456789" * 6, 0)] * 2


def test_grammar_is_compiled_once(monkeypatch):
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


def test_each_tenant_compiles_a_grammar_itself(monkeypatch):
    """The time does not show what others use. Their requests at the same time wait too."""
    compiled = []
    monkeypatch.setattr(
        "cllm.engine.grammars.Grammar",
        lambda text, tokenizer: compiled.append(text) or Grammar(text, tokenizer),
    )
    answers = Answers()
    for name in ("a", "a", "b"):
        request = Request(
            f"r{len(answers.ends)}{name}{len(compiled)}",
            [1],
            SamplingParams(temperature=0.0, grammar=DIGITS, max_tokens=9),
            cache_salt=f"{name}\0",
        )
        answers.engine.handle(Add(request))
        answers.run()
    assert compiled == [DIGITS] * 2


def test_least_recently_used_grammars_are_evicted():
    """Grammars that were used recently stay."""
    answers = Answers()
    for i in range(MAX_GRAMMARS + 5):
        answers.ask(f"r{i}", grammar=f'start: "x{i}"')
        answers.run()
    assert len(answers.engine._grammars._known) == MAX_GRAMMARS
    assert answers.engine._grammars.find(("", 'start: "x0"')) is None
    assert answers.engine._grammars.find(("", f'start: "x{MAX_GRAMMARS}"')) is not None


def test_grammars_are_evicted_by_total_size(monkeypatch):
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
    known = [text for _, text in answers.engine._grammars._known]
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


def test_json_schema_is_followed():
    answers = Answers()
    grammar = "start: %json " + json.dumps({**SCHEMA, "x-guidance": {"whitespace_flexible": False}})
    for name in "ABCDEFGH":
        answers.ask(name, grammar=grammar, temperature=80.0)
    answers.run()
    for name in "ABCDEFGH":
        assert answers.ends[name, 0] == "stop"
        jsonschema.validate(json.loads(answers.texts[name, 0]), SCHEMA)


def test_failure_to_queue_affects_only_its_sequence(monkeypatch):
    """The grammars of the others become ready in the same step."""
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

"""The end of reasoning, forced by the engine: by a budget or because the client has asked for it."""

from __future__ import annotations

import pytest

from cllm.backends.fake.backend import FailingSteps, FakeBackend
from cllm.core.output import TokenOutput
from cllm.core.params import SamplingParams, ThinkingBudget
from cllm.core.request import Request, SequenceProgress
from cllm.engine.build import build_engine
from cllm.engine.commands import Abort, Add, EndReasoning, Resume
from cllm.engine.params import EngineParams

OPEN, CLOSE = 200, 201
FORCE = (100, 101, CLOSE, 50)  # a message, the mark and what follows it


def thinking(num_tokens=None, **options) -> ThinkingBudget:
    options = {"inside": True, "closes_once": True, "ends_on_request": True, **options}
    return ThinkingBudget(num_tokens, (OPEN,), CLOSE, FORCE, **options)


class Run:
    """The outputs of an engine, and its state at the end."""

    def __init__(self, *turns: list, speculation="off", backend=None, **params) -> None:
        """Each step follows the commands of a turn. Then it goes on until all has ended."""
        settings = EngineParams(check=True, speculation=speculation, **params)
        engine = build_engine(backend or FakeBackend(length=999), settings)
        engine.scheduler.sequences.length_estimates.output = 4
        self.outputs: list[TokenOutput] = []
        left = [*turns]
        while left or engine.has_work():
            for command in left.pop(0) if left else []:
                if isinstance(command, EndReasoning):
                    engine.end_reasoning(command.request_id)
                else:
                    self.outputs += engine.handle(command)
            self.outputs += engine.step()
        self.stats = engine.stats()

    def tokens(self, name: str, index: int = 0) -> list[int]:
        own = (one for one in self.outputs if (one.request_id, one.index) == (name, index))
        return [one.token for one in own]

    @property
    def ends(self) -> list[str]:
        return [str(one.finish) for one in self.outputs if one.finish]


def add(name: str, prompt: list[int], **params) -> Add:
    return Add(Request(name, prompt, SamplingParams(**{"temperature": 0, **params})))


def count(last: int, number: int) -> list[int]:
    """Return what the fake model writes after the token ``last``."""
    return [*range(last + 1, last + 1 + number)]


def test_budget_writes_its_message_and_the_answer_follows() -> None:
    sent = Run([add("A", [1], max_tokens=9, thinking=thinking(3))])
    assert sent.tokens("A") == [2, 3, 4, *FORCE, 51, 52]
    assert sent.stats.num_thoughts_ended == 1


def test_drafts_change_no_token() -> None:
    """The text so far contains what the model writes, and the forced tokens."""
    prompt = [*range(1, 60), *FORCE, *count(50, 9), 1]
    for budget in range(12):
        params = {"max_tokens": 30, "thinking": thinking(budget)}
        plain, drafted = (
            Run([add("A", prompt, **params)], speculation=kind) for kind in ("off", "prompt_lookup")
        )
        assert drafted.tokens("A") == plain.tokens("A")
        assert plain.tokens("A") == [*count(1, budget), *FORCE, *count(50, 26 - budget)]
    assert drafted.stats.num_accepted > 0


def test_logprobs_of_forced_tokens_are_those_of_the_model() -> None:
    sent = Run([add("A", [1], max_tokens=4, thinking=thinking(1), logprobs=1)])
    outputs = sent.outputs
    assert [one.token for one in outputs] == [2, *FORCE[:3]]
    best = [one.logprobs.top[0][0] for one in outputs]
    assert best == [2, 3, 101, 102], "which expects others"
    assert outputs[1].logprobs.logprob < outputs[0].logprobs.logprob


def test_client_ends_the_reasoning_of_all_sequences() -> None:
    request = add("A", [1], n=2, max_tokens=9, thinking=thinking())
    other = add("B", [1], max_tokens=9, thinking=thinking())
    sent = Run([request, other], [], [EndReasoning("A"), EndReasoning("A"), EndReasoning("C")])
    for index in range(2):
        assert sent.tokens("A", index) == [2, 3, *FORCE, 51, 52, 53]
    assert sent.tokens("B") == count(1, 9)


def test_request_without_reasoning_goes_on() -> None:
    sent = Run([add("A", [1], max_tokens=9)], [EndReasoning("A")])
    assert sent.tokens("A") == count(1, 9)


def test_waiting_request_does_not_think() -> None:
    first = add("A", [1], max_tokens=6)
    second = add("B", [1], max_tokens=6, thinking=thinking())
    sent = Run([first], [second, EndReasoning("B")], max_num_seqs=1)
    assert sent.tokens("B") == [*FORCE, 51, 52]


def test_request_that_waits_for_its_grammar_does_not_think() -> None:
    grammar = {"grammar": "start: /(.|\\n)*/", "grammar_is_loose": True}
    request = add("A", [1], max_tokens=6, thinking=thinking(), **grammar)
    sent = Run([request, EndReasoning("A")])
    assert sent.tokens("A") == [*FORCE, 51, 52]


def test_parked_sequence_ends_its_reasoning_when_it_resumes() -> None:
    """Two sequences do not fit into the cells together."""
    lasts = {"A": 1, "B": 9}
    options = {"max_tokens": 40, "thinking": thinking()}
    for turn in range(20, 34):
        backend = FakeBackend(length=999, context_length=48, num_cells=48)
        requests = [add(name, [last], **options) for name, last in lasts.items()]
        sent = Run(requests, *[[]] * turn, [*map(EndReasoning, lasts)], backend=backend)
        assert sent.stats.num_parked > 0
        for name, last in lasts.items():
            written = sent.tokens(name)
            begin = written.index(FORCE[0])
            assert written == [*count(last, begin), *FORCE, *count(50, 36 - begin)], (turn, name)


def test_failed_step_changes_no_token() -> None:
    backend = FakeBackend(length=999, failing=FailingSteps(raise_at_step=5))
    sent = Run([add("A", [1], max_tokens=9, thinking=thinking(3))], backend=backend)
    assert sent.tokens("A") == [2, 3, 4, *FORCE, 51, 52]


@pytest.mark.parametrize("cut", range(8))
def test_another_engine_goes_on_at_any_token(cut) -> None:
    """It gets the tokens that were delivered, and is told again what the client has asked for."""
    whole = [2, 3, *FORCE, 51, 52]
    request = add("A", [1], max_tokens=8, thinking=thinking()).request
    resume = Resume(request, {0: SequenceProgress(whole[:cut])})
    sent = Run([resume, EndReasoning("A")])
    written = [*whole[:cut], *sent.tokens("A")]
    assert written == (whole if cut >= 2 else [*whole[:cut], *FORCE, *count(50, 4 - cut)])


def test_request_may_be_aborted_while_its_reasoning_ends() -> None:
    request = add("A", [1], max_tokens=9, thinking=thinking())
    sent = Run([request], [EndReasoning("A")], [Abort("A"), EndReasoning("A")])
    assert sent.tokens("A") == [2, FORCE[0], -1]
    assert sent.ends == ["abort"]


def test_text_ends_within_the_forced_tokens_if_it_gets_too_long() -> None:
    sent = Run([add("A", [1], max_tokens=4, thinking=thinking(2))])
    assert sent.tokens("A") == [2, 3, *FORCE[:2]]
    assert sent.ends == ["length"]

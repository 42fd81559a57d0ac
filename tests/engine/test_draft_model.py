"""A second model guesses; the text is the first one's."""

from __future__ import annotations

import pytest
from conftest import is_right

from cllm import LLM, SamplingParams
from cllm.backends.fake.backend import FakeBackend
from cllm.core.request import Request
from cllm.core.sequence import Sequence
from cllm.engine.build import build_engine
from cllm.engine.commands import Add
from cllm.engine.draft_model import DraftModel
from cllm.engine.params import EngineParams
from cllm.errors import StartupError


def drafter(**options) -> DraftModel:
    return DraftModel(
        FakeBackend(**{"context_length": 64, "max_num_seqs": 2, "length": 60, **options})
    )


def sequence(tokens: list[int]) -> Sequence:
    return Sequence(Request("A", tokens, SamplingParams()), 0, 0, 64)


def test_it_guesses_what_its_model_says():
    """The fake counts on; so many guesses as were asked for, for each sequence."""
    a, b = sequence([1, 2, 3]), sequence([50])
    model = drafter()
    assert model.draft({a: 3, b: 1}) == {a: (4, 5, 6), b: (51,)}


def test_wrong_guesses_are_taken_back():
    """What was accepted stays in its cells, what was not is trimmed, and what came instead is
    computed.
    """
    seq, model = sequence([1, 2, 3]), drafter()
    model.draft({seq: 3})
    for token in (4, 9):
        seq.append(token)
    assert model.draft({seq: 2}) == {seq: (10, 11)}


def test_a_prompt_enters_in_chunks():
    """Prompts longer than a step of the draft model take several of its steps."""
    seq, model = sequence(list(range(40))), drafter(max_num_batched_tokens=16)
    assert model.draft({seq: 2}) == {seq: (40, 41)}


def test_more_sequences_than_it_can_follow():
    """It follows those that were asked for last, and forgets who has gone."""
    seqs, model = [sequence([i * 10]) for i in range(5)], drafter()
    for seq in seqs:
        assert model.draft({seq: 1}) == {seq: (seq.tokens[-1] + 1,)}
    assert len(model.draft(dict.fromkeys(seqs, 1))) == 2
    for seq in seqs:
        model.forget(seq)
    assert model.draft({seqs[0]: 1}) == {seqs[0]: (1,)}


def test_the_end_of_its_context():
    """There is no room for guesses at the end."""
    seq, model = sequence(list(range(63))), drafter()
    assert model.draft({seq: 5}) == {seq: (63,)}
    seq.append(63)
    assert model.draft({seq: 5}) == {}


def test_the_text_is_the_models(fake_engine):
    """With a draft model that is always right, and one that is not, the tokens are those
    without.
    """
    params = {
        "backend": "fake",
        "speculation": "draft_model",
        "draft_path": "fake",
        "context_length": 1024,
    }
    engine = build_engine(FakeBackend(length=40), EngineParams(**params, check=True))
    engine.handle(Add(Request("A", [1, 2, 3], SamplingParams(temperature=0, max_tokens=30))))
    outputs = []
    while engine.scheduler.has_work():
        outputs += engine.step()
    assert [output.token for output in outputs] == list(range(4, 34))
    assert engine.scheduler.num_guesses > 0


def test_no_draft_model_named():
    """One line at the start."""
    with pytest.raises(StartupError, match=r"model\.draft_path names no model"):
        build_engine(FakeBackend(), EngineParams(speculation="draft_model"))


@pytest.mark.llama
def test_the_built_in_model_drafts_for_itself(builtin_path, known_questions):
    """Nearly every guess is right, so there are few steps; the answers are right."""
    llm = LLM(
        str(builtin_path),
        scheduler_speculation="draft_model",
        model_draft_path=str(builtin_path),
        model_max_context_length=512,
        scheduler_max_num_seqs=2,
    )
    for question in known_questions(6, seed=11):
        done = llm.chat(question.messages, SamplingParams(temperature=0), question.tools)
        assert is_right(done, question)
    stats = llm._engine.scheduler.stats()
    assert stats.num_accepted > 0.7 * stats.num_guesses > 0

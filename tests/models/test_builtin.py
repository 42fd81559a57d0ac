"""The built-in model: the file that other tests expect, and its manners towards newcomers."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator

import pytest
from conftest import BUILTIN_SHA256
from openings import OPENINGS, ORDERS, RULES

from cllm import LLM, SamplingParams

pytestmark = pytest.mark.llama


@pytest.fixture(scope="module")
def llm(builtin_path) -> Iterator[LLM]:
    with LLM(str(builtin_path), model_max_context_length=512) as llm:
        yield llm


def ask(llm: LLM, chats: list[list[dict[str, str]]]) -> list[str]:
    prompts = [llm.encode_chat(chat) for chat in chats]
    answers = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=100))
    return [answer.text for answer in answers]


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def test_builtin_model_has_expected_hash(builtin_path):
    """After training the model again, check the expected texts of the tests, then update the hash."""
    assert hashlib.sha256(builtin_path.read_bytes()).hexdigest() == BUILTIN_SHA256


def test_openings_of_newcomers_get_the_answer_of_their_intent(llm):
    openings = [(intent, text) for intent, texts in OPENINGS.items() for text in texts]
    assert set(Counter(intent for intent, _ in openings).values()) == {20}
    assert len(OPENINGS) == 15
    answers = ask(llm, [[user(text)] for _, text in openings])
    wrong = [
        (text, answer)
        for (intent, text), answer in zip(openings, answers, strict=True)
        if not RULES[intent](text, answer)
    ]
    assert len(wrong) <= 0.06 * len(openings), wrong  # the target is 5 %


def test_orders_in_system_messages_are_obeyed(llm):
    answers = ask(llm, [[{"role": "system", "content": o.system}, user(o.user)] for o in ORDERS])
    wrong = [
        (order, answer)
        for order, answer in zip(ORDERS, answers, strict=True)
        if not order.is_obeyed(answer)
    ]
    assert len(wrong) <= 0.1 * len(ORDERS), wrong

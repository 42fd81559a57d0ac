"""Texts that the engine process tokenizes for the API process."""

from __future__ import annotations

import asyncio
import os
import queue
import signal
import sys
import threading

import pytest
from conftest import PATIENCE, stop_process

from cllm.backends.fake.vocabulary import CONTROL, FakeVocabulary
from cllm.core.segments import Segment
from cllm.engine.params import EngineParams
from cllm.errors import EngineError
from cllm.process.messages import Abandon, Tokenize, Tokenized, frame
from cllm.process.pending_tokens import PendingTokens
from cllm.process.pool import Pool
from cllm.process.tokenizing import (
    LONG,
    MAX_TOKENS,
    NUM_THREADS,
    TokenizeQueue,
    divide,
    start_tokenizing,
)

START, END = CONTROL


class Tokenizer:
    """Waits for ``release`` before it tokenizes a text that begins with "long"."""

    def __init__(self) -> None:
        self.release = threading.Event()

    def tokenize(self, text: str, *, add_special: bool, parse_special: bool) -> list[int]:
        if text.startswith("long"):
            assert self.release.wait(PATIENCE)
        if text == "broken":
            raise MemoryError
        return [len(text)]


def start(tokenizer: Tokenizer) -> tuple[TokenizeQueue, queue.Queue[Tokenized]]:
    questions = TokenizeQueue()
    answers: queue.Queue[Tokenized] = queue.Queue()
    start_tokenizing(questions, tokenizer, answers.put)
    return questions, answers


LONG_TEXT = [[Segment("long" + "!" * LONG)]]


def test_short_text_does_not_wait_for_long_ones():
    tokenizer = Tokenizer()
    questions, answers = start(tokenizer)
    for number in range(5):
        questions.put(Tokenize(number, LONG_TEXT))
    questions.put(Tokenize(9, [[Segment("short"), Segment("er")], []]))
    assert answers.get(timeout=PATIENCE) == Tokenized(9, [[5, 2], []])
    tokenizer.release.set()
    rest = [answers.get(timeout=PATIENCE) for _ in range(5)]
    assert {answer.number for answer in rest} == set(range(5))


def test_abandoned_texts_are_not_tokenized():
    tokenizer = Tokenizer()
    questions, answers = start(tokenizer)
    for number in range(20):
        questions.put(Tokenize(number, LONG_TEXT))
    for number in range(NUM_THREADS, 19):
        questions.abandon(number)
    tokenizer.release.set()
    found = {answers.get(timeout=PATIENCE).number for _ in range(NUM_THREADS + 1)}
    assert found == {*range(NUM_THREADS), 19}
    questions.put(Tokenize(20, LONG_TEXT))
    assert answers.get(timeout=PATIENCE).number == 20
    assert not questions._waiting


def test_abandoned_texts_are_freed():
    """Before the texts in front of them have been tokenized."""
    tokenizer = Tokenizer()
    questions, _ = start(tokenizer)
    for number in range(NUM_THREADS):
        questions.put(Tokenize(number, LONG_TEXT))
    asked = Tokenize(9, LONG_TEXT)
    questions.put(asked)
    num_references = sys.getrefcount(asked)
    questions.abandon(9)
    assert sys.getrefcount(asked) == num_references - 1 == 2  # of this function, and the argument
    tokenizer.release.set()


def test_failure_is_an_answer_and_the_next_text_is_tokenized(caplog):
    questions, answers = start(Tokenizer())
    for _ in range(NUM_THREADS + 1):
        questions.put(Tokenize(1, [[Segment("broken")]]))
        assert answers.get(timeout=PATIENCE) == Tokenized(1, None)
    assert "cannot tokenize" in caplog.text


def test_answer_that_cannot_be_sent_is_a_failure_and_the_next_text_is_tokenized():
    """The first part of an answer has been sent when memory runs out."""
    questions, answers = TokenizeQueue(), queue.Queue()
    is_short_of_memory = True

    def send(answer):
        nonlocal is_short_of_memory
        if answer.tokens and not answer.more and is_short_of_memory:
            is_short_of_memory = False
            raise MemoryError
        answers.put(answer)

    class Longest:
        def tokenize(self, text, **_):
            return [0] * (MAX_TOKENS + 1)

    start_tokenizing(questions, Longest(), send)
    for _ in range(NUM_THREADS + 1):
        is_short_of_memory = True
        questions.put(Tokenize(1, [[Segment("a")]]))
        assert answers.get(timeout=PATIENCE).more
        assert answers.get(timeout=PATIENCE) == Tokenized(1, None)
    questions.put(Tokenize(2, [[]]))
    assert answers.get(timeout=PATIENCE) == Tokenized(2, [[]])


@pytest.mark.parametrize(
    "lengths",
    [
        [],
        [0],
        [MAX_TOKENS],
        [MAX_TOKENS + 1],
        [0, MAX_TOKENS, 0, 1, 0],
        [3 * MAX_TOKENS, 5],
        [MAX_TOKENS - 1, 3, 2 * MAX_TOKENS, 0, MAX_TOKENS],
    ],
)
def test_long_answers_come_in_parts(lengths):
    texts = [[*range(length)] for length in lengths]

    async def put_together():
        pending = PendingTokens([], 0, None)
        parts = [*divide(7, texts)]
        for part in parts:
            assert part.number == 7
            assert sum(map(len, part.tokens)) <= MAX_TOKENS
            assert not pending.future.done()
            pending.put(part)
        assert len(parts) <= sum(lengths) // MAX_TOKENS + 1
        return await pending.future

    assert asyncio.run(put_together()) == texts


def run(test):
    """Run ``test(pool)`` with a started engine."""

    async def main():
        pool = Pool(EngineParams(backend="fake"))
        await pool.start()
        try:
            await asyncio.wait_for(test(pool), PATIENCE)
        finally:
            await pool.close()

    asyncio.run(main())


def test_client_gets_vocabulary_and_tokens():
    """Many callers at once get their own."""

    async def test(pool):
        assert pool.vocabulary.chat_template == FakeVocabulary.chat_template
        parsed = [Segment("<|im_start|>a", parse_special=True), Segment("<|im_end|>")]
        texts = [[parsed, [Segment(f"{i}")]] for i in range(50)]
        answers = await asyncio.gather(*map(pool.tokenize, texts))
        for i, answer in enumerate(answers):
            assert answer == [[START, *b"a<|im_end|>"], [*f"{i}".encode()]]
        assert not pool._texts.pending

    run(test)


@pytest.mark.slow
def test_next_engine_tokenizes_what_a_dead_one_has_not():
    """Also texts that arrive while there is none, and from the beginning."""

    async def test(pool):
        stop_process(pool.pid)
        asking = asyncio.create_task(pool.tokenize([[Segment("a")]]))
        await asyncio.sleep(0)
        [pending] = pool._texts.pending.values()
        pending.put(Tokenized(0, [[1, 2]], more=True))
        os.kill(pool.pid, signal.SIGKILL)
        assert await pool.tokenize([[Segment("b")]]) == [[98]]
        assert await asking == [[97]]

    run(test)


@pytest.mark.parametrize("how", ["end_all", "close"])
def test_shutdown_ends_tokenizing_and_explanations(how, monkeypatch):
    """The engine is stopped, so it does not answer. An answer that comes later goes to nobody."""
    monkeypatch.setattr("cllm.process.supervisor.CLOSE_TIMEOUT", 0.1)

    async def test(pool):
        stop_process(pool.pid)
        asking = [
            asyncio.create_task(pool.tokenize([[Segment("a")]])),
            asyncio.create_task(pool.explain(1)),
        ]
        await asyncio.sleep(0)
        if how == "end_all":
            pool.end_all(EngineError("The server is shutting down."))
        else:
            await pool.close()
        for one in asking:
            with pytest.raises(EngineError):
                await one
        if how == "end_all":
            os.kill(pool.pid, signal.SIGCONT)
            assert await pool.tokenize([[Segment("b")]]) == [[98]]
            assert (await pool.explain(1)).running == []

    run(test)


def test_cancelled_caller_leaves_nothing_behind():
    async def test(pool):
        stop_process(pool.pid)
        (member,), written = pool.members, []
        write = member.write
        member.write = lambda data: (written.append(data), write(data))
        asking = asyncio.create_task(pool.tokenize([[Segment("a")]]))
        await asyncio.sleep(0)
        (number,) = pool._texts.pending
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        assert written[-1] == frame(Abandon(number))
        os.kill(pool.pid, signal.SIGCONT)
        assert await pool.tokenize([[Segment("b")]]) == [[98]]
        assert not pool._texts.pending

    run(test)

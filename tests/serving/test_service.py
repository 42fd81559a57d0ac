"""Streamed answers: text that arrived before an error is delivered before the error."""

from __future__ import annotations

import asyncio

import pytest

from cllm.backends.fake.vocabulary import FakeVocabulary
from cllm.core.output import FinishReason, TokenOutput
from cllm.core.params import SamplingParams
from cllm.errors import EngineError
from cllm.observe.metrics import Metrics
from cllm.process.in_flight_request import OutputStream
from cllm.serving.answer import Answer, Generation, RequestTimeout, SchedulingOptions, make_request
from cllm.text.output_reader import OutputReader


class Engine:
    def close_stream(self, stream) -> None:
        pass


def read_outputs(generation: Generation, stream: OutputStream) -> OutputReader:
    pieces = FakeVocabulary().pieces
    return OutputReader(stream.requests, pieces, generation.plan, generation.usage)


def test_text_before_an_error_is_delivered_first() -> None:
    """Two tokens and the error arrive together, because the client did not read for a while."""
    params = SamplingParams(n=2)
    stream = OutputStream([make_request("a-0", [1], params, SchedulingOptions())])
    generation = Generation("a", [[1]], params)
    answer = Answer(
        generation,
        stream,
        Engine(),
        Metrics("m"),
        read_outputs(generation, stream),
        None,
        None,
    )
    for index, token in ((0, 65), (1, 66), (0, 67)):
        stream.put(TokenOutput("a-0", index, token))
    stream.put(TokenOutput("a-0", 1, -1, FinishReason.ERROR, False))
    with answer:
        assert [(delta.index, delta.text) for delta in answer.take()] == [(0, "AC"), (1, "B")]
        with pytest.raises(EngineError):
            answer.take()
        assert answer.generation.usage.completion_tokens == 3


@pytest.mark.parametrize(
    ("queue_timeout", "deadline", "code"),
    [
        (60.0, 0.5, "deadline_exceeded"),
        (0.5, 60.0, "queue_timeout"),
        (None, 0.5, "deadline_exceeded"),
    ],
)
def test_timeout_error_names_the_limit_that_the_engine_saw_expire(
    queue_timeout, deadline, code
) -> None:
    """The engine's clock started before this answer was created, much earlier on a busy machine."""
    options = SchedulingOptions(queue_timeout=queue_timeout, deadline=deadline)
    generation = Generation("a", [[1]], SamplingParams(), options)
    stream = OutputStream([make_request("a-0", [1], generation.params, options)])
    stream.put(TokenOutput("a-0", 0, -1, FinishReason.TIMEOUT, False))

    async def test() -> None:
        with Answer(
            generation, stream, Engine(), Metrics("m"), read_outputs(generation, stream), None, None
        ) as answer:
            assert not answer.take()
            with pytest.raises(RequestTimeout) as caught:
                answer.take()
            assert caught.value.code == code

    asyncio.run(test())

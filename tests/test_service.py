"""An answer on its way: what came before a fault is given out before the fault."""

from __future__ import annotations

import pytest

from cllm.answer import Answer, Generation, SchedulingOptions, request_of
from cllm.backends.fake import FakeVocabulary
from cllm.core.output import FinishReason, TokenOutput
from cllm.core.params import SamplingParams
from cllm.errors import EngineError
from cllm.observe.metrics import Metrics
from cllm.process.flights import Stream


class Engine:
    def close_stream(self, stream) -> None:
        pass


def test_text_before_an_error_is_not_lost() -> None:
    """Two tokens and the error come together, because the client did not read for a while."""
    params = SamplingParams(n=2)
    stream = Stream([request_of("a-0", [1], params, SchedulingOptions())])
    answer = Answer(Generation("a", [[1]], params), stream, Engine(), Metrics("m"), FakeVocabulary().pieces, None, None)
    for index, token in ((0, 65), (1, 66), (0, 67)):
        stream.put(TokenOutput("a-0", index, token))
    stream.put(TokenOutput("a-0", 1, -1, FinishReason.ERROR, False))
    with answer:
        assert [(delta.index, delta.text) for delta in answer.take()] == [(0, "AC"), (1, "B")]
        with pytest.raises(EngineError):
            answer.take()
        assert answer.generation.usage.completion_tokens == 3

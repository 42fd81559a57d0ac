"""The CPU time inside llama_decode."""

from __future__ import annotations

import pytest

from cllm.core.params import SamplingParams
from cllm.local.llm import LLM
from cllm.observe.cpu_time import decoding

pytestmark = pytest.mark.llama


def test_decoding_is_measured() -> None:
    """It counts while the engine computes, whoever calls it."""
    with LLM() as llm:
        before = decoding.seconds
        llm.generate("Count from 1 to 9.", SamplingParams(max_tokens=16, ignore_eos=True))
        assert decoding.seconds > before

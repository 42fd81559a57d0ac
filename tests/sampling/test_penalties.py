"""Penalties and logit_bias."""

from __future__ import annotations

import numpy as np
import pytest

from cllm.core.params import SamplingParams
from cllm.core.request import Request
from cllm.core.sequence import Sequence
from cllm.sampling.penalties import add_bias, penalize


def penalized(logits: list[float], prompt: list[int], output: list[int], **params) -> list[float]:
    seq = Sequence(Request("A", prompt, SamplingParams(**params)), 0, 0, 99)
    for token in output:
        seq.append(token)
    row = np.array(logits, np.float32)
    penalize(row, seq)
    return row.tolist()


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        ({"repetition_penalty": 2.0}, [1.0, 1.0, -4.0, 2.0]),
        ({"presence_penalty": 0.5}, [2.0, 1.5, -2.5, 2.0]),
        ({"frequency_penalty": 0.5}, [2.0, 1.5, -3.0, 2.0]),
        (
            {"repetition_penalty": 2.0, "presence_penalty": 0.5, "frequency_penalty": 0.25},
            [1.0, 0.25, -5.0, 2.0],
        ),
        ({"presence_penalty": -2.0}, [2.0, 4.0, 0.0, 2.0]),
        ({"repetition_penalty": 0.5}, [4.0, 4.0, -1.0, 2.0]),
    ],
)
def test_penalties_count_the_right_tokens(params, expected):
    """Repetition counts prompt and output, presence and frequency only the output. Token 0 is only
    in the prompt, 1 once in the output, 2 in the prompt and twice in the output, 3 nowhere.
    """
    assert penalized([2.0, 2.0, -2.0, 2.0], [0, 0, 2], [1, 2, 2], **params) == pytest.approx(
        expected
    )


def test_sequence_without_penalties_keeps_no_counts():
    """Its logits do not change."""
    assert Sequence(Request("A", [1], SamplingParams()), 0, 0, 99).token_counts is None
    assert penalized([1.0, 2.0], [0, 1], [1]) == [1.0, 2.0]


def test_logit_bias_changes_only_its_tokens():
    row = np.array([1, 2, 3, 4], np.float32)
    add_bias(row, {3: -100.0, 0: 0.5})
    assert row.tolist() == [1.5, 2, 3, -96]

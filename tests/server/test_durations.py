"""Durations of keep_alive, as Ollama's clients write them."""

from __future__ import annotations

import time

import pytest

from cllm.server.ollama.schema import parse_duration


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("5m", 300), ("1h30m", 5400), ("1.5s", 1.5), (".5s", 0.5), ("2.s", 2), ("-1", -1), ("30", 30)],
)
def test_duration_has_its_seconds(text, seconds):
    assert parse_duration(text) == seconds


@pytest.mark.parametrize(
    "text", ["", "x", "1" * 90 + "x", "1" * 5000 + "x", "1.1" * 5000, "1s" * 5000 + "x"]
)
def test_long_text_without_a_unit_is_refused_at_once(text):
    begun = time.process_time()
    with pytest.raises(ValueError, match="is not a duration"):
        parse_duration(text)
    assert time.process_time() - begun < 0.5

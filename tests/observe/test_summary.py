"""The lines about models that compute."""

from __future__ import annotations

import pytest

from cllm.core.output import Stats
from cllm.observe.log import REQUESTS
from cllm.observe.summary import Summary

IDLE = Stats(num_cells=100, num_cells_idle=40)


@pytest.fixture(autouse=True)
def visible(caplog):
    caplog.set_level("INFO", REQUESTS)


def test_line_has_the_rates_since_the_last_one(caplog) -> None:
    summary = Summary(10.0)
    assert not summary.is_due(90.0)  # the server has just started
    assert summary.is_due(100.0)
    summary.write("m", IDLE, 50)
    assert caplog.records == []  # nothing was computed
    assert not summary.is_due(109.9)
    assert summary.is_due(110.0)
    stats = Stats(
        *(3, 2),
        num_cells=100,
        num_cells_held=60,
        num_steps=7,
        num_prefill_tokens=200,
        num_cache_queries=400,
        num_cell_hits=90,
        num_ram_hits=10,
    )
    summary.write("m", stats, 80)
    [line] = caplog.records
    assert line.fields == {
        "model": "m",
        "running": 3,
        "waiting": 2,
        "prompt_tokens_per_s": 20.0,
        "output_tokens_per_s": 3.0,
        "cached_percent": 25,
        "cells_used": 60,
        "cells_idle": 0,
        "cells": 100,
        "parked": 0,
    }
    assert summary.is_due(120.0)
    summary.write("m", Stats(num_steps=7), 80)  # idle again
    assert len(caplog.records) == 1


def test_model_whose_requests_only_wait_has_lines(caplog) -> None:
    summary = Summary(10.0)
    summary.is_due(90.0)
    assert summary.is_due(100.0)
    summary.write("m", Stats(num_waiting=1), 0)
    assert len(caplog.records) == 1


def test_no_lines_without_an_interval() -> None:
    assert not Summary(None).is_due(1e9)

"""``cllm top`` on a fake server."""

import json

import pytest
from rich.console import Console
from server.conftest import running

from cllm.cli.main import main
from cllm.cli.top import render
from cllm.scheduler.trace import SequenceState
from cllm.server.live.schema import EngineState, Latencies, ModelState, Snapshot


@pytest.fixture(scope="module")
def fake_server():
    yield from running("--backend.name", "fake")


def engine(*sequences, **fields):
    values = dict.fromkeys(EngineState.__struct_fields__, 0) | {
        "is_ready": True,
        "num_cells": 100,
        "num_cells_held": 50,
        "num_cells_idle": 25,
        "stage_ms": {"forward": 3.25, "side_job": 0.0},
        "steps": [],
        "sequences": [*sequences],
    }
    return EngineState(**values | fields)


def snapshot(*engines, status="loaded", share=1.0):
    model = ModelState("m", status, share, 3_000_000_000, 2, 41.0, 7.0, [], [*engines])
    return Snapshot(0.0, "0.1.0", True, [model], Latencies(9, 1, [0.5, 1, 2], [0.01, 0.02, 0.03]))


def waiting(name):
    return SequenceState(name, "ann", "normal", "queued", 2.0, 2.0, 101, reason="all are in use")


def show(shown, height=None):
    console = Console(width=200)
    with console.capture() as text:
        console.print(render(shown, "here", height))
    return text.get().splitlines()


def test_view_has_a_line_for_each_model_engine_and_request():
    lines = show(snapshot(engine(waiting("a.0")), engine(is_ready=False, num_restarts=2)))
    assert lines[0] == "cLLM 0.1.0 at here, ready"
    assert "9 requests, 1 failed; first token: 0.5 s, 99 %: 2 s" in lines[1]
    assert lines[2].startswith("m: loaded, 3.00 GB, 2 requests, 41 output tokens/s, 7 prompt")
    assert "engine 0 ready, cells ██████████▒▒▒▒▒····· 50 used" in lines[3]
    assert lines[3].endswith("ms of a step: forward 3.25")
    assert "not ready, 2 restarts" in lines[4]
    assert lines[5] == "Requests: 1"
    assert lines[6] == (
        "a.0 (account ann, class normal) has waited 2.0 s with a prompt of 101 tokens, because "
        "all are in use."
    )


def test_view_fits_the_terminal():
    lines = show(snapshot(engine(*(waiting(f"{i}.0") for i in range(50)))), height=12)
    assert len(lines) == 12
    assert lines[-1] == "... and 44 more"


def test_loading_model_shows_its_progress():
    assert "m: loading, 40%" in show(snapshot(status="loading", share=0.4))[2]


@pytest.mark.slow
def test_once_prints_one_snapshot(fake_server, capsys):
    main(["top", "--url", fake_server.url, "--once", "--json"])
    (line,) = capsys.readouterr().out.splitlines()
    assert json.loads(line)["models"][0]["name"] == "fake"
    for more in (["--once"], []):  # the output is no terminal
        main(["top", "--url", fake_server.url, *more])
        assert "fake: loaded" in capsys.readouterr().out


@pytest.mark.slow
def test_server_that_does_not_answer_or_is_another_one_is_reported(fake_server, capsys):
    for url in ("http://127.0.0.1:9", f"{fake_server.url}/nothing"):
        with pytest.raises(SystemExit) as ended:
            main(["top", "--url", url, "--once"])
        assert ended.value.code == 2
        assert capsys.readouterr().err.startswith("cllm: ")

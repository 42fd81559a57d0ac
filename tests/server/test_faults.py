"""Faults of the engine that tests cause, and what clients see of them."""

from __future__ import annotations

import concurrent.futures
import json

import preloaded
import pytest

FAKE = ("--backend.name", "fake", "--context", "4096")
POISON = {"prompt": [77, 7], "max_tokens": 50, "ignore_eos": True}


def body_of(seed, **more):
    return {"prompt": "a", "max_tokens": 60, "seed": seed, "ignore_eos": True, **more}


def cause(server, *faults):
    answer = server.client.post("/faults", json={"faults": [*faults]})
    assert answer.status_code == 200, answer.text


def test_faults_are_off_by_default(fake_server):
    answer = fake_server.client.post("/faults", json={"faults": []})
    assert answer.status_code == 403
    assert "server.enable_faults" in answer.json()["error"]["message"]


@pytest.mark.slow
def test_faults_need_a_loopback_address():
    where = ("--host", "0.0.0.0", "--port", "0")
    result = preloaded.run("serve", *FAKE, "--server.enable-faults", *where)
    assert result.returncode == 2
    assert "server.enable_faults needs a loopback address" in result.stderr


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["crash", "kill", "raise", "memory"])
def test_each_fault_is_survived(start_server, kind):
    """The answer is the same as without it."""
    server = start_server(*FAKE, "--server.enable-faults")
    calm = server.client.post("/v1/completions", json=body_of(1)).json()
    cause(server, {"kind": kind, "after_steps": 9})
    disturbed = server.client.post("/v1/completions", json=body_of(1)).json()
    assert disturbed["choices"] == calm["choices"]
    assert server.metric("engine_restarts_total") == (kind in ("crash", "kill"))


@pytest.mark.slow
def test_poison_gets_500_in_each_dialect_and_others_their_answer(start_server):
    """In a stream, an error event. The other clients see a pause."""
    server = start_server(*FAKE, "--server.enable-faults")
    calm = [server.client.post("/v1/completions", json=body_of(i)).json() for i in range(6)]
    cause(server, {"kind": "crash", "token": 77})
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        others = [
            pool.submit(server.client.post, "/v1/completions", json=body_of(i)) for i in range(6)
        ]
        poison = server.client.post("/v1/completions", json=POISON)
        assert [other.result().json()["choices"] for other in others] == [
            one["choices"] for one in calm
        ]
    assert (poison.status_code, poison.json()["error"]["code"]) == (500, "engine_crashed")
    assert 2 <= server.metric("engine_restarts_total") <= 7


@pytest.mark.slow
def test_deadline_holds_while_the_engine_hangs(start_server):
    """504 if nothing has been sent, else an error event and the end of the stream."""
    server = start_server(*FAKE, "--server.enable-faults")
    cause(server, {"kind": "hang", "after_steps": 30})
    limited = body_of(1, max_tokens=2000, stream=True, deadline_ms=1500)
    with server.client.stream("POST", "/v1/completions", json=limited) as answer:
        lines = [line for line in answer.iter_lines() if line]
    assert json.loads(lines[-2].removeprefix("data: "))["error"]["code"] == "deadline_exceeded"
    assert lines[-1] == "data: [DONE]"
    for name, code in (("deadline_ms", "deadline_exceeded"), ("queue_timeout_ms", "queue_timeout")):
        answer = server.client.post("/v1/completions", json=body_of(2, **{name: 500}))
        assert (answer.status_code, answer.json()["error"]["code"]) == (504, code)
        assert answer.elapsed.total_seconds() < 3  # 0.5 s late on a machine without other work

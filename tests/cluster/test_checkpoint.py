"""A replica serves a checkpoint, which PyTorch computes."""

from __future__ import annotations

import pytest
from cluster.conftest import start_front

QUESTION = {"role": "user", "content": "What is 27 plus 45?"}


@pytest.mark.slow
@pytest.mark.torch
def test_checkpoint_is_served_through_a_front(start_server, builtin_checkpoint):
    replica = start_server("--model", str(builtin_checkpoint), "--context", "512")
    front = start_front(start_server, replica.url)
    [model] = front.client.get("/v1/models").json()["data"]
    assert model["id"] == builtin_checkpoint.name
    body = {"model": model["id"], "messages": [QUESTION], "temperature": 0}
    answer = front.client.post("/v1/chat/completions", json=body).json()
    assert answer["choices"][0]["message"]["content"] == "72"
    assert replica.metric("request_success_total") == 1

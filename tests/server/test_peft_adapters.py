"""LoRA adapters of a checkpoint, in the form of PEFT, as models of a server."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from checkpoints import write_adapter

pytest.importorskip("torch", reason="needs the extra torch: tools/setup.sh --torch")
pytestmark = pytest.mark.torch

SETTINGS = """
model: {{path: {model}, name: base, max_context_length: 1024}}
backend: {{name: torch, torch: {{device: cpu}}}}
adapters:
  one: {{path: {folder}/one}}
  late: {{path: {folder}/late}}
server: {{allow_model_changes: true}}
"""
QUESTION = "What is 27 plus 45?"
INVOCATION = [47, 118]


@pytest.fixture(scope="module")
def folder(builtin_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("adapters")
    for seed, name in enumerate(("one", "two", "late")):
        write_adapter(folder / name, builtin_checkpoint, seed)
    path = folder / "late" / "adapter_config.json"
    settings = json.loads(path.read_text()) | {"alora_invocation_tokens": INVOCATION}
    path.write_text(json.dumps(settings))
    (folder / "c.yaml").write_text(SETTINGS.format(folder=folder, model=builtin_checkpoint))
    return folder


@pytest.fixture(scope="module")
def server(start_server_once, folder: Path):
    return start_server_once("--config", str(folder / "c.yaml"))


def complete(server, model, prompt=QUESTION, **more):
    body = {"model": model, "prompt": prompt, "max_tokens": 1, "temperature": 0, **more}
    answer = server.client.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def scores(server, model, prompt=QUESTION):
    """Return the logprobs of the most probable first tokens."""
    found = complete(server, model, prompt, min_tokens=1, logprobs=10)
    return found["choices"][0]["logprobs"]["top_logprobs"][0]


def same(first, second):
    """Whether these are the scores of the same model, which depend slightly on the batch."""
    common = first.keys() & second.keys()
    return len(common) >= 7 and all(abs(first[token] - second[token]) < 0.01 for token in common)


def test_adapter_has_its_own_answers_and_shares_no_prefix(server) -> None:
    base, one = scores(server, "base"), scores(server, "one")
    assert not same(base, one)
    assert same(scores(server, "base"), base)
    assert same(scores(server, "one"), one)
    long = "Tell me of a wise owl. " * 20
    cached = [
        complete(server, name, long)["usage"]["prompt_tokens_details"]["cached_tokens"]
        for name in ("one", "base", "one", "base")
    ]
    assert cached[:2] == [0, 0]
    assert min(cached[2:]) > 0


def test_activated_adapter_changes_nothing_until_it_is_invoked(server) -> None:
    listed = server.client.get("/lora-adapters", params={"model": "late"}).json()
    assert listed[1]["alora_invocation_tokens"] == INVOCATION
    assert same(scores(server, "late", QUESTION), scores(server, "base", QUESTION))


def test_adapter_is_loaded_and_forgotten_while_the_server_runs(server, folder) -> None:
    body = {"lora_name": "two", "lora_path": str(folder / "two")}
    assert server.client.post("/v1/load_lora_adapter", json=body).status_code == 200
    assert not same(scores(server, "two"), scores(server, "base"))
    assert not same(scores(server, "two"), scores(server, "one"))
    assert server.client.post("/v1/unload_lora_adapter", json=body).status_code == 200
    answer = server.client.post("/v1/completions", json={"model": "two", "prompt": "a"})
    assert answer.status_code == 404


def test_what_is_no_adapter_of_the_model_is_refused(server, builtin_path, folder) -> None:
    for path, status in (
        (builtin_path, 400),
        (folder, 404),  # without the files
        (folder / "nowhere", 404),
    ):
        body = {"lora_name": "x", "lora_path": str(path)}
        answer = server.client.post("/v1/load_lora_adapter", json=body)
        assert answer.status_code == status, path
        assert answer.json()["error"]["param"] == "lora_path"
    assert complete(server, "base")

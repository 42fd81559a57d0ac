"""Conversations with models whose state cannot be cut: later turns reuse earlier ones."""

from __future__ import annotations

import pytest
from template_texts import FOLDER
from tiny_models import write_tiny_model

NUM_TURNS = 5
SYSTEM = "You are a helpful assistant of few words, and so on. " * 3  # short prefixes are not saved


@pytest.fixture(scope="module", params=["lfm2", "mamba"])
def server(request, start_server_once, tmp_path_factory):
    """A model with the template of Qwen 3, which omits the reasoning of earlier answers."""
    path = tmp_path_factory.mktemp("models") / f"{request.param}.gguf"
    write_tiny_model(request.param, path, {"default": (FOLDER / "qwen3.jinja").read_text()})
    return start_server_once("--model", str(path), "--model.max_context_length", "1024")


def ask(server, messages, salt="shared", **more):
    body = {"messages": messages, "max_tokens": 6, "temperature": 0, "cache_salt": salt, **more}
    body["ignore_eos"] = True
    answer = server.client.post("/v1/chat/completions", json=body).json()
    assert "usage" in answer, answer
    usage = answer["usage"]
    message = answer["choices"][0]["message"]
    text = (message.get("reasoning_content") or "", message["content"] or "")
    return text, usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"]


def test_later_turns_compute_only_what_is_new(server):
    """Though the answers have reasoning, which the next prompt omits."""
    messages = [{"role": "system", "content": SYSTEM}]
    before = computed = new = 0
    for turn in range(NUM_TURNS):
        messages.append({"role": "user", "content": f"question {turn}"})
        text, num_tokens, num_cached = ask(server, messages, "turns")
        if turn:
            computed += num_tokens - num_cached
            new += num_tokens - before
        assert ask(server, messages, f"alone {turn}")[0] == text
        before = num_tokens
        answer = {"role": "assistant", "content": f"answer {turn}", "reasoning_content": "thought"}
        messages.append(answer)
    metrics = server.client.get("/metrics").text
    saved = float(metrics.partition("\ncllm:checkpoint_bytes{")[2].partition("} ")[2].split()[0])
    assert (saved > 0) == ("lfm2" in metrics)  # mamba has no other state
    assert computed <= 1.1 * new + 8 * NUM_TURNS  # the beginning of each answer


def test_conversations_share_their_instructions(server):
    system = {"role": "system", "content": SYSTEM + " Shared."}
    _, _, num_cached = ask(server, [system, {"role": "user", "content": "one"}])
    assert num_cached == 0
    _, num_tokens, num_cached = ask(server, [system, {"role": "user", "content": "two"}])
    assert num_tokens - num_cached < 30


def test_edited_question(server):
    """All before the edited question is reused."""
    messages = [
        {"role": "system", "content": SYSTEM + " Edited."},
        {"role": "user", "content": "the first question, which is rather long"},
    ]
    ask(server, messages)
    messages.append({"role": "assistant", "content": "yes"})
    messages.append({"role": "user", "content": "the second question"})
    ask(server, messages)
    messages[-1] = {"role": "user", "content": "another question"}
    _, num_tokens, num_cached = ask(server, messages)
    assert num_tokens - num_cached < 70


def test_shared_instructions_outlive_a_restart(start_server, tmp_path):
    """A new conversation computes only its own tokens, and its text is right."""
    path = tmp_path / "model.gguf"
    write_tiny_model("lfm2", path, {"default": (FOLDER / "qwen3.jinja").read_text()})
    options = ["--model", str(path), "--model.max_context_length", "2048"]
    options += ["--kv.disk-cache", str(tmp_path / "cache")]
    system = {"role": "system", "content": SYSTEM * 9}
    for start in (0, 5):
        server = start_server(*options)
        for number in range(start, start + 5):
            messages = [system, {"role": "user", "content": f"question {number}"}]
            text, num_tokens, num_cached = ask(server, messages)
            assert num_tokens > 1000
            assert number == 0 or num_tokens - num_cached < 30
        assert ask(server, messages, "alone")[0] == text
        assert server.stop() == 0

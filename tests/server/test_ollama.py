"""The real ``ollama`` client against a server with the built-in model."""

import asyncio
import json

import numpy as np
import ollama
import pytest

from cllm.models.builtin.questions import TOOLS as TRAINED

pytestmark = [pytest.mark.llama, pytest.mark.dialect]

MODEL = "cllm-builtin"
SUM = [{"role": "user", "content": "What is 27 plus 45?"}]
COUNT = [{"role": "user", "content": "Count from 3 to 30."}]
NUMBERS = " ".join(map(str, range(3, 31)))
GREEDY = {"temperature": 0}


@pytest.fixture(scope="module")
def client(builtin_server):
    with ollama.Client(builtin_server.url) as client:
        yield client


@pytest.mark.parametrize("model", [MODEL, f"{MODEL}:latest"])
def test_chat_has_text_reason_counts_and_durations(client, model):
    answer = client.chat(model, SUM, options=GREEDY)
    assert (answer.message.role, answer.message.content) == ("assistant", "72")
    assert (answer.model, answer.done, answer.done_reason) == (model, True, "stop")
    assert answer.eval_count == 3
    assert answer.prompt_eval_count == 18
    parts = answer.load_duration + answer.prompt_eval_duration + answer.eval_duration
    assert min(answer.load_duration, answer.prompt_eval_duration, answer.eval_duration) > 0
    assert 0.9 * answer.total_duration < parts <= answer.total_duration
    assert answer.created_at.endswith("Z")


def test_stream_has_the_same_text_as_the_whole_answer(client):
    """Only the last line is done, and it has the counts and durations."""
    *lines, last = client.chat(MODEL, COUNT, stream=True, options=GREEDY)
    assert "".join(line.message.content for line in lines) == NUMBERS
    assert len(lines) > 10
    assert not any(line.done for line in lines)
    assert (last.done, last.done_reason, last.message.content) == (True, "stop", "")
    assert last.eval_count == client.chat(MODEL, COUNT, options=GREEDY).eval_count
    assert last.total_duration > 0


def test_requests_stream_by_default(builtin_server):
    """The stream is NDJSON."""
    body = {"model": MODEL, "messages": SUM}
    answer = builtin_server.client.post("/api/chat", json=body)
    assert answer.headers["content-type"] == "application/x-ndjson"
    whole = builtin_server.client.post("/api/chat", json={**body, "stream": False})
    assert whole.headers["content-type"] == "application/json"


def test_generate_equals_a_chat_with_one_message(client):
    """Cases are with and without a system prompt, streamed and whole."""
    assert client.generate(MODEL, SUM[0]["content"], options=GREEDY).response == "72"
    assert (
        client.generate(MODEL, SUM[0]["content"], system="Answer shortly.", options=GREEDY).response
        == "72"
    )
    *lines, last = client.generate(MODEL, COUNT[0]["content"], stream=True, options=GREEDY)
    assert "".join(line.response for line in lines) == NUMBERS
    assert (last.done_reason, last.response) == ("stop", "")


def test_raw_prompt_is_used_unchanged(client):
    """Its control tokens are parsed."""
    prompt = "<|im_start|>user\nWhat is 27 plus 45?<|im_end|>\n<|im_start|>assistant\n"
    answer = client.generate(MODEL, prompt, raw=True, options=GREEDY)
    assert answer.response == "72"
    assert answer.prompt_eval_count == client.chat(MODEL, SUM, options=GREEDY).prompt_eval_count


def test_request_without_a_prompt_answers_load(client):
    for answer in (
        client.generate(MODEL),
        client.generate(MODEL, keep_alive="10m"),
        client.chat(MODEL),
    ):
        assert (answer.done, answer.done_reason) == (True, "load")


@pytest.mark.parametrize("keep_alive", [0, 0.0, "0", "0s", "0m0s"])
def test_keep_alive_zero_without_a_prompt_answers_unload(client, keep_alive):
    for answer in (
        client.generate(MODEL, keep_alive=keep_alive),
        client.chat(MODEL, keep_alive=keep_alive),
    ):
        assert (answer.done, answer.done_reason) == (True, "unload")
    assert client.chat(MODEL, SUM, options=GREEDY, keep_alive=keep_alive).message.content == "72"


def test_options_limit_stop_and_seed_like_ollamas(client):
    short = client.chat(MODEL, COUNT, options={**GREEDY, "num_predict": 5})
    assert (short.done_reason, short.eval_count) == ("length", 5)
    for limit in (-1, -2):
        assert (
            client.chat(MODEL, COUNT, options={**GREEDY, "num_predict": limit}).message.content
            == NUMBERS
        )
    assert (
        client.chat(MODEL, COUNT, options={**GREEDY, "stop": [" 7"]}).message.content == "3 4 5 6"
    )
    warm = {"temperature": 5.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "num_predict": 20}
    texts = [
        client.chat(MODEL, COUNT, options={**warm, "seed": seed}).message.content
        for seed in (1, 1, 2)
    ]
    assert texts[0] == texts[1] != texts[2]
    for more in ({"mirostat": 2, "mirostat_tau": 3.0}, {"typical_p": 0.5}):
        assert (
            client.chat(MODEL, COUNT, options={**warm, **more, "seed": 1}).message.content
            != texts[0]
        )
    assert NUMBERS.startswith(
        client.chat(MODEL, COUNT, options={**warm, "top_k": 1}).message.content
    )


def test_integers_with_a_decimal_point_are_accepted(client):
    """JavaScript and Lua clients write them so."""
    asked = {**GREEDY, "num_predict": 5.0, "top_k": 40.0, "seed": 7.0, "repeat_last_n": 64.0}
    answer = client.chat(MODEL, COUNT, options=asked)
    assert (answer.done_reason, answer.eval_count) == ("length", 5)


@pytest.mark.parametrize("streamed", [False, True])
def test_logprobs_are_returned_for_each_token(client, streamed):
    """They include the most probable alternatives."""
    asked = {"options": GREEDY, "logprobs": True, "top_logprobs": 3}
    chat = client.chat(MODEL, SUM, stream=streamed, **asked)
    generate = client.generate(MODEL, SUM[0]["content"], stream=streamed, **asked)
    for answer in (chat, generate):
        told = [one for line in (answer if streamed else [answer]) for one in line.logprobs or []]
        assert "".join(one.token for one in told) == "72"
        assert all(-1 < one.logprob <= 0 for one in told)
        assert all(one.top_logprobs[0].token == one.token for one in told)
        assert {len(one.top_logprobs) for one in told} == {3}


def test_repeat_penalty_acts_unless_its_window_is_zero(client):
    """The prompt makes the model repeat itself."""
    asked = [{"role": "user", "content": "Repeat: river river river river"}]
    plain = client.chat(MODEL, asked, options=GREEDY).message.content
    penalized = client.chat(MODEL, asked, options={**GREEDY, "repeat_penalty": 5.0}).message.content
    windowless = client.chat(
        MODEL, asked, options={**GREEDY, "repeat_penalty": 5.0, "repeat_last_n": 0}
    )
    assert penalized != plain == windowless.message.content


def test_concurrent_async_requests_get_their_own_answers(builtin_server):
    """Half of the requests are streamed."""

    async def one(client, a, streamed):
        messages = [{"role": "user", "content": f"What is {a} plus 31?"}]
        if not streamed:
            return (await client.chat(MODEL, messages, options=GREEDY)).message.content
        lines = await client.chat(MODEL, messages, options=GREEDY, stream=True)
        return "".join([line.message.content async for line in lines])

    async def all_of_them():
        async with ollama.AsyncClient(builtin_server.url) as client:
            return await asyncio.gather(*(one(client, 20 + i, i % 2) for i in range(30)))

    assert asyncio.run(all_of_them()) == [str(51 + i) for i in range(30)]


@pytest.mark.parametrize("builtin_server", ["llama_cpp"], indirect=True)
def test_the_model_is_listed_and_shown(client, builtin_path):
    """The details come from the GGUF header."""
    (listed,) = client.list().models
    assert listed.model == f"{MODEL}:latest"
    assert listed.size == builtin_path.stat().st_size
    assert len(listed.digest) == 64
    assert (listed.details.format, listed.details.family) == ("gguf", "qwen3")
    assert (listed.details.parameter_size, listed.details.quantization_level) == ("3.0M", "Q8_0")
    (running,) = client.ps().models
    assert (running.model, running.digest, running.context_length) == (
        listed.model,
        listed.digest,
        1024,
    )
    assert running.size > listed.size
    shown = client.show(listed.model)
    assert shown.details == listed.details
    assert shown.modelinfo["general.architecture"] == "qwen3"
    assert shown.modelinfo["qwen3.context_length"] == 1024, "the served length, not the trained one"
    assert shown.modelinfo["general.basename"] == MODEL
    assert shown.modelinfo["tokenizer.ggml.tokens"] is None
    assert shown.modelinfo["general.parameter_count"] > 1_000_000
    assert "<|im_start|>" in shown.template
    assert {"completion", "tools"} <= set(shown.capabilities)
    assert "temperature" in shown.parameters
    assert f"\nFROM {MODEL}\n" in shown.modelfile
    assert f'\nTEMPLATE """{shown.template}"""\n' in shown.modelfile
    assert "\nPARAMETER num_ctx 1024\n" in shown.modelfile
    assert str(builtin_path.parent) not in shown.modelfile


def test_model_card_of_the_fake_backend_is_served(fake_server):
    with ollama.Client(fake_server.url) as client:
        assert client.list().models[0].details.family == "fake"
        assert client.ps().models[0].context_length == 512
        assert client.show("fake").capabilities == ["completion", "tools", "embedding"]


def test_embeddings_in_every_form_are_equal_and_normalized(fake_server):
    """One text, several texts, and the earlier route. Texts that are too long are truncated on
    request.
    """
    with ollama.Client(fake_server.url) as client:
        answer = client.embed("fake", ["a river", "a stone"])
        assert len(answer.embeddings) == 2
        assert answer.embeddings[0] != answer.embeddings[1]
        assert sum(x * x for x in answer.embeddings[0]) == pytest.approx(1, abs=1e-4)
        assert answer.prompt_eval_count == len("a river") + len("a stone")
        assert client.embed("fake", "a river").embeddings == answer.embeddings[:1]
        first = np.array(answer.embeddings[0][:8])
        assert np.allclose(
            client.embed("fake", "a river", dimensions=8).embeddings, first / np.linalg.norm(first)
        )
        assert client.embeddings("fake", "a river").embedding == answer.embeddings[0]
        assert client.embed("fake", "a" * 5000).prompt_eval_count <= 512
        with pytest.raises(ollama.ResponseError, match="5000"):
            client.embed("fake", "a" * 5000, truncate=False)


def test_embed_without_text_returns_no_vectors(fake_server):
    """Ollama's clients load the model this way."""
    with ollama.Client(fake_server.url) as client:
        for given in ("", []):
            assert client.embed("fake", given).embeddings == []
        assert client.embeddings("fake", "").embedding == []
    assert fake_server.client.post("/api/embed", json={"model": "fake"}).json()["embeddings"] == []


@pytest.mark.parametrize("name", ["fake", "fake:latest"])
def test_pull_of_the_served_model_succeeds(fake_server, name):
    """Clients pull before they chat; nothing is downloaded."""
    with ollama.Client(fake_server.url) as client:
        assert client.pull(name).status == "success"
        assert [line.status for line in client.pull(name, stream=True)] == [
            "pulling manifest",
            "success",
        ]
        with pytest.raises(ollama.ResponseError) as refused:
            client.pull("other")
    assert refused.value.status_code == 403


@pytest.mark.parametrize(
    ("method", "path"),
    [("HEAD", "/"), ("GET", "/"), ("HEAD", "/api/tags"), ("HEAD", "/api/version")],
)
def test_root_says_that_ollama_is_running(builtin_server, method, path):
    """Clients request it before anything else."""
    answer = builtin_server.client.request(method, path)
    assert answer.status_code == 200
    if method == "HEAD":
        assert answer.content == b""


def test_version_is_an_ollama_version(builtin_server):
    """Some clients require a minimum version."""
    assert builtin_server.client.get("/api/version").json()["version"].split(".") >= ["0", "12"]


@pytest.mark.parametrize("streamed", [False, True])
def test_tool_call_and_result_round_trip(client, streamed):
    """The client's own objects are sent back. A streamed call comes in one piece."""
    tools = [TRAINED[name].declare(name) for name in ("get_weather", "multiply")]

    def ask(messages):
        if not streamed:
            return client.chat(MODEL, messages, tools=tools, options=GREEDY).message
        lines = [
            line.message
            for line in client.chat(MODEL, messages, tools=tools, options=GREEDY, stream=True)
        ]
        calls = [call for line in lines for call in line.tool_calls or []]
        return ollama.Message(
            role="assistant", content="".join(line.content for line in lines), tool_calls=calls
        )

    messages = [{"role": "user", "content": "Multiply 12 by 31."}]
    message = ask(messages)
    (call,) = message.tool_calls
    assert (call.function.name, call.function.arguments) == ("multiply", {"a": 12, "b": 31})
    result = {"role": "tool", "tool_name": "multiply", "content": json.dumps({"product": 372})}
    assert ask([*messages, message, result]).content == "The product is 372."


def test_thinking_is_separated_from_the_text(client):
    """``think`` is true or a level. If it is missing, there is no thinking."""
    for think in (True, "low"):
        answer = client.chat(MODEL, SUM, think=think, options=GREEDY).message
        assert answer.content == "72"
        assert "20 + 40 = 60" in answer.thinking
    assert client.chat(MODEL, SUM, think=False, options=GREEDY).message.thinking is None
    lines = list(client.generate(MODEL, SUM[0]["content"], think=True, options=GREEDY, stream=True))
    assert "".join(line.response for line in lines) == "72"
    assert "20 + 40 = 60" in "".join(line.thinking or "" for line in lines)


def test_format_is_enforced_or_rejected(client):
    """Any JSON object, or a schema. A schema that cannot be enforced is rejected."""
    schema = {
        "type": "object",
        "properties": {"sum": {"const": 72}},
        "required": ["sum"],
        "additionalProperties": False,
    }
    assert json.loads(client.chat(MODEL, SUM, format=schema, options=GREEDY).message.content) == {
        "sum": 72
    }
    lines = client.generate(MODEL, SUM[0]["content"], format=schema, options=GREEDY, stream=True)
    assert json.loads("".join(line.response for line in lines)) == {"sum": 72}
    begun = client.generate(
        MODEL, SUM[0]["content"], format="json", options={**GREEDY, "num_predict": 20}
    ).response
    assert begun.lstrip().startswith("{")
    with pytest.raises(ollama.ResponseError, match="format"):
        client.chat(MODEL, SUM, format={"type": 5})

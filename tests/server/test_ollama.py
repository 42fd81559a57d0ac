"""The real ``ollama`` client against a real server with the built-in model."""

import asyncio
import json

import numpy as np
import ollama
import pytest

from cllm.models.builtin.questions import TOOLS as TRAINED

pytestmark = pytest.mark.llama

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
def test_a_chat_is_answered(client, model):
    """The answer, how it ended, what it cost and how long it took."""
    answer = client.chat(model, SUM, options=GREEDY)
    assert (answer.message.role, answer.message.content) == ("assistant", "72")
    assert (answer.model, answer.done, answer.done_reason) == (model, True, "stop")
    assert answer.eval_count == 3
    assert answer.prompt_eval_count == 18
    parts = answer.load_duration + answer.prompt_eval_duration + answer.eval_duration
    assert min(answer.load_duration, answer.prompt_eval_duration, answer.eval_duration) > 0
    assert 0.9 * answer.total_duration < parts <= answer.total_duration
    assert answer.created_at.endswith("Z")


def test_a_stream_has_the_same_text(client):
    """Line by line; only the last one is done, and has the figures."""
    *lines, last = client.chat(MODEL, COUNT, stream=True, options=GREEDY)
    assert "".join(line.message.content for line in lines) == NUMBERS
    assert len(lines) > 10
    assert not any(line.done for line in lines)
    assert (last.done, last.done_reason, last.message.content) == (True, "stop", "")
    assert last.eval_count == client.chat(MODEL, COUNT, options=GREEDY).eval_count
    assert last.total_duration > 0


def test_a_stream_is_what_one_gets_by_default(builtin_server):
    """NDJSON, and a request without a stream is told so."""
    body = {"model": MODEL, "messages": SUM}
    answer = builtin_server.client.post("/api/chat", json=body)
    assert answer.headers["content-type"] == "application/x-ndjson"
    whole = builtin_server.client.post("/api/chat", json={**body, "stream": False})
    assert whole.headers["content-type"] == "application/json"


def test_generate_is_the_first_message_of_a_chat(client):
    """With a system prompt or without; streamed and whole."""
    assert client.generate(MODEL, SUM[0]["content"], options=GREEDY).response == "72"
    assert (
        client.generate(MODEL, SUM[0]["content"], system="Answer shortly.", options=GREEDY).response
        == "72"
    )
    *lines, last = client.generate(MODEL, COUNT[0]["content"], stream=True, options=GREEDY)
    assert "".join(line.response for line in lines) == NUMBERS
    assert (last.done_reason, last.response) == ("stop", "")


def test_raw_is_the_prompt_as_it_is(client):
    """With the control tokens that it spells out."""
    prompt = "<|im_start|>user\nWhat is 27 plus 45?<|im_end|>\n<|im_start|>assistant\n"
    answer = client.generate(MODEL, prompt, raw=True, options=GREEDY)
    assert answer.response == "72"
    assert answer.prompt_eval_count == client.chat(MODEL, SUM, options=GREEDY).prompt_eval_count


def test_without_a_prompt_the_model_is_loaded(client):
    for answer in (
        client.generate(MODEL),
        client.generate(MODEL, keep_alive="10m"),
        client.chat(MODEL),
    ):
        assert (answer.done, answer.done_reason) == (True, "load")


@pytest.mark.parametrize("keep_alive", [0, 0.0, "0", "0s", "0m0s"])
def test_unload_without_a_prompt_says_unload(client, keep_alive):
    for answer in (
        client.generate(MODEL, keep_alive=keep_alive),
        client.chat(MODEL, keep_alive=keep_alive),
    ):
        assert (answer.done, answer.done_reason) == (True, "unload")
    assert client.chat(MODEL, SUM, options=GREEDY, keep_alive=keep_alive).message.content == "72"


def test_options(client):
    """Limits, stops and seeds do what they do in Ollama."""
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


def test_whole_numbers_may_have_a_decimal_point(client):
    """Clients in JavaScript and Lua write them so."""
    asked = {**GREEDY, "num_predict": 5.0, "top_k": 40.0, "seed": 7.0, "repeat_last_n": 64.0}
    answer = client.chat(MODEL, COUNT, options=asked)
    assert (answer.done_reason, answer.eval_count) == ("length", 5)


@pytest.mark.parametrize("streamed", [False, True])
def test_logprobs(client, streamed):
    """Of each token of the answer, with the most probable ones beside it."""
    asked = {"options": GREEDY, "logprobs": True, "top_logprobs": 3}
    chat = client.chat(MODEL, SUM, stream=streamed, **asked)
    generate = client.generate(MODEL, SUM[0]["content"], stream=streamed, **asked)
    for answer in (chat, generate):
        told = [one for line in (answer if streamed else [answer]) for one in line.logprobs or []]
        assert "".join(one.token for one in told) == "72"
        assert all(-1 < one.logprob <= 0 for one in told)
        assert all(one.top_logprobs[0].token == one.token for one in told)
        assert {len(one.top_logprobs) for one in told} == {3}


def test_repeat_penalty_and_its_window(client):
    """It changes a text that repeats itself, unless its window is empty."""
    asked = [{"role": "user", "content": "Repeat: river river river river"}]
    plain = client.chat(MODEL, asked, options=GREEDY).message.content
    penalized = client.chat(MODEL, asked, options={**GREEDY, "repeat_penalty": 5.0}).message.content
    windowless = client.chat(
        MODEL, asked, options={**GREEDY, "repeat_penalty": 5.0, "repeat_last_n": 0}
    )
    assert penalized != plain == windowless.message.content


def test_the_async_client_and_many_at_once(builtin_server):
    """Streamed and whole, all with their own answer."""

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


def test_the_model_is_listed_and_shown(client, builtin_path):
    """By the header of its file."""
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
    assert shown.modelinfo["qwen3.context_length"] >= 1024
    assert shown.modelinfo["tokenizer.ggml.tokens"] is None
    assert shown.modelinfo["general.parameter_count"] > 1_000_000
    assert "<|im_start|>" in shown.template
    assert {"completion", "tools"} <= set(shown.capabilities)
    assert "temperature" in shown.parameters
    assert f"\nFROM {MODEL}\n" in shown.modelfile
    assert f'\nTEMPLATE """{shown.template}"""\n' in shown.modelfile
    assert "\nPARAMETER num_ctx 1024\n" in shown.modelfile
    assert str(builtin_path.parent) not in shown.modelfile


def test_a_server_of_the_fake_backend_has_a_card_too(fake_server):
    with ollama.Client(fake_server.url) as client:
        assert client.list().models[0].details.family == "fake"
        assert client.ps().models[0].context_length == 512
        assert client.show("fake").capabilities == ["completion", "tools", "embedding"]


def test_embeddings(fake_server):
    """One text, several, and the earlier form; the same vectors, of length 1.

    What is too long is cut if one wants.
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


def test_no_text_has_no_embeddings(fake_server):
    """Ollama's clients load the model with it."""
    with ollama.Client(fake_server.url) as client:
        for given in ("", []):
            assert client.embed("fake", given).embeddings == []
        assert client.embeddings("fake", "").embedding == []
    assert fake_server.client.post("/api/embed", json={"model": "fake"}).json()["embeddings"] == []


@pytest.mark.parametrize("name", ["fake", "fake:latest"])
def test_pull_of_the_served_model_succeeds(fake_server, name):
    """Clients pull before they chat; this server downloads nothing for them."""
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
def test_the_server_is_alive(builtin_server, method, path):
    """What clients ask before anything else."""
    answer = builtin_server.client.request(method, path)
    assert answer.status_code == 200
    if method == "HEAD":
        assert answer.content == b""


def test_version(builtin_server):
    """A version of Ollama's API, for clients that want one that is new enough."""
    assert builtin_server.client.get("/api/version").json()["version"].split(".") >= ["0", "12"]


@pytest.mark.parametrize("streamed", [False, True])
def test_a_tool_is_called_and_its_result_used(client, streamed):
    """The whole way round, with the client's own objects sent back; a call comes in one piece."""
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


def test_thinking_is_told_apart(client):
    """With true and with a level; without, there is none."""
    for think in (True, "low"):
        answer = client.chat(MODEL, SUM, think=think, options=GREEDY).message
        assert answer.content == "72"
        assert "20 + 40 = 60" in answer.thinking
    assert client.chat(MODEL, SUM, think=False, options=GREEDY).message.thinking is None
    lines = list(client.generate(MODEL, SUM[0]["content"], think=True, options=GREEDY, stream=True))
    assert "".join(line.response for line in lines) == "72"
    assert "20 + 40 = 60" in "".join(line.thinking or "" for line in lines)


def test_an_answer_in_a_form(client):
    """Any JSON object, or what a schema says; one that cannot be enforced is refused."""
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

"""The real ``openai`` client against a server with the built-in model."""

from typing import Any

import openai
import pytest

pytestmark = pytest.mark.llama

SUM = [{"role": "user", "content": "What is 27 plus 45?"}]
COUNT = [{"role": "user", "content": "Count from 3 to 30."}]
NUMBERS = " ".join(map(str, range(3, 31)))


def test_chat_has_text_finish_reason_and_usage(client, model):
    answer = client.chat.completions.create(model=model, messages=SUM, temperature=0)
    assert answer.choices[0].message.content == "72"
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage.completion_tokens == 3  # two digits and the end
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 3


def test_stream_has_the_same_text_in_chunks(client, model):
    """The first chunk has the role, the last one the finish reason; usage is sent on request only."""
    stream = client.chat.completions.create(model=model, messages=COUNT, temperature=0, stream=True)
    chunks = list(stream)
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == NUMBERS
    assert len(chunks) > 10
    assert chunks[-1].choices[0].finish_reason == "stop"
    assert all(chunk.usage is None for chunk in chunks)


def test_include_usage_adds_a_last_chunk(client, model):
    """It has the usage and no choices."""
    options = {"include_usage": True}
    chunks = list(
        client.chat.completions.create(
            model=model, messages=SUM, stream=True, stream_options=options
        )
    )
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens >= 1


def test_repeated_prompt_is_reported_as_cached(client, model):
    messages = [
        {"role": "user", "content": "Repeat: apple bird bread bridge brown cake chair child"}
    ]
    client.chat.completions.create(model=model, messages=messages, temperature=0)
    usage = client.chat.completions.create(model=model, messages=messages, temperature=0).usage
    assert usage.prompt_tokens_details.cached_tokens == usage.prompt_tokens - 1


def test_several_choices_are_complete(client, model):
    """Streamed or not."""
    answer = client.chat.completions.create(model=model, messages=COUNT, temperature=0, n=3)
    assert [choice.message.content for choice in answer.choices] == [NUMBERS] * 3
    texts = ["", "", ""]
    for chunk in client.chat.completions.create(
        model=model, messages=COUNT, temperature=0, n=3, stream=True
    ):
        texts[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    assert texts == [NUMBERS] * 3


def test_stop_string_ends_the_text_before_it(client, model):
    """The string may span tokens, streamed or not. The sequence is freed."""
    stop = ["6 1", " 17 18"]  # inside of "16 17" never, so " 17 18" is the one
    answer = client.chat.completions.create(
        model=model, messages=COUNT, temperature=0, stop=[stop[1]]
    )
    assert answer.choices[0].message.content == NUMBERS.partition(" 17 18")[0]
    assert answer.choices[0].finish_reason == "stop"
    stream = client.chat.completions.create(
        model=model, messages=COUNT, temperature=0, stop=stop, stream=True
    )
    expected = NUMBERS[: min(NUMBERS.find(text) for text in stop)]
    assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == expected


def test_max_tokens_ends_with_length(client, model):
    """The parameter has two names; max_completion_tokens takes precedence."""
    answer = client.chat.completions.create(
        model=model, messages=COUNT, max_completion_tokens=5, max_tokens=50
    )
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage.completion_tokens == 5


def test_equal_seeds_give_equal_texts(client, model):
    """The temperature is high; different seeds give different texts."""

    def babble(seed):
        answer = client.chat.completions.create(
            model=model,
            messages=COUNT,
            temperature=4.0,
            top_p=1.0,
            seed=seed,
            max_tokens=30,
            extra_body={"top_k": 0, "min_p": 0.0},
        )
        return answer.choices[0].message.content

    assert babble(1) == babble(1)
    assert len({babble(seed) for seed in range(4)}) == 4


def test_logit_bias_forbids_a_token(client, model, builtin_server):
    """With -100 on its first digit, the right answer cannot begin."""
    (token,) = builtin_server.client.post("/encode", json={"text": "7"}).json()["tokens"]
    answer = client.chat.completions.create(
        model=model, messages=SUM, temperature=0, logit_bias={str(token): -100}
    )
    assert not answer.choices[0].message.content.startswith("7")


def test_completions_accept_texts_and_token_ids(client, model, builtin_server):
    """Several prompts are answered in order."""
    texts = ["Once there was a clever fox", "Once there was a small mouse"]
    ids = [
        builtin_server.client.post("/encode", json={"text": text}).json()["tokens"]
        for text in texts
    ]
    by_text = client.completions.create(model=model, prompt=texts, temperature=0, max_tokens=8, n=2)
    by_ids = client.completions.create(model=model, prompt=ids, temperature=0, max_tokens=8, n=2)
    assert [choice.index for choice in by_text.choices] == [0, 1, 2, 3]
    assert [choice.text for choice in by_text.choices] == [choice.text for choice in by_ids.choices]
    assert by_text.choices[0].text == by_text.choices[1].text != by_text.choices[2].text
    assert by_text.usage.prompt_tokens == sum(map(len, ids))
    chunks = client.completions.create(
        model=model, prompt=texts[0], temperature=0, max_tokens=8, stream=True
    )
    assert "".join(chunk.choices[0].text for chunk in chunks) == by_text.choices[0].text


def test_errors_raise_the_clients_own_exceptions(client, model):
    """The exceptions have the field and the code."""
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(model=model, messages=SUM, temperature=-1)
    assert refused.value.param == "temperature"
    with pytest.raises(openai.NotFoundError) as missing:
        client.chat.completions.create(model="gpt-4o", messages=SUM)
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as long:
        client.chat.completions.create(
            model=model, messages=[{"role": "user", "content": "word " * 5000}], stream=True
        )
    assert long.value.code == "context_length_exceeded"


def test_roles_parts_and_history_reach_the_template(client, model):
    messages = [
        {"role": "developer", "content": "Answer shortly."},
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "What is the capital "},
                {"type": "text", "text": "of France?"},
            ],
        },
        {"role": "assistant", "content": "Paris"},
        {"role": "user", "content": "What is the capital of Norway?"},
    ]
    answer = client.chat.completions.create(model=model, messages=messages, temperature=0)
    assert answer.choices[0].message.content == "Oslo"


def written(message):
    """A message as the model has written it."""
    if not message.tool_calls:
        return message.content
    (call,) = message.tool_calls
    name, arguments = call.function.name, call.function.arguments
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


def test_tools_reach_the_template(client, model, known_questions):
    """The model calls a declared tool, and uses its result."""
    questions = known_questions(12, 0, ["tools"])
    assert {len(question.messages) for question in questions} == {1, 3}
    for q in questions:
        answer = client.chat.completions.create(
            model=model, messages=q.messages, tools=q.tools, temperature=0
        )
        assert written(answer.choices[0].message) == q.answer


def test_held_out_questions_of_each_kind_are_answered(client, model, known_questions):
    """Two of each kind, among them one with a character of several tokens."""
    for question in known_questions(26, 3):
        answer = client.chat.completions.create(
            model=model,
            messages=question.messages,
            tools=question.tools or openai.NOT_GIVEN,
            temperature=0,
        )
        assert written(answer.choices[0].message) == question.answer, question


def chat_tokens(logprobs):
    return b"".join(bytes(one.bytes) for one in logprobs.content).decode()


def test_logprobs_of_a_chat_spell_the_answer(client, model):
    """Streamed or not, without the end token."""
    answer = client.chat.completions.create(
        model=model, messages=SUM, temperature=0, logprobs=True, top_logprobs=4
    )
    logprobs = answer.choices[0].logprobs
    assert chat_tokens(logprobs) == answer.choices[0].message.content == "72"
    for one in logprobs.content:
        assert len(one.top_logprobs) == 4
        assert one.top_logprobs[0].token == one.token
        assert one.top_logprobs[0].logprob == one.logprob > one.top_logprobs[1].logprob
    plain = (
        client.chat.completions.create(model=model, messages=SUM, temperature=0, logprobs=True)
        .choices[0]
        .logprobs
    )
    assert [one.top_logprobs for one in plain.content] == [[], []]
    stream = client.chat.completions.create(
        model=model,
        messages=COUNT,
        temperature=0,
        logprobs=True,
        top_logprobs=1,
        stream=True,
        stop=[" 17 18"],
    )
    text, spelled = "", ""
    for chunk in stream:
        text += chunk.choices[0].delta.content or ""
        if chunk.choices[0].logprobs:
            spelled += chat_tokens(chunk.choices[0].logprobs)
    assert text == NUMBERS.partition(" 17 18")[0]
    assert spelled.startswith(text)
    assert len(spelled) - len(text) < 3  # of the last token's own text


def test_logprobs_are_returned_on_request_only(client, model):
    """top_logprobs requires logprobs."""
    assert client.chat.completions.create(model=model, messages=SUM).choices[0].logprobs is None
    for params in ({"top_logprobs": 2}, {"logprobs": True, "top_logprobs": 21}):
        with pytest.raises(openai.BadRequestError) as refused:
            client.chat.completions.create(model=model, messages=SUM, **params)
        assert refused.value.param == "top_logprobs"


def test_fingerprint_is_the_same_in_every_answer(client, model):
    answers = [
        client.chat.completions.create(model=model, messages=SUM, seed=1, temperature=9.0)
        for _ in range(2)
    ]
    assert answers[0].system_fingerprint == answers[1].system_fingerprint
    assert answers[0].choices[0].message.content == answers[1].choices[0].message.content


def test_every_documented_parameter_is_used_ignored_or_rejected(client, model):
    harmless = {
        "store": True,
        "metadata": {"a": "b"},
        "service_tier": "auto",
        "safety_identifier": "x",
    }
    harmless |= {"prompt_cache_key": "k", "verbosity": "low", "modalities": ["text"], "user": "u"}
    harmless |= {"prediction": {"type": "content", "content": "72"}}
    answer = client.chat.completions.create(model=model, messages=SUM, temperature=0, **harmless)
    assert answer.choices[0].message.content == "72"
    refused: dict[str, Any] = {
        "modalities": ["audio"],
        "audio": {"voice": "alloy", "format": "mp3"},
        "web_search_options": {"a": 1},
    }
    refused |= {"functions": [{"name": "f"}], "metadata": {str(i): "" for i in range(17)}}
    for name, value in refused.items():
        with pytest.raises(openai.BadRequestError) as error:
            client.chat.completions.create(model=model, messages=SUM, extra_body={name: value})
        assert error.value.param.startswith(name)

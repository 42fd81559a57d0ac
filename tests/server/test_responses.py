"""The Responses API with OpenAI's own client."""

import json
import re

import openai
import pydantic
import pytest
from openai.types.responses import ResponseStreamEvent
from openai.types.responses.response import Response

pytestmark = [pytest.mark.llama, pytest.mark.slow, pytest.mark.dialect]

SUM = "What is 27 plus 45?"
COUNT = "Count from 3 to 20."
NUMBERS = " ".join(map(str, range(3, 21)))
GREEDY = {"temperature": 0}


def strict(kind, value):
    """Return ``value`` as the client's own type after checking every field."""
    return pydantic.TypeAdapter(kind).validate_python(value)


def test_response_has_output_usage_and_settings(client, model):
    """The answer, what it cost, and what was asked for."""
    response = client.responses.create(model=model, input=SUM, metadata={"a": "b"}, **GREEDY)
    assert response.output_text == "72"
    assert (response.status, response.usage.output_tokens) == ("completed", 3)
    assert response.usage.total_tokens == response.usage.input_tokens + 3
    assert response.metadata == {"a": "b"}
    assert response.temperature == 0
    strict(Response, response.to_dict())


def test_events_come_in_the_published_order(client, model):
    """Events are numbered; together they make up the final response."""
    events = list(client.responses.create(model=model, input=COUNT, stream=True, **GREEDY))
    kinds = [event.type for event in events]
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert [kind for kind in kinds if kind != "response.output_text.delta"] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]
    assert kinds[4:-4] == ["response.output_text.delta"] * len(deltas)
    assert len(deltas) > 10
    assert "".join(deltas) == events[-4].text == events[-1].response.output_text == NUMBERS
    for event in events:
        strict(ResponseStreamEvent, event.to_dict())


def test_event_names_match_the_types_in_the_data(builtin_server):
    """No event follows the last one."""
    lines = builtin_server.client.post(
        "/v1/responses", json={"input": SUM, "stream": True}
    ).text.splitlines()
    names = [line.removeprefix("event: ") for line in lines if line.startswith("event: ")]
    kinds = [
        json.loads(line.removeprefix("data: "))["type"]
        for line in lines
        if line.startswith("data: ")
    ]
    assert names == kinds
    assert kinds[-1] == "response.completed"


def test_streaming_helper_of_the_client_returns_the_response(client, model):
    with client.responses.stream(model=model, input=COUNT, **GREEDY) as stream:
        text = "".join(
            event.delta for event in stream if event.type == "response.output_text.delta"
        )
        assert text == stream.get_final_response().output_text == NUMBERS


def test_conversation_continues_from_a_previous_response(client, model, known_questions):
    """The request has its id, or all items again: the prompt is the same."""
    question = next(q for q in known_questions(40, 1) if len(q.messages) == 1 and not q.tools)
    first = client.responses.create(model=model, input="What is the capital of France?", **GREEDY)
    then = client.responses.create(
        model=model, input=question.messages[0]["content"], previous_response_id=first.id, **GREEDY
    )
    again = client.responses.create(
        model=model,
        input=[
            {"role": "user", "content": "What is the capital of France?"},
            *[item.to_dict() for item in first.output],
            {"role": "user", "content": question.messages[0]["content"]},
        ],
        **GREEDY,
    )
    assert then.output_text == again.output_text
    assert then.usage.input_tokens == again.usage.input_tokens > first.usage.input_tokens
    assert then.previous_response_id == first.id


def test_instructions_apply_to_one_response(client, model):
    """They are part of the prompt, and the next response does not inherit them."""
    plain = client.responses.create(model=model, input=SUM, **GREEDY)
    told = client.responses.create(model=model, input=SUM, instructions="Answer shortly.", **GREEDY)
    by_item = client.responses.create(
        model=model,
        input=[
            {"role": "developer", "content": "Answer shortly."},
            {"role": "user", "content": SUM},
        ],
        **GREEDY,
    )
    assert told.usage.input_tokens == by_item.usage.input_tokens > plain.usage.input_tokens
    after_plain = client.responses.create(
        model=model, input=SUM, previous_response_id=plain.id, **GREEDY
    )
    after_told = client.responses.create(
        model=model, input=SUM, previous_response_id=told.id, **GREEDY
    )
    assert after_plain.usage.input_tokens == after_told.usage.input_tokens


def test_stored_response_is_retrieved_and_deleted(client, model):
    """Its input items are listed too."""
    first = client.responses.create(model=model, input=SUM, **GREEDY)
    second = client.responses.create(
        model=model,
        input=[{"role": "user", "content": COUNT}],
        previous_response_id=first.id,
        stream=True,
        **GREEDY,
    )
    last = list(second)[-1].response
    assert client.responses.retrieve(last.id).to_dict() == last.to_dict()
    page = client.responses.input_items.list(last.id, order="asc", limit=2)
    assert [item.content[0].text for item in page.data] == [SUM, "72"]
    assert [item.content[0].text for item in page] == [SUM, "72", COUNT]
    client.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError) as gone:
        client.responses.create(model=model, input=SUM, previous_response_id=first.id)
    assert gone.value.param == "previous_response_id"
    with pytest.raises(openai.NotFoundError, match="not found"):
        client.responses.retrieve(first.id)
    with pytest.raises(openai.BadRequestError, match="background"):
        client.responses.cancel(last.id)


def test_unstored_response_is_not_found(client, model):
    response = client.responses.create(model=model, input=SUM, store=False, **GREEDY)
    assert not response.store
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(response.id)


def test_response_is_found_by_its_account_only(client, model, builtin_server):
    response = client.responses.create(model=model, input=SUM, **GREEDY)
    with openai.OpenAI(
        base_url=f"{builtin_server.url}/v1", api_key="another", max_retries=0
    ) as other:
        with pytest.raises(openai.NotFoundError):
            other.responses.retrieve(response.id)
        with pytest.raises(openai.NotFoundError):
            other.responses.create(model=model, input=SUM, previous_response_id=response.id)


def test_token_limit_makes_the_response_incomplete(client, model):
    """Streamed or not; the response has the reason, and its item is incomplete too."""
    response = client.responses.create(model=model, input=COUNT, max_output_tokens=5, **GREEDY)
    assert (response.status, response.incomplete_details.reason) == (
        "incomplete",
        "max_output_tokens",
    )
    assert response.output[0].status == "incomplete"
    events = list(
        client.responses.create(
            model=model, input=COUNT, max_output_tokens=5, stream=True, **GREEDY
        )
    )
    assert events[-1].type == "response.incomplete"
    assert events[-1].response.output_text == response.output_text


def test_input_tokens_are_counted_without_generating(client, model):
    counted = client.responses.input_tokens.count(model=model, input=SUM)
    assert (
        counted.input_tokens == client.responses.create(model=model, input=SUM).usage.input_tokens
    )


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"background": True}, "background"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"prompt": {"id": "pmpt_1"}}, "prompt"),
        ({"input": ""}, "input"),
        ({"input": []}, "input"),
        ({"input": None}, "input"),
        ({"tool_choice": {"type": "web_search_preview"}}, "tool_choice"),
        (
            {
                "input": [
                    {"role": "user", "content": [{"type": "input_image", "image_url": "data:"}]}
                ]
            },
            "input[0].content[0]",
        ),
        ({"input": "word " * 5000}, "input"),
        ({"temperature": -1}, "temperature"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"previous_response_id": "resp_0"}, "previous_response_id"),
        ({"metadata": {str(i): "" for i in range(17)}}, "metadata"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_unsupported_parameters_are_rejected_by_name(builtin_server, body, param):
    """In OpenAI's form, before the first byte of a stream."""
    answer = builtin_server.client.post(
        "/v1/responses", json={"input": SUM, "stream": True, **body}
    )
    error = answer.json()["error"]
    assert answer.status_code in (400, 404)
    assert (error["param"], error["type"]) == (param, "invalid_request_error")
    assert re.search(rf"'?{re.escape(param)}|tokens|response", error["message"])


def test_least_recently_used_responses_are_forgotten(start_server):
    """Their number is limited, and the error says so. Continuing from a response counts as use."""
    server = start_server("--backend.name", "fake", "--storage.max-responses", "3")

    def ask(**more):
        body = {"input": "a", "max_output_tokens": 2, **more}
        return server.client.post("/v1/responses", json=body).json()["id"]

    first, second, _ = ask(), ask(), ask()
    fourth = ask(previous_response_id=first)
    found = [server.client.get(f"/v1/responses/{name}") for name in (first, second, fourth)]
    assert [answer.status_code for answer in found] == [200, 404, 200]
    assert "at most 3 responses" in found[1].json()["error"]["message"]

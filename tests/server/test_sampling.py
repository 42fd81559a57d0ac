"""Sampling parameters on the way from a request body to the engine, in every dialect."""

import asyncio
import threading
from types import SimpleNamespace
from typing import Any

import httpx2
import pydantic
import pytest
from conftest import PATIENCE

from cllm.config.settings import Sampling, Settings
from cllm.core.params import PARAMETERS, SamplingParams
from cllm.engine.params import EngineParams
from cllm.errors import BadRequest
from cllm.observe.metrics import Metrics
from cllm.process.pool import Pool
from cllm.server.anthropic.schema import MessagesBody
from cllm.server.app import create_app
from cllm.server.body import Body
from cllm.server.native.texts import GenerateBody
from cllm.server.ollama.schema import Integer, OllamaOptions
from cllm.server.openai.schema import ChatBody, CompletionBody
from cllm.server.sampling import add_sampling_fields, build_params, read_sampling_values
from cllm.serving.model_texts import ModelTexts
from cllm.serving.registry import Registry
from cllm.serving.served_model import ServedModel
from cllm.serving.service import Service
from cllm.text.dry_breakers import DryBreakers

BODIES: dict[str, type[Body]] = {
    "openai": ChatBody,
    "anthropic": MessagesBody,
    "ollama": OllamaOptions,
    "native": GenerateBody,
}
OFFERED = [
    (dialect, parameter) for parameter in PARAMETERS.values() for dialect in parameter.dialects
]
MESSAGES = [{"role": "user", "content": "hi"}]
SCHEMA = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}
TOOL = {"name": "f", "parameters": SCHEMA}


def served(defaults: Sampling | None = None, breakers: Any = None) -> Any:
    """Return what request bodies read of a service."""
    breakers = breakers or DryBreakers([])
    return SimpleNamespace(
        sampling=defaults or Sampling(),
        texts=SimpleNamespace(dry_breakers=breakers),
        tokenize=no_tokens,
    )


async def no_tokens(*texts: Any) -> list[list[int]]:
    assert not texts
    return []


@pytest.mark.parametrize(
    ("dialect", "parameter"), OFFERED, ids=[f"{dialect}-{p.name}" for dialect, p in OFFERED]
)
def test_declared_parameter_is_a_field_with_its_help_and_bounds(dialect, parameter):
    body = BODIES[dialect]
    name = parameter.name_in(dialect)
    assert body.model_fields[name].description.startswith(parameter.help.partition(";")[0])
    kinds = body.model_json_schema()["properties"][name]["anyOf"]
    assert kinds[-1] == {"type": "null"}
    for bound, keyword in zip(parameter.bounds or (), ("minimum", "maximum"), strict=False):
        if name != "top_k":  # where -1 is another word for 0
            assert kinds[0].get(keyword, bound) == bound


def test_fields_of_the_body_class_override_declared_parameters():
    @add_sampling_fields("native", integer=Integer, min_p="More of it.")
    class Asked(Body):
        """Asked for."""

        top_k: str = "forty"

    body = Asked.model_validate({"min_p": 0.5, "seed": 4.0})
    assert (Asked.__name__, Asked.__doc__) == ("Asked", "Asked for.")
    assert Asked.model_fields["min_p"].description.endswith("0 is off. More of it.")
    values = read_sampling_values(body, "native")
    assert values == {
        "temperature": None,
        "top_k": "forty",
        "top_p": None,
        "min_p": 0.5,
        "repetition_penalty": None,
        "seed": 4,
    }
    with pytest.raises(pydantic.ValidationError):
        Asked.model_validate({"min_p": "0.5"})


def test_omitted_parameters_get_the_operators_defaults():
    values = {"top_p": None, "top_k": 3, "max_tokens": 10**12}
    defaults = Sampling.model_validate({"top_p": 0.25, "top_k": 7, "max_tokens": 9})
    params = build_params(defaults, values)
    assert params == SamplingParams(
        temperature=0.8, top_k=3, top_p=0.25, min_p=0.05, max_tokens=2**31 - 1
    )
    assert build_params(Sampling(max_tokens=9), {}).max_tokens == 9


@pytest.mark.parametrize("name", ["repetition_penalty", "repeat_penalty"])
def test_error_names_the_field_that_was_sent(name):
    body = CompletionBody(prompt="a", **{name: 0.0})
    with pytest.raises(BadRequest, match=f"'{name}'") as caught:
        asyncio.run(body.params(served()))
    assert caught.value.param == name


@pytest.mark.parametrize(
    ("body", "operator", "limit"),
    [
        (CompletionBody(prompt="a"), None, 16),
        (CompletionBody(prompt="a"), 7, 7),
        (CompletionBody(prompt="a", max_tokens=3), 7, 3),
        (CompletionBody(prompt="a", n_predict=3), 7, 3),
        (CompletionBody(prompt="a", max_tokens=-1), 7, None),
        (ChatBody(messages=MESSAGES), None, None),
        (ChatBody(messages=MESSAGES), 7, 7),
        (ChatBody(messages=MESSAGES, max_tokens=-1), 7, None),
        (ChatBody(messages=MESSAGES, max_completion_tokens=-1), 7, None),
    ],
)
def test_limit_of_operator_is_a_default(body, operator, limit):
    defaults = Sampling(max_tokens=operator)
    assert asyncio.run(body.params(served(defaults))).max_tokens == limit


@pytest.mark.parametrize("texts", [{"dry_sequence_breakers": ["a"]}, {"dry_multiplier": 1.0}])
def test_breakers_are_found_in_another_thread(texts):
    """A text that is in many tokens would keep the event loop from other clients."""
    threads = []

    class Breakers:
        def ids(self, texts):
            threads.append(threading.current_thread())
            return (1,)

    params = asyncio.run(CompletionBody(prompt="a", **texts).params(served(breakers=Breakers())))
    assert params.dry_breakers == (1,)
    assert threads != [threading.main_thread()]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/generate", {"prompt": "a", "max_tokens": 2}),
        ("/v1/completions", {"prompt": "a", "max_tokens": 2, "dry_multiplier": 1, "best_of": 2}),
        ("/v1/completions", {"prompt": "a", "max_tokens": 2, "regex": "a+"}),
        (
            "/v1/chat/completions",
            {
                "messages": MESSAGES,
                "max_tokens": 2,
                "dry_sequence_breakers": ["a"],
                "thinking_token_budget": 1,
                "response_format": {"type": "json_object"},
                "tools": [{"type": "function", "function": TOOL}],
            },
        ),
        ("/v1/responses", {"input": "a", "max_output_tokens": 2, "temperature": 2}),
        (
            "/v1/messages",
            {
                "model": "fake",
                "messages": MESSAGES,
                "max_tokens": 2,
                "output_config": {"format": {"type": "json_schema", "schema": SCHEMA}},
            },
        ),
        (
            "/api/chat",
            {
                "model": "fake",
                "messages": MESSAGES,
                "stream": False,
                "options": {"num_predict": 2},
                "format": SCHEMA,
            },
        ),
        ("/api/generate", {"model": "fake", "prompt": "a", "raw": True, "stream": False}),
    ],
)
def test_parameters_of_a_request_are_checked_once(path, body, monkeypatch):
    """The grammar, the seed and the reasoning budget are added without a second check."""
    checked = []
    check = SamplingParams._check_stop

    def count(params):
        checked.append(params)
        check(params)

    monkeypatch.setattr(SamplingParams, "_check_stop", count)
    answer = asyncio.run(ask(path, body))
    assert answer.status_code == 200, answer.text
    assert len(checked) == 1


async def ask(path, body):
    """Send a request to an app in this process and return its answer."""
    engine = Pool(EngineParams(backend="fake", max_num_seqs=4, context_length=1024))
    service = Service(ModelTexts(engine, Metrics("fake")), "fake")
    app = create_app(Registry([ServedModel(name="fake", service=service)]), Settings())
    transport = httpx2.ASGITransport(app)
    async with httpx2.AsyncClient(transport=transport, base_url="http://test") as client:
        await engine.start()
        try:
            return await asyncio.wait_for(client.post(path, json=body), PATIENCE)
        finally:
            await engine.close()

"""Answers have only the keys that their types declare. The framework leaves other keys out of what a
route returns, so that a client would miss them.
"""

import asyncio
import json
import time
from contextlib import asynccontextmanager
from typing import Any

import fastapi.routing
import httpx2
import jsonschema
import msgspec
import pytest
from conftest import PATIENCE
from pydantic_core import to_json

from cllm.bench.load.client import Outcome
from cllm.bench.load.report import summarize
from cllm.config.settings import Settings
from cllm.engine.params import EngineParams
from cllm.observe.metrics import Metrics
from cllm.process.pool import Pool
from cllm.server.app import create_app
from cllm.serving.model_texts import ModelTexts
from cllm.serving.registry import Registry
from cllm.serving.served_model import ServedModel
from cllm.serving.service import Service

MESSAGES = [{"role": "user", "content": "hi"}]
CHAT = {"model": "fake", "messages": MESSAGES}
NAME = {"model": "fake"}
ONE = {"prompt": "a", "max_tokens": 1}
TOOL = {"type": "function", "function": {"name": "f"}}
LINE = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "a"}}
FILE = {"file": ("in.jsonl", json.dumps(LINE).encode())}
BATCH = {"endpoint": "/v1/completions", "completion_window": "24h", "metadata": {"a": "b"}}
MESSAGE = {"custom_id": "a", "params": {**CHAT, "max_tokens": 1}}
REPORT = msgspec.to_builtins(summarize(Outcome([], 1.0, 0.1), url="u", model="m", settings={}))

# The bodies of POST routes, by path; the other ones are requested in `request_by_id`.
BODIES: dict[str, list[Any]] = {
    "/v1/messages": [
        {**CHAT, "max_tokens": 4},
        {**CHAT, "max_tokens": 4, "tools": [{"name": "f", "input_schema": {"type": "object"}}]},
    ],
    "/v1/messages/count_tokens": [CHAT],
    "/v1/chat/completions": [
        {**CHAT, "max_tokens": 1, "logprobs": True, "top_logprobs": 1},
        {**CHAT, "max_tokens": 40, "tools": [TOOL], "tool_choice": "required"},
    ],
    "/v1/completions": [{**ONE, "logprobs": 1, "echo": True}],
    "/v1/embeddings": [{"input": "a"}],
    "/v1/responses/input_tokens": [{"input": "a"}],
    "/api/generate": [
        {**NAME, "prompt": "a", "stream": False, "logprobs": True, "options": {"num_predict": 1}},
        NAME,
    ],
    "/api/chat": [
        {**CHAT, "stream": False, "options": {"num_predict": 1}},
        {**CHAT, "messages": []},
    ],
    "/api/embed": [{**NAME, "input": "a"}, NAME],
    "/api/embeddings": [{**NAME, "prompt": "a"}],
    "/api/show": [NAME],
    "/api/pull": [{**NAME, "stream": False}],
    "/api/create": [{"model": "mine", "from": "fake", "stream": False}],
    "/tokenize": [
        {"content": "a", "with_pieces": True},
        {"prompt": "a", "return_token_strs": True},
    ],
    "/detokenize": [{"tokens": [97]}],
    "/apply-template": [{"messages": MESSAGES}],
    "/v1/chat/completions/control": [{"id": "a", "action": "reasoning_end"}],
    "/completion": [{"prompt": "a", "n_predict": 1}],
    "/lora-adapters": [[]],
    "/models/load": [NAME],
    "/generate": [ONE, {"prompts": ["a", "b"], "max_tokens": 1}],
    "/encode": [{"text": "a"}],
    "/decode": [{"tokens": [97]}],
    "/v1/rerank": [
        {"query": "a", "documents": ["a", "b"], "return_documents": True},
        {"query": "a", "texts": ["a", "b"], "return_text": True},
    ],
    "/benchmark": [{"requests": 1, "concurrency": 1, "max_tokens": 1}],
    "/faults": [{"faults": []}],
}
# GET routes that need no id, with the queries that change their answers.
QUERIES = {
    "/v1/models/{name}": ["/v1/models/fake"],
    "/health": ["/health", "/health?level=full"],
}
# Requests to these fail: the model of this test cannot fill in, responses cannot be cancelled, no
# answer is being generated, and this application has no address to which a load run could be sent.
FAILING = {
    ("post", "/infill"),
    ("post", "/v1/chat/completions/control"),
    ("post", "/v1/responses/{response_id}/cancel"),
    ("post", "/bench/run"),
}


@asynccontextmanager
async def make_client(folder):
    """Yield the application, with the fake backend, and a client of it."""
    server = {"allow_model_changes": True, "benchmark": True, "enable_faults": True}
    settings = Settings.model_validate({"server": server, "storage": {"folder": str(folder)}})
    engine = Pool(EngineParams(backend="fake", max_num_seqs=4, context_length=1024))
    service = Service(ModelTexts(engine, Metrics("fake")), "fake")
    model = ServedModel(name="fake", service=service, backend="fake")
    app = create_app(Registry([model]), settings)
    transport = httpx2.ASGITransport(app)
    async with httpx2.AsyncClient(transport=transport, base_url="http://test") as client:
        await engine.start()
        try:
            yield app, client
        finally:
            await app.state.batches.stop()
            await engine.close()


async def request_by_id(send):
    """Request the routes whose paths have the id of something that is created here."""
    response = (await send("post", "/v1/responses", json={"input": "a"}))["id"]
    path = "/v1/responses/{response_id}"
    await send("get", path, response_id=response)
    await send("get", f"{path}/input_items", response_id=response)
    await send("delete", path, response_id=response)

    file = (await send("post", "/v1/files", files=FILE, data={"purpose": "batch"}))["id"]
    await send("get", "/v1/files")
    await send("get", "/v1/files/{file_id}", file_id=file)
    body = {**BATCH, "input_file_id": file}
    path, batch = "/v1/batches/{batch_id}", (await send("post", "/v1/batches", json=body))["id"]
    await send("post", f"{path}/cancel", batch_id=batch)
    await wait(send, path, batch, "status", ("completed", "cancelled"))
    await send("get", "/v1/batches")
    await send("delete", "/v1/files/{file_id}", file_id=file)

    path = "/v1/messages/batches/{batch_id}"
    batch = (await send("post", "/v1/messages/batches", json={"requests": [MESSAGE]}))["id"]
    await send("post", f"{path}/cancel", batch_id=batch)
    await wait(send, path, batch, "processing_status", ("ended",))
    await send("get", "/v1/messages/batches")
    await send("delete", path, batch_id=batch)

    report = (await send("post", "/bench/reports", json=REPORT))["id"]
    path = "/bench/reports/{report_id}"
    await send("get", path, report_id=report)
    both = {"before": report, "after": report}
    await send("get", "/bench/reports/{before}/compare/{after}", **both)
    await send("get", "/bench/reports")
    await send("delete", "/bench/run")
    await send("delete", path, report_id=report)


async def wait(send, path, batch, field, ends):
    end = time.monotonic() + PATIENCE
    while (await send("get", path, batch_id=batch))[field] not in ends:
        assert time.monotonic() < end
        await asyncio.sleep(0.02)


def close(schema):
    """Make every object in ``schema`` that has properties allow no other ones."""
    if isinstance(schema, dict):
        if "properties" in schema:
            schema.setdefault("additionalProperties", False)
        schema = list(schema.values())
    if isinstance(schema, list):
        for part in schema:
            close(part)


@pytest.mark.slow
def test_answers_have_only_declared_keys(tmp_path, monkeypatch):
    """What a route returns is what its client gets, and its type declares all of it."""
    returned, answered = [], set()
    serialize = fastapi.routing.serialize_response

    async def record(**arguments):
        returned.append(json.loads(to_json(arguments["response_content"])))
        return await serialize(**arguments)

    monkeypatch.setattr(fastapi.routing, "serialize_response", record)

    async def main():
        async with make_client(tmp_path) as (app, client):
            document = app.openapi()
            close(document["components"]["schemas"])

            async def send(verb, path, query=None, **values):
                body = {key: values.pop(key) for key in ("json", "files", "data") if key in values}
                answer = await client.request(verb.upper(), query or path.format(**values), **body)
                assert answer.status_code == 200, (path, answer.text)
                content = answer.json()
                entry = document["paths"][path][verb]["responses"]["200"]["content"]
                schema = entry["application/json"]["schema"]
                jsonschema.validate(content, {**schema, "components": document["components"]})
                assert [content] == (returned or [content]), path
                returned.clear()
                answered.add((verb, path))
                return content

            declared = {
                (verb, path)
                for path, verbs in document["paths"].items()
                for verb, entry in verbs.items()
                if "application/json" in entry["responses"]["200"]["content"]
                and "text/plain" not in entry["responses"]["200"]["content"]
            }
            await asyncio.wait_for(request_by_id(send), PATIENCE)
            app.state.streams.add("kept", "", [])
            await send("delete", "/v1/streams/{stream_id}", stream_id="kept")
            for verb, path in sorted(declared - answered - FAILING):
                if verb == "get":
                    for query in QUERIES.get(path, [path]):
                        await send(verb, path, query)
                elif path in BODIES:
                    for body in BODIES[path]:
                        await send(verb, path, json=body)
            await send("post", "/models/unload", json=NAME)
            assert declared == answered | FAILING

    asyncio.run(main())

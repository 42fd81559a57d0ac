"""The OpenAPI document at /openapi.json, and a page at /docs that shows it and loads nothing from
other servers.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import re
import sys
from importlib import resources
from typing import Any

import pydantic
from fastapi import APIRouter, FastAPI
from pydantic.json_schema import models_json_schema
from pydantic_core import to_json
from starlette.requests import Request
from starlette.responses import Response

router = APIRouter(include_in_schema=False)

MEDIA_TYPES = ("takes", "stream")  # entries of an operation's x-models that are not models


def install(app: FastAPI) -> None:
    """Let ``app.openapi`` include what routes declare with ``describe_route``.

    It is built once, on the first request.
    """
    generate = app.openapi

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            app.openapi_schema = add_schemas(generate())
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]


def add_schemas(document: dict[str, Any]) -> dict[str, Any]:
    """Return ``document`` with the schemas of all models that its operations name."""
    operations = [operation for path in document["paths"].values() for operation in path.values()]
    named = [
        operation.pop("x-models", {"error": "cllm.server.body:Error"}) for operation in operations
    ]
    models = {
        name: model_of(name)
        for models in named
        for role, name in models.items()
        if role not in MEDIA_TYPES
    }
    references, definitions = models_json_schema(
        [(model, "validation") for model in models.values()],
        ref_template="#/components/schemas/{model}",
    )
    # replaces the framework's error form
    document["components"] = {"schemas": definitions.get("$defs", {})}
    for operation, roles in zip(operations, named, strict=True):
        add_operation_schemas(
            operation,
            {
                role: references[models[name], "validation"]
                for role, name in roles.items()
                if name in models
            },
        )
        if "requestBody" in operation:
            content = operation["requestBody"]["content"]
            content[roles["takes"]] = content.pop("application/json")
        if stream := roles.get("stream"):
            content = operation["responses"]["200"]["content"]
            if "answer" not in roles:
                content.clear()
            content[stream] = {"schema": {"description": "The events of a stream."}}
    return document


def model_of(name: str) -> type[pydantic.BaseModel]:
    """Return the class with the name ``module:class``."""
    module, _, qualname = name.partition(":")
    model: type[pydantic.BaseModel] = getattr(sys.modules[module], qualname)
    return model


def add_operation_schemas(operation: dict[str, Any], schemas: dict[str, Any]) -> None:
    """Add the schemas of one operation to it."""
    responses = operation["responses"]
    responses.pop("422", None)
    if "body" in schemas:
        operation["requestBody"] = {
            "required": True,
            "content": {"application/json": {"schema": schemas["body"]}},
        }
    if "answer" in schemas:
        responses["200"] = {
            "description": "The answer.",
            "content": {"application/json": {"schema": schemas["answer"]}},
        }
    error = {"application/json": {"schema": schemas["error"]}}
    responses["4XX"] = {"description": "The request cannot be served as it is.", "content": error}
    responses["5XX"] = {
        "description": "The engine cannot serve it now, or it took too long.",
        "content": error,
    }


def page() -> tuple[bytes, str]:
    """Return the page, and a content security policy that allows only its own script and style."""
    html = resources.files("cllm.server").joinpath("docs.html").read_text()

    def digest(tag: str) -> str:
        found = re.search(f"<{tag}>(.*?)</{tag}>", html, re.DOTALL)
        assert found is not None
        return (
            "'sha256-" + base64.b64encode(hashlib.sha256(found[1].encode()).digest()).decode() + "'"
        )

    policy = (
        f"default-src 'none'; script-src {digest('script')}; style-src {digest('style')}; "
        f"connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    return html.encode(), policy


@router.get("/docs")
async def docs() -> Response:
    html, policy = page()
    headers = {
        "content-security-policy": policy,
        "x-content-type-options": "nosniff",
        "referrer-policy": "no-referrer",
    }
    return Response(html, headers=headers, media_type="text/html")


@router.get("/openapi.json")
async def document(request: Request) -> Response:
    schema = await asyncio.to_thread(request.app.openapi)
    return Response(to_json(schema), media_type="application/json")

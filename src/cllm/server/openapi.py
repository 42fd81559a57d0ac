"""The OpenAPI document at /openapi.json, and a page at /docs that shows it and loads nothing from
other servers.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from importlib import resources
from typing import Any

import msgspec
from fastapi import APIRouter, FastAPI
from fastapi.routing import APIRoute
from pydantic import TypeAdapter
from pydantic_core import to_json
from starlette.requests import Request
from starlette.responses import Response

from cllm.server.errors import ErrorAnswer

router = APIRouter(include_in_schema=False)

MEDIA_TYPES = ("takes", "stream")  # entries of an operation's x-models that are not models


def install(app: FastAPI, error_types: Mapping[str, Any]) -> None:
    """Let ``app.openapi`` include the types that routes declare with ``describe_route`` and as
    their return types. The document is built once, on the first request.

    ``error_types`` maps the tags of routes to the types of their dialects' errors. The errors of
    other routes have OpenAI's form.
    """
    generate = app.openapi

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            app.openapi_schema = add_schemas(generate(), app.state.routes, error_types)
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]


def add_schemas(
    document: dict[str, Any], routes: Sequence[APIRoute], error_types: Mapping[str, Any]
) -> dict[str, Any]:
    """Return ``document`` with the schemas of all types that its operations name or return."""
    returned = {
        (route.path_format, method.lower()): route.response_model
        for route in routes
        if route.include_in_schema
        for method in route.methods
    }
    operations = []
    for path, verbs in document["paths"].items():
        for verb, operation in verbs.items():
            names = operation.pop("x-models", {})
            types = {role: find_type(names[role]) for role in names if role not in MEDIA_TYPES}
            types.setdefault("error", error_types.get(operation["tags"][0], ErrorAnswer))
            if answer := returned[path, verb]:
                types.setdefault("answer", answer)
            operations.append((operation, names, types))
    schemas, components = make_schemas(
        dict.fromkeys(kind for _, _, types in operations for kind in types.values())
    )
    document["components"] = {"schemas": components}  # replaces the framework's error form
    for operation, names, types in operations:
        add_operation_schemas(operation, {role: schemas[kind] for role, kind in types.items()})
        if "requestBody" in operation:
            content = operation["requestBody"]["content"]
            content[names["takes"]] = content.pop("application/json")
        if stream := names.get("stream"):
            content = operation["responses"]["200"]["content"]
            if "answer" not in types:
                content.clear()
            content[stream] = {"schema": {"description": "The events of a stream."}}
    return document


def make_schemas(types: Iterable[Any]) -> tuple[dict[Any, Any], dict[str, Any]]:
    """Return the schema of each of ``types``, and the components that the schemas refer to.

    pydantic does not know msgspec's structs, which describe the engine.
    """
    structs = [kind for kind in types if msgspec.inspect.is_struct_type(kind)]
    others = [kind for kind in types if kind not in structs]
    template = "#/components/schemas/{%s}"
    references, definitions = TypeAdapter.json_schemas(
        [(kind, "validation", TypeAdapter(kind)) for kind in others],
        ref_template=template % "model",
    )
    of_structs, components = msgspec.json.schema_components(structs, ref_template=template % "name")
    schemas = {kind: references[kind, "validation"] for kind in others}
    schemas |= zip(structs, of_structs, strict=True)
    return schemas, definitions.get("$defs", {}) | components


def find_type(name: str) -> Any:
    """Return the class with the name ``module:class``."""
    module, _, qualname = name.partition(":")
    return getattr(sys.modules[module], qualname)


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
        match = re.search(f"<{tag}>(.*?)</{tag}>", html, re.DOTALL)
        assert match is not None
        return (
            "'sha256-" + base64.b64encode(hashlib.sha256(match[1].encode()).digest()).decode() + "'"
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

"""docs/api.md follows from the code, and has all parameters that OpenAI's own client can send."""

from pathlib import Path
from typing import get_type_hints

import pytest
from openai.types import (
    batch_create_params,
    completion_create_params,
    embedding_create_params,
    file_create_params,
)
from openai.types.chat import completion_create_params as chat_create_params
from openai.types.responses import response_create_params

from cllm.server.app import routes
from tools.api_page import body_model, body_rows, render_page

ROOT = Path(__file__).resolve().parents[2]
PARAMETERS = {
    "/v1/chat/completions": chat_create_params.CompletionCreateParamsBase,
    "/v1/completions": completion_create_params.CompletionCreateParamsBase,
    "/v1/embeddings": embedding_create_params.EmbeddingCreateParams,
    "/v1/responses": response_create_params.ResponseCreateParamsBase,
    "/v1/files": file_create_params.FileCreateParams,
    "/v1/batches": batch_create_params.BatchCreateParams,
}
WITHOUT_BODY = ("/cancel",)


def test_page_matches_the_code():
    """If this fails, run: make docs."""
    assert (ROOT / "docs" / "api.md").read_text() == render_page()


@pytest.mark.parametrize("path", PARAMETERS)
def test_no_parameter_of_openai_is_unknown(path):
    """Each parameter is supported, ignored or rejected. The last two have a reason."""
    (model,) = (
        body_model(route) for route in routes() if route.path == path and "POST" in route.methods
    )
    rows = {name: (state, what) for name, state, what in body_rows(model)}
    assert set(get_type_hints(PARAMETERS[path])) - set(rows) == set()
    assert [name for name, (state, what) in rows.items() if state != "done" and len(what) < 8] == []


def test_every_route_with_a_body_declares_it():
    """The parameters then appear on the page and in the OpenAPI document."""
    posts = [route for route in routes() if "POST" in route.methods and route.include_in_schema]
    silent = [route.path for route in posts if body_model(route) is None]
    assert [path for path in silent if not path.endswith(WITHOUT_BODY)] == []


def test_make_docs_writes_every_generated_page():
    recipe = (ROOT / "Makefile").read_text().partition("\ndocs:")[2]
    pages = [
        path for path in (ROOT / "docs").glob("*.md") if "generates it from" in path.read_text()
    ]
    assert len(pages) >= 3
    assert [
        page.name for page in pages if f"mv docs/{page.name}.new docs/{page.name}" not in recipe
    ] == []


@pytest.mark.parametrize(
    ("path", "limit"),
    [
        ("/v1/chat/completions", "above 2 are an extension of OpenAI"),
        ("/v1/messages", "above 1 are an extension of Anthropic"),
    ],
)
def test_page_calls_temperatures_above_the_originals_limit_an_extension(path, limit):
    (model,) = (
        body_model(route) for route in routes() if route.path == path and "POST" in route.methods
    )
    rows = {name: what for name, _, what in body_rows(model)}
    assert limit in rows["temperature"]


def test_page_lists_every_route():
    text = render_page()
    assert [route.path for route in routes() if route.tags and f" {route.path}\n" not in text] == []

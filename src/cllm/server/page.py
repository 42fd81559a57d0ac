"""Serves the web page at / to browsers. Its files are in the folder ui.

The page contains no data, so loading it needs no API key. Its requests send the user's key.
"""

from __future__ import annotations

import hashlib
from functools import cache
from importlib import resources
from typing import NamedTuple

from fastapi import APIRouter
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

router = APIRouter(include_in_schema=False)

FOLDER = resources.files("cllm.server") / "ui"
PREFIX = "/ui/"
MEDIA_TYPES = {
    "css": "text/css",
    "js": "text/javascript",
    "svg": "image/svg+xml",
    "woff2": "font/woff2",
}
# The page loads everything from this server, and text from a model cannot run as a script.
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; font-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types dompurify"
)
HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",  # revalidate with the etag before each use
}


def list_files() -> frozenset[str]:
    """Return the names of the files that the page loads, such as vendor/preact.js."""
    folders = [(FOLDER, "")]
    names = set()
    while folders:
        folder, prefix = folders.pop()
        for entry in folder.iterdir():
            if entry.is_dir():
                folders.append((entry, f"{prefix}{entry.name}/"))
            elif entry.name.rpartition(".")[2] in MEDIA_TYPES:
                names.add(prefix + entry.name)
    return frozenset(names)


FILES = list_files()
PATHS = frozenset(PREFIX + name for name in FILES)


class PageFile(NamedTuple):
    content: bytes
    etag: str


@cache
def read_file(name: str) -> PageFile:
    content = FOLDER.joinpath(*name.split("/")).read_bytes()
    return PageFile(content, f'"{hashlib.sha256(content).hexdigest()[:32]}"')


def wants_page(request: Request) -> bool:
    """Return whether the client is a browser that wants the page: it names text/html in Accept and
    does not prefer JSON.
    """
    quality = {"text/html": 0.0, "application/json": 0.0}
    for accepted in request.headers.get("accept", "").split(","):
        kind, *parameters = (part.strip().lower() for part in accepted.split(";"))
        if kind in quality:
            quality[kind] = read_quality(parameters)
    return quality["text/html"] > 0 and quality["text/html"] >= quality["application/json"]


def read_quality(parameters: list[str]) -> float:
    """Return the weight among the parameters of an accepted type, 1 by default."""
    weight = next((one[2:] for one in parameters if one.startswith("q=")), "1")
    try:
        return float(weight)
    except ValueError:
        return 0.0


def answer_page(request: Request) -> Response:
    return answer_file(request, "index.html", "text/html", {"vary": "accept"})


def answer_file(
    request: Request, name: str, media_type: str, more: dict[str, str] | None = None
) -> Response:
    """Return a file, or 304 if the client has it."""
    file = read_file(name)
    headers = {**HEADERS, "etag": file.etag, **(more or {})}
    known = request.headers.get("if-none-match", "")
    if file.etag in (tag.strip().removeprefix("W/") for tag in known.split(",")):
        return Response(status_code=304, headers=headers)
    return Response(file.content, headers=headers, media_type=media_type)


@router.get(PREFIX + "{name:path}")
async def page_file(request: Request, name: str) -> Response:
    """Return a file of the page."""
    if name not in FILES:
        raise HTTPException(404)
    return answer_file(request, name, MEDIA_TYPES[name.rpartition(".")[2]])

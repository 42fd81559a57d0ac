"""What is known of a batch, and its files: the record, and the answers that it has so far.

``batches/ID.json`` is replaced as a whole; answers are added to ``ID.output`` or ``ID.errors``, a line each, and a line
that a crash has cut off is taken away, so that a line is there once or not at all.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections import Counter
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pydantic
from pydantic_core import from_json

from cllm.errors import BadRequest
from cllm.server.body_limits import check_structure
from cllm.server.openai.file_store import write_whole

log = logging.getLogger("cllm.batches")

FINAL = {"completed", "failed", "expired", "cancelled"}
MAX_LINES = 50_000
MAX_ERRORS = 100  # of a file that are listed


class BatchRecord(msgspec.Struct):
    """The fields are OpenAI's, and beside them: owner, on whose account it is computed; window and output_expires_after
    in seconds; ending, what it will be once its files are whole; usage, as it was when it last was counted.
    """

    id: str
    owner: str
    model: str
    endpoint: str
    input_file_id: str
    completion_window: str
    created_at: int
    expires_at: int
    metadata: dict[str, str] | None = None
    output_expires_after: int | None = None
    status: str = "validating"
    ending: str = ""
    total: int = 0
    completed: int = 0
    failed: int = 0
    errors: list[dict[str, Any]] = []
    output_file_id: str | None = None
    error_file_id: str | None = None
    times: dict[str, int] = {}
    usage: dict[str, int] = {}

    def public(self) -> dict[str, Any]:
        """As OpenAI's clients see it."""
        statuses = ("in_progress", "finalizing", "completed", "failed", "expired", "cancelling", "cancelled")
        times = {f"{status}_at": self.times.get(status) for status in statuses}
        content = {
            "id": self.id,
            "object": "batch",
            "endpoint": self.endpoint,
            "model": self.model,
            "input_file_id": self.input_file_id,
            "completion_window": self.completion_window,
            "status": self.status,
            "created_at": self.created_at,
            "expires_at": self.expires_at,
            **times,
            "request_counts": {"total": self.total, "completed": self.completed, "failed": self.failed},
            "usage": usage_object(self.usage),
            "output_file_id": self.output_file_id if self.status in FINAL else None,
            "error_file_id": self.error_file_id if self.status in FINAL else None,
            "errors": {"object": "list", "data": self.errors} if self.errors else None,
        }
        return {**{key: value for key, value in content.items() if value is not None}, "metadata": self.metadata}


class Answered(NamedTuple):
    """The custom_ids that have an answer, and the tokens of all answers together."""

    completed: set[str]
    failed: set[str]
    usage: dict[str, int]


def tokens_of(line: dict[str, Any]) -> dict[str, int]:
    """The tokens of an answer: of a chat, a completion, embeddings or a response; {} if it has none."""
    usage = ((line.get("response") or {}).get("body") or {}).get("usage") or {}
    details = usage.get("prompt_tokens_details") or usage.get("input_tokens_details") or {}
    of_output = usage.get("completion_tokens_details") or usage.get("output_tokens_details") or {}
    tokens = {
        "input": usage.get("prompt_tokens") or usage.get("input_tokens"),
        "cached": details.get("cached_tokens"),
        "output": usage.get("completion_tokens") or usage.get("output_tokens"),
        "reasoning": of_output.get("reasoning_tokens"),
    }
    return {name: count for name, count in tokens.items() if count}


def usage_object(usage: dict[str, int]) -> dict[str, Any]:
    read, written = usage.get("input", 0), usage.get("output", 0)
    return {
        "input_tokens": read,
        "input_tokens_details": {"cached_tokens": usage.get("cached", 0)},
        "output_tokens": written,
        "output_tokens_details": {"reasoning_tokens": usage.get("reasoning", 0)},
        "total_tokens": read + written,
    }


class BatchFiles:
    """The files of one batch. All methods but ``add`` block, and are called one at a time, by one thread."""

    def __init__(self, folder: Path, batch_id: str) -> None:
        self._record = folder / f"{batch_id}.json"
        self.output = folder / f"{batch_id}.output"
        self.errors = folder / f"{batch_id}.errors"
        self._unwritten: dict[Path, list[bytes]] = {self.output: [], self.errors: []}

    def save(self, record: BatchRecord) -> None:
        write_whole(self._record, msgspec.json.encode(record))

    def add(self, line: bytes, *, succeeded: bool) -> None:
        """Add an answer, which is on the disk after the next ``flush``."""
        self._unwritten[self.output if succeeded else self.errors].append(line)

    def flush(self) -> None:
        """Bring all that was added to the disk: the slowest part, and the same for one as for many.

        What an OSError has kept from the disk is written the next time, so that nobody's line is lost in the flush of
        somebody else.
        """
        for path, lines in self._unwritten.items():
            if taken := lines.copy():
                append_whole(path, b"".join(taken))
                del lines[: len(taken)]

    def answered(self) -> Answered:
        """Which lines have an answer. What a crash has cut off is taken away."""
        self.flush()
        usage: Counter[str] = Counter()
        return Answered(set(answers_in(self.output, usage)), set(answers_in(self.errors, usage)), dict(usage))

    def num_bytes(self) -> int:
        return sum(path.stat().st_size for path in (self.output, self.errors) if path.exists())

    def delete(self) -> None:
        for path in (self._record, self.output, self.errors):
            path.unlink(missing_ok=True)


def load_records(folder: Path) -> Iterator[BatchRecord]:
    for path in sorted(folder.glob("*.json")):
        try:
            yield msgspec.json.decode(path.read_bytes(), type=BatchRecord)
        except (msgspec.MsgspecError, OSError) as error:
            log.warning("%s is no record of a batch: %s", path, error)


def append_whole(path: Path, data: bytes) -> None:
    """Append ``data`` and bring it to the disk; all of it, or, with an OSError, nothing."""
    with path.open("ab", buffering=0) as file:
        size, rest = file.tell(), memoryview(data)
        try:
            while rest:
                rest = rest[file.write(rest) :]
            os.fsync(file.fileno())
        except OSError:
            with contextlib.suppress(OSError):
                file.truncate(size)
            raise


def answers_in(path: Path, usage: Counter[str]) -> Iterator[str]:
    """The custom_ids of the answers in a file; their tokens are added to ``usage``."""
    if not path.exists():
        return
    whole = 0
    with path.open("rb") as file:
        for text in file:
            if not text.endswith(b"\n"):
                break
            whole += len(text)
            line = from_json(text)
            usage.update(tokens_of(line))
            yield line["custom_id"]
    os.truncate(path, whole)


class Line(pydantic.BaseModel):
    """One request of an input file."""

    model_config = pydantic.ConfigDict(strict=True)
    custom_id: str = pydantic.Field(min_length=1, max_length=512)
    method: str
    url: str
    body: dict[str, Any]


def check_lines(path: Path, endpoint: str, max_line: int) -> tuple[int, list[dict[str, Any]]]:
    """The number of requests in a file, and what is wrong with them as OpenAI lists it; nothing is, if it is []."""
    errors: list[dict[str, Any]] = []
    seen: set[str] = set()
    for number, text in numbered_lines(path, max_line):
        code, message, param = "", "", None
        try:
            if len(text) > max_line:
                code, message = "line_too_long", f"The line has more than {max_line} bytes."
            else:
                check_structure(text)
                line = Line.model_validate(from_json(text, allow_inf_nan=False))
                code, message, param = fault_of(line, endpoint, seen)
                seen.add(line.custom_id)
        except pydantic.ValidationError as error:
            first = error.errors(include_url=False)[0]
            param = ".".join(map(str, first["loc"])) or None
            code, message = "invalid_request", f"{first['msg']}."
        except BadRequest as error:
            code, message = error.code or "invalid_request", str(error)
        except ValueError as error:
            code, message = "invalid_json_line", f"The line is not valid JSON: {str(error)[:200]}"
        if code:
            errors.append({"code": code, "line": number, "message": message, "param": param})
        if len(errors) == MAX_ERRORS or len(seen) > MAX_LINES:
            break
    if not seen and not errors:
        errors.append({"code": "empty_file", "line": None, "message": "The file has no requests.", "param": None})
    if len(seen) > MAX_LINES:
        message = f"A batch has at most {MAX_LINES} requests."
        errors.append({"code": "too_many_requests", "line": None, "message": message, "param": None})
    return len(seen), errors


def fault_of(line: Line, endpoint: str, seen: set[str]) -> tuple[str, str, str | None]:
    """Code, message and field of what is wrong with a request; "" if nothing is."""
    if line.custom_id in seen:
        return "duplicate_custom_id", f"Another line has the custom_id {line.custom_id!r} too.", "custom_id"
    if line.method != "POST":
        return "invalid_method", "The method must be POST.", "method"
    if line.url != endpoint:
        return "mismatched_endpoint", f"The url must be the batch's endpoint, {endpoint}.", "url"
    if line.body.get("stream"):
        return "unsupported_parameter", "A request of a batch is not streamed.", "body.stream"
    return "", "", None


def numbered_lines(path: Path, max_line: int) -> Generator[tuple[int, bytes], None, None]:
    """The lines that are not blank, from 1; of one that is too long, a beginning that is too long."""
    with path.open("rb") as file:
        number = 0
        while text := file.readline(max_line + 2):
            number += 1
            if len(text) > max_line + 1 and not text.endswith(b"\n"):
                yield number, text
                return
            if text := text.strip():
                yield number, text

"""The record of a batch, and its files: the record on disk, and the answers so far.

``batches/ID.json`` is always replaced as a whole. Each answer is a line appended to ``ID.output``
or ``ID.errors``. A line that a crash has cut off is removed, so that a line exists once or not at
all.
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
MAX_ERRORS = 100  # that are listed for a file


class BatchRecord(msgspec.Struct):
    """OpenAI's fields, and these. owner: the account of the batch. output_expires_after: in
    seconds. ending: the status that the batch will have once its files are complete. times: Unix
    times by status. usage: as last counted.
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
        """Return the batch as OpenAI's clients see it."""
        statuses = (
            "in_progress",
            "finalizing",
            "completed",
            "failed",
            "expired",
            "cancelling",
            "cancelled",
        )
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
            "request_counts": {
                "total": self.total,
                "completed": self.completed,
                "failed": self.failed,
            },
            "usage": usage_object(self.usage),
            "output_file_id": self.output_file_id if self.status in FINAL else None,
            "error_file_id": self.error_file_id if self.status in FINAL else None,
            "errors": {"object": "list", "data": self.errors} if self.errors else None,
        }
        return {
            **{key: value for key, value in content.items() if value is not None},
            "metadata": self.metadata,
        }


class Answered(NamedTuple):
    """The custom_ids that have an answer, and the tokens of all answers together."""

    completed: set[str]
    failed: set[str]
    usage: dict[str, int]


def tokens_of(line: dict[str, Any]) -> dict[str, int]:
    """Return the token counts of an answer (a chat, a completion, embeddings or a response); {} if
    it has none.
    """
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
    """The files of one batch.

    All methods except ``add`` block, and are called by one thread, one at a time.
    """

    def __init__(self, folder: Path, batch_id: str) -> None:
        self._record = folder / f"{batch_id}.json"
        self.output = folder / f"{batch_id}.output"
        self.errors = folder / f"{batch_id}.errors"
        self._unwritten: dict[Path, list[bytes]] = {self.output: [], self.errors: []}

    def save(self, record: BatchRecord) -> None:
        write_whole(self._record, msgspec.json.encode(record))

    def add(self, line: bytes, *, succeeded: bool) -> None:
        """Add an answer, which is on disk after the next ``flush``."""
        self._unwritten[self.output if succeeded else self.errors].append(line)

    def flush(self) -> None:
        """Write all added answers to disk.

        This is the slowest part, and takes as long for one answer as for many.

        Answers that an OSError kept from the disk are written by the next flush, because a flush
        also writes answers that tasks other than its caller have added.
        """
        for path, lines in self._unwritten.items():
            if taken := lines.copy():
                append_whole(path, b"".join(taken))
                del lines[: len(taken)]

    def answered(self) -> Answered:
        """Return which lines have an answer, and their tokens.

        Remove lines that a crash has cut off.
        """
        self.flush()
        usage: Counter[str] = Counter()
        return Answered(
            set(answers_in(self.output, usage)), set(answers_in(self.errors, usage)), dict(usage)
        )

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
    """Append ``data`` and sync it to disk. If that raises OSError, append nothing."""
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
    """Yield the custom_ids of the answers in a file, and add their tokens to ``usage``.

    Remove a line that a crash has cut off.
    """
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
    """Return the number of requests in a file, and the list of errors in them, in OpenAI's
    format.
    """
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
        errors.append(
            {
                "code": "empty_file",
                "line": None,
                "message": "The file has no requests.",
                "param": None,
            }
        )
    if len(seen) > MAX_LINES:
        message = f"A batch has at most {MAX_LINES} requests."
        errors.append(
            {"code": "too_many_requests", "line": None, "message": message, "param": None}
        )
    return len(seen), errors


def fault_of(line: Line, endpoint: str, seen: set[str]) -> tuple[str, str, str | None]:
    """Return the code, the message and the field of a request's error; the code is "" if there is
    none.
    """
    if line.custom_id in seen:
        return (
            "duplicate_custom_id",
            f"Another line has the custom_id {line.custom_id!r} too.",
            "custom_id",
        )
    if line.method != "POST":
        return "invalid_method", "The method must be POST.", "method"
    if line.url != endpoint:
        return "mismatched_endpoint", f"The url must be the batch's endpoint, {endpoint}.", "url"
    if line.body.get("stream"):
        return "unsupported_parameter", "A request of a batch is not streamed.", "body.stream"
    return "", "", None


def numbered_lines(path: Path, max_line: int) -> Generator[tuple[int, bytes], None, None]:
    """Yield the lines that are not blank, with their numbers from 1. End with a line that is too
    long, of which only the first bytes are read.
    """
    with path.open("rb") as file:
        number = 0
        while text := file.readline(max_line + 2):
            number += 1
            if len(text) > max_line + 1 and not text.endswith(b"\n"):
                yield number, text
                return
            if text := text.strip():
                yield number, text

"""Reports of load runs, which the page /bench makes and compares: a file for each, as ``cllm bench
load`` writes it.
"""

from __future__ import annotations

import re
import secrets
import threading
import time
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from cllm.errors import BadRequest
from cllm.private_files import replace_private

FOLDER = "bench"  # in the folder storage.folder
MAX_REPORTS = 100  # the oldest ones are removed
MAX_BYTES = 200_000  # of a report; they have about 10,000
ID = re.compile(r"\d{8}-\d{6}-[0-9a-f]{8}")
TIME = "%Y%m%d-%H%M%S"
DAMAGED = (ValueError, RecursionError, msgspec.MsgspecError)


class ReportSettings(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The settings that lists show; None if a report does not have them."""

    workload: str | None = None
    concurrency: int | None = None
    rate: float | None = None


class ReportHead(msgspec.Struct, frozen=True, kw_only=True):
    """The part of a report that lists show."""

    model: str
    note: str = ""
    settings: ReportSettings
    num_requests: int
    num_succeeded: int
    wall_s: float
    output_tokens_per_s: float


class KeptReport(msgspec.Struct, frozen=True, kw_only=True):
    """A report, and the time when it was stored. A damaged one has no ``head``."""

    id: str
    created: int
    head: ReportHead | None


class KeptReports:
    """The reports in ``folder``, at most MAX_REPORTS. Its methods block.

    Raises OSError if the folder cannot be read or written.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._lock = threading.Lock()

    def list_all(self) -> list[KeptReport]:
        """Return the reports, the latest first."""
        return [self._describe(report_id) for report_id in reversed(self._list_ids())]

    def read(self, report_id: str) -> bytes:
        """Return a report as JSON. Raises BadRequest if it does not exist (404), or if its file is
        damaged (409).
        """
        self._check(report_id)
        try:
            content = self._read(report_id)
            msgspec.json.decode(content, type=ReportHead)
        except FileNotFoundError:
            raise no_report(report_id) from None
        except DAMAGED:
            message = f"The file of the report {report_id} is damaged; delete it."
            raise BadRequest(
                message, param="report_id", code="report_damaged", status=409
            ) from None
        return content

    def add(self, content: bytes) -> KeptReport:
        """Store a report, JSON, and remove the oldest ones if there are too many. Raises BadRequest
        if it is too large (413), or lists could not show it.
        """
        if len(content) > MAX_BYTES:
            message = f"A report has at most {MAX_BYTES} bytes, not {len(content)}."
            raise BadRequest(message, code="request_too_large", status=413)
        try:
            msgspec.json.decode(content, type=ReportHead)
        except msgspec.DecodeError as error:
            message = f"Lists cannot show the report: {error}"
            raise BadRequest(message, code="invalid_report") from None
        now = datetime.fromtimestamp(time.time(), UTC)
        report_id = f"{now.strftime(TIME)}-{secrets.token_hex(4)}"
        with self._lock:
            replace_private(self._path(report_id), content)
            for old in self._list_ids()[:-MAX_REPORTS]:
                self._path(old).unlink(missing_ok=True)
        return self._describe(report_id)

    def remove(self, report_id: str) -> None:
        """Remove a report. Raises BadRequest (404) if it does not exist."""
        self._check(report_id)
        try:
            self._path(report_id).unlink()
        except FileNotFoundError:
            raise no_report(report_id) from None

    def _list_ids(self) -> list[str]:
        """Return the ids, the oldest first."""
        return sorted(
            path.stem for path in self._folder.glob("*.json") if find_time(path.stem) is not None
        )

    def _describe(self, report_id: str) -> KeptReport:
        try:
            head = msgspec.json.decode(self._read(report_id), type=ReportHead)
        except (OSError, *DAMAGED):
            head = None
        return KeptReport(id=report_id, created=find_time(report_id) or 0, head=head)

    def _read(self, report_id: str) -> bytes:
        """Raises OSError, and ValueError if the file is too large."""
        with self._path(report_id).open("rb") as file:
            content = file.read(MAX_BYTES + 1)
        if len(content) > MAX_BYTES:
            raise ValueError("the file is too large")
        return content

    def _path(self, report_id: str) -> Path:
        return self._folder / f"{report_id}.json"

    def _check(self, report_id: str) -> None:
        if find_time(report_id) is None:
            raise no_report(report_id)


def find_time(report_id: str) -> int | None:
    """Return the Unix time in an id; None if it is not one."""
    if not ID.fullmatch(report_id):
        return None
    try:
        return int(datetime.strptime(report_id[:15], TIME).replace(tzinfo=UTC).timestamp())
    except ValueError:
        return None


def no_report(report_id: str) -> BadRequest:
    message = f"There is no report {report_id[:100]!r}."
    return BadRequest(message, param="report_id", code="report_not_found", status=404)

"""Remembers which answers have ended."""

from __future__ import annotations

from collections import deque

from cllm.observe.request_record import RequestRecord

MAX_ENDED = 1000


class EndedAnswers:
    """The latest answers that have ended, with the accounts that asked for them."""

    def __init__(self) -> None:
        self._ended: deque[tuple[str, str]] = deque(maxlen=MAX_ENDED)

    def note(self, record: RequestRecord) -> None:
        """Take the record of a request that has ended."""
        if record.answer_id:
            self._ended.append((record.answer_id, record.account))

    def find_account(self, answer_id: str) -> str | None:
        """Return the account of an answer; None if it is unknown."""
        return next((account for ended, account in self._ended if ended == answer_id), None)

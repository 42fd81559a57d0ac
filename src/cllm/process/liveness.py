"""Decides whether an engine process hangs."""

from __future__ import annotations

from typing import NamedTuple

from cllm.process.step_record import CurrentStep

WATCH_SECONDS = 1.0  # between checks of an engine process
# An engine with work hangs if it finishes no step within HANG_SECONDS, or HANG_FACTOR times the
# expected duration of its step if that is more. If the duration is unknown, UNKNOWN_HANG_SECONDS.
# A process that has messages to read and reads nothing within HANG_SECONDS has been stopped: its
# reader does not wait for steps.
HANG_SECONDS, HANG_FACTOR = 28.0, 10.0
UNKNOWN_HANG_SECONDS = 600.0


class Hang(NamedTuple):
    """The reason to kill an engine. ``is_stopped`` says that the whole process has stopped, which
    no request can cause.
    """

    cause: str
    is_stopped: bool


class Liveness:
    """Compares several observations of an engine process.

    A late look, after the API process or the machine was suspended, proves nothing. After each
    look, ``is_stepping`` says whether the engine has made a step since the last one, or needs none.
    """

    def __init__(self, now: float, entry: CurrentStep) -> None:
        self._looked = self._stepped_at = self._read_at = now
        self._version = entry.version
        self._num_read = 0
        self.is_stepping = True

    def look(
        self, now: float, entry: CurrentStep, num_sent: int, num_read: int, has_work: bool
    ) -> Hang | None:
        """Return why the engine hangs, or None.

        The engine was sent ``num_sent`` bytes and has read ``num_read`` of them. ``has_work``
        says whether it must make steps.
        """
        is_late, self._looked = now - self._looked > 2 * WATCH_SECONDS, now
        self.is_stepping = is_late or entry.version != self._version or not has_work
        if self.is_stepping:
            self._version, self._stepped_at = entry.version, now
        if is_late or num_read != self._num_read or num_read >= num_sent:
            self._num_read, self._read_at = num_read, now
        unread_seconds, step_seconds = now - self._read_at, now - self._stepped_at
        if unread_seconds > HANG_SECONDS:
            return Hang(f"has read no message for {unread_seconds:.0f} s", is_stopped=True)
        if step_seconds > find_longest(entry):
            cause = f"has not finished a step for {step_seconds:.0f} s"
            cause += f" ({entry.expected_seconds:.1f} s expected)"
            return Hang(cause, is_stopped=unread_seconds > HANG_SECONDS / 2)
        return None


def find_longest(entry: CurrentStep) -> float:
    """Return the seconds that the step of ``entry`` may take."""
    if entry.is_unknown:
        return UNKNOWN_HANG_SECONDS
    return max(HANG_SECONDS, HANG_FACTOR * entry.expected_seconds)

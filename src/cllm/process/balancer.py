"""Moves requests between the engines of a pool."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from cllm.core.request import Priority
from cllm.engine.commands import Withdraw, Withdrawn
from cllm.process.assignments import Assignments
from cllm.process.embeddings import InFlightEmbeddings
from cllm.process.in_flight import InFlightRequests
from cllm.process.member import Member
from cllm.process.messages import frame

BALANCE_SECONDS = 0.05  # between checks whether requests wait for the wrong engine


class Move(NamedTuple):
    """A request that ``source`` was asked to withdraw, so that ``target`` gets it."""

    source: Member
    target: Member
    priority: Priority
    num_seqs: int

    def transfer(self, sign: int) -> None:
        """Count the sequences for the target instead of the source (1), or undo that (-1)."""
        self.source.num_seqs[self.priority] -= sign * self.num_seqs
        self.target.num_seqs[self.priority] += sign * self.num_seqs


class Balancer:
    """Moves requests from engines that are not ready, and those that wait for one engine while
    another one has room. An engine withdraws a request only if it has not begun it.
    """

    def __init__(
        self,
        members: list[Member],
        assignments: Assignments,
        in_flight: InFlightRequests,
        embeddings: InFlightEmbeddings,
        clock: Callable[[], float],
    ) -> None:
        """``clock`` returns seconds."""
        self._members = members
        self._assignments = assignments
        self._in_flight = in_flight
        self._embeddings = embeddings
        self._clock = clock
        self._balanced = 0.0
        self._moves: dict[str, Move] = {}  # unanswered ones, by request id
        self._overdue: set[str] = set()  # ids of moves whose source seems to hang

    def move_all(self, member: Member) -> None:
        """Let engines that are ready continue the requests of an engine that is not.

        Requests that may have caused its death stay there.
        """
        ready = self._assignments.list_ready()
        for request_id in member.list_harmless() if ready else ():
            self._move(member, request_id, ready)

    def _move(self, source: Member, request_id: str, targets: list[Member]) -> None:
        """Let one of ``targets`` continue a request that ``source`` has forgotten."""
        source.leave(request_id)
        request = self._in_flight.find(request_id) or self._embeddings.find(request_id)
        if request is not None:
            member, booked = self._assignments.assign(request, targets)
            member.take_over(request_id, booked)

    def balance(self) -> None:
        """Move requests that wait for an engine while another one has room. Call this often."""
        now = self._clock()
        if now - self._balanced < BALANCE_SECONDS:
            return
        for request_id, move in self._moves.items():
            if request_id not in self._overdue and move.source.seems_to_hang():
                self._overdue.add(request_id)
                move.transfer(-1)  # it must not keep other requests from the target
        if any(member.stats.num_waiting for member in self._members):
            self._balanced = now
            for member in self._members:
                if member.ready:
                    self.relieve_others(member)

    def relieve_others(self, member: Member) -> None:
        """Let an engine take over requests that wait for other engines, as far as it has room."""
        others = [one for one in self._members if one is not member]
        for priority in Priority:
            for other in sorted(others, key=lambda one: -one.count_seqs(priority)):
                if not member.has_room(priority):
                    return
                responds = other.ready and not other.seems_to_hang()
                if responds and member.should_relieve(other, priority):
                    self._withdraw(other, member, priority)

    def _withdraw(self, source: Member, target: Member, priority: Priority) -> None:
        """Ask ``source`` to withdraw requests of a class for ``target``."""
        for request_id in self._in_flight.list_waiting(source.bookings, priority):
            if not (target.has_room(priority) and target.should_relieve(source, priority)):
                return
            if request_id not in self._moves and source.has(request_id):
                booked = source.bookings[request_id]
                move = Move(source, target, priority, booked.num_seqs)
                self._moves[request_id] = move
                move.transfer(1)
                source.write(frame(Withdraw(request_id)))

    def take(self, message: Withdrawn) -> None:
        """Handle an engine's answer to a request to withdraw."""
        move = self._moves.pop(message.request_id, None)
        if move is None:
            return
        if message.request_id not in self._overdue:
            move.transfer(-1)
        self._overdue.discard(message.request_id)
        if not message.done:
            self._in_flight.note_begun([message.request_id])  # do not ask for it again
        if message.done and message.request_id in move.source.bookings:
            targets = [move.target] if move.target.ready else self._assignments.list_ready()
            self._move(move.source, message.request_id, targets)

    def cancel(self, source: Member) -> None:
        """Note that an engine will not answer any more."""
        for request_id, move in [*self._moves.items()]:
            if move.source is source:
                del self._moves[request_id]
                if request_id not in self._overdue:
                    move.transfer(-1)
                self._overdue.discard(request_id)

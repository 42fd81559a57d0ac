"""Assigns requests to the engines of a pool."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

from cllm.core.request import EmbeddingRequest, Request
from cllm.engine.commands import Command
from cllm.process.member import AssignedRequest, Member
from cllm.process.messages import frame
from cllm.routing.router import Candidate, Router, RoutingRequest

# Engines are compared by the blocks of a prompt that they have received before. A block has BLOCK
# tokens, or a fifth of the tokens before it if that is more.
BLOCK = 64
SAMPLED_AFTER, SAMPLED_STRIDE = 1024, 16
ENDS = [BLOCK]
while ENDS[-1] < 10_000_000:
    ENDS.append(ENDS[-1] + max(BLOCK, ENDS[-1] // 5))


class Assignments:
    """Chooses an engine for each request, and remembers it until the request has ended.

    Of several engines, it chooses the one that has most of the prompt in its cache, unless that
    engine is crowded; see ``Router``.
    """

    def __init__(self, members: list[Member]) -> None:
        self._members = members
        self._router = Router(max_blocks=0)

    def list_ready(self) -> list[Member]:
        """Return the engines that are ready."""
        return [member for member in self._members if member.ready]

    def _list_available(self) -> list[Member]:
        """Return the ready engines that can begin a request; all ready ones if none can."""
        ready = self.list_ready()
        return [one for one in ready if not (one.is_searching or one.seems_to_hang())] or ready

    def assign(
        self, request: Request | EmbeddingRequest, members: Sequence[Member] = ()
    ) -> tuple[Member, AssignedRequest]:
        """Choose an engine for a request. Return it, and the load that is booked there.

        The candidates are ``members``; without these, the engines that are ready; else all engines.
        """
        member, booking = self._members[0], None
        if len(self._members) > 1:
            members = members or self._list_available() or self._members
            # all engines compute equally fast, so a prompt token takes equally long everywhere
            candidates = [Candidate(one.number, max(1, one.stats.num_seq_ids)) for one in members]
            booking = self._router.choose(describe(request), candidates)
            member = self._members[booking.number]
        num_seqs = 0 if isinstance(request, EmbeddingRequest) else request.params.n
        return member, AssignedRequest(booking, request.priority, num_seqs)

    def find(self, request_id: str) -> Member | None:
        """Return the engine of a request that has not ended."""
        return next((one for one in self._members if request_id in one.bookings), None)

    def tell(self, request_id: str, command: Command) -> None:
        """Send a command about a request to its engine, if it has received the request."""
        member = self.find(request_id)
        if member is not None and member.has(request_id):
            member.write(frame(command))

    def remove(self, request_id: str, *, abort: bool = False) -> None:
        """Forget a request that has ended. With ``abort``, the engine ends it first."""
        if (member := self.find(request_id)) is not None:
            (member.abort if abort else member.remove)(request_id)

    def forget_prefixes(self, member: Member) -> None:
        """Note that the cache of an engine is empty."""
        self._router.prefixes.forget(member.number)

    def measure_caches(self) -> None:
        """Set how many prefixes to remember: as many as the caches of all engines can contain."""
        num_cells = sum(one.stats.num_cells for one in self._members)
        self._router.prefixes.max_blocks = num_cells // BLOCK


def describe(request: Request | EmbeddingRequest) -> RoutingRequest:
    """Return the properties of a request that decide which engine gets it."""
    if isinstance(request, EmbeddingRequest):
        return RoutingRequest((), (), sum(map(len, request.texts)), request.account, 0)
    shared = request.prompt[: request.num_base_tokens or None]
    names, ends = name_blocks(shared, request.cache_salt)
    return RoutingRequest(names, ends, len(request.prompt), request.account, request.params.n)


def name_blocks(prompt: list[int], salt: str) -> tuple[list[int], list[int]]:
    """Return names for the beginnings of a prompt, shortest first, and their lengths.

    Far from the beginning, blocks are longer, and only some of their tokens count, so that long
    prompts take little time. The names are valid in this process only.
    """
    ends = ENDS[: bisect_left(ENDS, len(prompt))]
    ends.append(len(prompt))
    names, name, begin = [], hash(salt), 0
    for end in ends:
        stride = 1 if end <= SAMPLED_AFTER else SAMPLED_STRIDE
        name = hash((name, *prompt[begin:end:stride]))
        names.append(name)
        begin = end
    return names, ends

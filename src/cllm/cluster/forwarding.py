"""Passes one request on to a replica, and the answer back.

A request is asked for again once, on another replica if there is one, if the first one has not sent
a byte of its answer.
"""

from __future__ import annotations

import asyncio
import logging
import time
from contextlib import closing
from typing import NoReturn

from starlette.requests import Request
from starlette.types import Send

from cllm.cluster.accounts import CHARGED, Admission, NeedsTokens
from cllm.cluster.body import Fields, read_fields
from cllm.cluster.faults import write_fault
from cllm.cluster.front import UPLOADS, Front
from cllm.cluster.journey import Journey
from cllm.cluster.leases import Choice, Replica
from cllm.cluster.outcomes import CannotContinue, Moved, Refused, ReplicaLost, StreamCut
from cllm.cluster.prefixes import list_parts, make_routing_request
from cllm.cluster.relay import FRAMED, REFUSALS, SILENCE, Relay
from cllm.cluster.replay import Replay
from cllm.cluster.request_head import write_continuing_head, write_head
from cllm.cluster.stored import StoredName, find_stored
from cllm.errors import BadRequest, CLLMError, EngineError
from cllm.http_connection import Connection
from cllm.http_connection import Response as Answer
from cllm.routing.prefix_table import choose_landmarks
from cllm.routing.router import Booking, RoutingRequest
from cllm.server.body import receive_parts
from cllm.server.http.recording import find_record
from cllm.server.http.sse import HEARTBEAT, until_disconnect, wait_for_disconnect
from cllm.server.off_loop import in_thread
from cllm.server.queueing import TICKET

log = logging.getLogger("cllm.cluster")

MAX_HELD_BYTES = 512_000_000  # of all request bodies, which are held until their answers end
MAX_UPLOAD = 1 << 40  # bytes; replicas have limits of their own
LARGE = 100_000  # bytes of a body that takes longer to read than to pass to another thread
LOOK_SECONDS = 0.1  # between looks for a replica that can continue a stream
NONE_CONTINUES = "no other one can continue"
OTHERS_DIFFER = (
    "no other one has the same model and adapters and makes the same prompt of the request"
)
# Methods and paths of requests that change nothing, so that they can be sent again when their
# connection has been lost
REPEATABLE = CHARGED | {
    *("/v1/messages/count_tokens", "/v1/responses/input_tokens", "/tokenize", "/detokenize"),
    *("/apply-template", "/encode", "/decode"),
}


class Forwarding:
    """One request, from its body to the end of its answer."""

    def __init__(self, front: Front, request: Request, send: Send) -> None:
        self._front = front
        self._request = request
        self._send = send
        self._path: str = request.scope["path"]
        self._is_upload = request.method == "POST" and self._path in UPLOADS
        self._is_repeatable = request.method in ("GET", "HEAD") or self._path in REPEATABLE
        self._body = b""
        self._is_sent = not self._is_upload  # the whole body is on its way
        self._ended = asyncio.get_running_loop().create_future()  # set to end it early
        self._stored: StoredName | None = None  # what the request names
        self._landmarks: list[int] = []  # of the prompt's prefixes
        self._is_left = False  # whether the client has disconnected
        self._journey = Journey(find_record(request.scope), front.spans)

    def end(self, error: CLLMError) -> None:
        """End the request with ``error``."""
        if not self._ended.done():
            self._ended.set_result(error)

    async def run(self) -> None:
        """Answer the request. Raises CLLMError before the first byte of the answer."""
        front = self._front
        front.running.add(self.end)
        front.journeys.add(self._journey)
        front.metrics.running.inc()
        try:
            if not self._is_upload:
                await self._read_body()
            front.num_held_bytes += len(self._body)
            try:
                await self._answer()
            finally:
                self._journey.complete()
                front.num_held_bytes -= len(self._body)
        finally:
            front.running.discard(self.end)
            front.journeys.discard(self._journey)
            front.metrics.running.dec()
            self._ended.cancel()

    async def _read_body(self) -> None:
        limit = self._front.settings.server.max_body_mb * 1_000_000
        message = f"The body is larger than {limit} bytes."
        too_large = BadRequest(message, code="request_too_large", status=413)
        parts = [part async for part in receive_parts(self._request, limit, too_large)]
        self._body = parts[0] if len(parts) == 1 else b"".join(parts)
        if self._front.num_held_bytes + len(self._body) > MAX_HELD_BYTES:
            raise EngineError("Too many large requests are in progress; please retry.")

    # --- choice ----------------------------------------------------------------------------------

    async def _answer(self) -> None:
        """Ask for the account's leave, then one replica or two."""
        fields, parts = await self._read_fields()
        accounts, size = self._front.accounts, len(self._body)
        found = self._front.replicas.find(fields.find_model_name())
        model = found[0].name if found else ""  # whose usage it is
        with closing(accounts.admit(self._request, self._path, fields, size, model)) as admission:
            admission.on_end(self.end)
            await self._ask_replicas(admission, fields, parts)

    async def _read_fields(self) -> tuple[Fields, list[bytes]]:
        """Return what the body asks, and the parts of its prompt. A large body is read in another
        thread.
        """
        body = self._body

        def read() -> tuple[Fields, list[bytes]]:
            fields = read_fields(body)
            return fields, list_parts(fields)

        return (
            await until_disconnect(self._request, in_thread(read)) if len(body) > LARGE else read()
        )

    async def _ask_replicas(self, admission: Admission, fields: Fields, parts: list[bytes]) -> None:
        """Ask one replica, or two, for the answer to a prompt of ``parts``."""
        front = self._front
        name = fields.find_model_name()
        account, tenant = admission.scheduled.name, front.access.salt(admission.account, "")
        self._stored = find_stored(self._path, fields)
        home = await self._find_home(account)
        choices = front.list_choices(home, name)
        ticket = self._find_ticket()
        model = choices[0].name if choices else ""
        wanted = make_routing_request(fields, parts, model, tenant, account)
        self._landmarks = choose_landmarks(wanted.blocks)
        refusal: Refused | None = None
        failure: CLLMError | None = None
        cut: Relay | None = None
        tried: list[Replica] = []
        has_reserved = False
        record, self._journey.received = self._journey.record, admission.received
        record.account, record.model = account, model
        record.priority = admission.scheduled.choose_priority(None).name.lower()
        record.submitted = time.monotonic() if self._path in CHARGED else None
        while len(tried) < 2:
            booking = self._choose(choices, wanted, ticket, tried, refusal)
            if booking is None:
                break
            replica = front.replicas.by_number[booking.number]
            try:
                with self._journey.ask(replica.name):
                    await self._ask(replica, admission, booking)
                return
            except Moved as error:
                if (home := await self._find_moved()) is None:
                    await error.relay.pass_on()
                    return
            except NeedsTokens as error:
                if has_reserved:
                    raise ReplicaLost("A replica does not accept the reserved tokens.") from error
                has_reserved = True
                admission.reserve(error.num_tokens)
            except StreamCut as error:
                cut = error.relay
            except Refused as again:
                front.metrics.retries.labels("refused").inc()
                refusal = min(refusal or again, again, key=lambda one: one.retry_after)
                tried.append(replica)
            except ReplicaLost as error:
                front.metrics.retries.labels("lost").inc()
                failure = error
                tried.append(replica)
            finally:
                booking.release()
            if cut is not None:
                await self._continue(cut, admission, wanted, name)
                return
            choices = front.list_choices(home, name)  # replicas may have come, gone or changed
        if refusal is not None:
            await refusal.relay.pass_on()
            return
        raise failure or EngineError("No replica can answer the request now.")

    async def _find_home(self, account: str) -> Replica | None:
        """Return the replica that must answer the request, None if any may. Raises what
        ``Front.find_home`` raises.
        """
        stored = self._stored
        if stored is not None and stored.is_item and (home := await self._find_moved()) is not None:
            return home
        try:
            return self._front.find_home(self._request, stored, account)
        except CLLMError:
            if (home := await self._find_moved()) is None:
                raise
            return home

    async def _find_moved(self) -> Replica | None:
        """Return the replica that stores a response although its id names another one. It is looked
        for only once.
        """
        stored, self._stored = self._stored, None
        if stored is None or not stored.may_move:
            return None
        return await self._front.gatherer.find_response(self._request, stored)

    def _choose(
        self,
        choices: list[Choice],
        wanted: RoutingRequest,
        ticket: str,
        tried: list[Replica],
        refusal: Refused | None,
    ) -> Booking | None:
        """Book the request on a replica; return None if there is none for a further attempt."""
        usable = choices
        if tried:
            usable = [one for one in choices if one.replica.is_listed and one.replica not in tried]
        if ticket:
            usable = [one for one in usable if one.replica.name == ticket] or usable
        if refusal is not None and refusal.is_full:
            limit = refusal.retry_after
            usable = [one for one in usable if one.waiting_seconds < limit]
        elif not usable and refusal is None:  # the only replica has lost the connection
            usable = [one for one in choices if one.replica.is_listed]
        if not usable:
            return None
        return self._front.router.choose(wanted, [one.candidate for one in usable])

    def _find_ticket(self) -> str:
        """Return the name of the replica that has reserved a place for the request."""
        return self._request.headers.get(TICKET, "").rpartition(".")[0]

    # --- one attempt -----------------------------------------------------------------------------

    async def _ask(self, replica: Replica, admission: Admission, booking: Booking) -> None:
        """Pass the answer of a replica on. Raises Refused or NeedsTokens, ReplicaLost if nothing
        has been sent to the client and another replica may be asked, and StreamCut if another one
        may continue.
        """
        connection = await self._connect(replica)
        relay = Relay(
            connection,
            replica.name,
            self._request.scope,
            self._send,
            self._front.replay_memory,
            admission.received,
        )
        self._journey.relay = relay
        relay.on_tokens = self._journey.record.note_delivery
        relay.on_first = booking.finish_prompt
        is_cut = False
        try:
            size = None if self._is_upload else len(self._body)
            key, carried = self._write_credentials(replica, admission)
            trace = self._journey.traceparent
            head = write_head(replica, self._request, self._path, key, carried, trace, size)
            await self._exchange(replica, admission, relay, connection, head + self._body)
        except StreamCut:
            is_cut = True  # the relay is still needed
            raise
        finally:
            if not is_cut:
                await relay.close()

    async def _connect(self, replica: Replica) -> Connection:
        """Return a connection to a replica. Raises ReplicaLost."""
        try:
            async with asyncio.timeout(self._front.settings.cluster.lease_seconds):
                return await replica.client.take(is_new=not self._is_repeatable)
        except OSError as error:  # also a TimeoutError
            self._front.replicas.lose(replica, str(error) or "it does not answer")
            replica.wake.set()
            raise ReplicaLost("The replica cannot be reached.") from error

    async def _exchange(
        self,
        replica: Replica,
        admission: Admission,
        relay: Relay,
        connection: Connection,
        data: bytes,
    ) -> None:
        """Send ``data`` to a replica, and let ``relay`` pass its answer on."""
        answering = asyncio.ensure_future(connection.exchange(data, relay.feed, relay.begin))
        self._journey.note_sent()
        watching = asyncio.ensure_future(self._watch(connection))
        replica.running.add(connection)
        try:
            await asyncio.wait(
                {answering, watching, self._ended}, return_when=asyncio.FIRST_COMPLETED
            )
            if answering.done():
                await self._finish(replica, admission, relay, answering)
            elif self._ended.done():
                await self._fail(relay, self._ended.result())
            elif watching.done():
                watching.result()  # raises the error of the body, if there is one
        finally:
            replica.running.discard(connection)
            for task in (answering, watching):
                task.cancel()
            await asyncio.gather(answering, watching, return_exceptions=True)
            if not self._is_sent:
                connection.close()
            replica.client.release(connection)

    # --- a stream that was cut -------------------------------------------------------------------

    async def _continue(
        self,
        relay: Relay,
        admission: Admission,
        wanted: RoutingRequest,
        model: str | None,
    ) -> None:
        """Let other replicas with the same model continue a stream; in the meantime, the client
        gets bytes that it skips. If there is none, end it with an error.
        """
        front, replay = self._front, relay.replay
        assert replay is not None
        clock, seconds = asyncio.get_running_loop().time, front.settings.cluster.continue_seconds
        until = clock() + seconds
        beat = clock()
        why = NONE_CONTINUES
        try:
            while replay.can_continue:
                if clock() >= beat:
                    relay.break_silence()
                    beat = clock() + HEARTBEAT
                choices = front.replicas.find(model)
                usable = [one for one in choices if replay.may_try(one.replica)]
                booking = self._choose(usable, wanted, "", [], None)
                if booking is None:
                    if clock() >= until or not await self._wait(relay):
                        break
                    continue
                replica = front.replicas.by_number[booking.number]
                try:
                    relay.on_first = booking.finish_prompt
                    with self._journey.ask(replica.name, continues=True):
                        await self._ask_for_rest(replica, admission, relay, replay)
                    return
                except StreamCut:
                    until = clock() + seconds
                except CannotContinue:
                    why = OTHERS_DIFFER
                    replay.note_refusal(replica)
                except ReplicaLost:  # it may be able to do it later
                    if clock() >= until or not await self._wait(relay):
                        break
                finally:
                    booking.release()
            if replay.ending is not None and replay.fault and not self._is_left:
                admission.note_ending(replay.ending)
                await relay.end_with(replay.fault)
            elif not self._is_left:
                text = f"The replica that computed this answer has ended, and {why}; please retry."
                await self._fail(relay, ReplicaLost(text))
        finally:
            await relay.close()

    async def _wait(self, relay: Relay) -> bool:
        """Wait a moment for a replica. Return False if the request has ended meanwhile."""
        watching = asyncio.ensure_future(wait_for_disconnect(self._request.receive))
        try:
            await asyncio.wait(
                {watching, self._ended}, timeout=LOOK_SECONDS, return_when=asyncio.FIRST_COMPLETED
            )
            self._is_left = watching.done()
            if self._ended.done():
                await self._fail(relay, self._ended.result())
                self._is_left = True
        finally:
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)
        return not self._is_left

    async def _ask_for_rest(
        self, replica: Replica, admission: Admission, relay: Relay, replay: Replay
    ) -> None:
        """Pass on the rest of a stream. Raises StreamCut if this replica ends in turn,
        CannotContinue, and ReplicaLost if it cannot continue now.
        """
        connection = await self._connect(replica)
        scope = self._request.scope
        content_type = self._request.headers.get("content-type", "")
        body = replay.make_body(self._path, scope["query_string"], content_type, self._body)
        key, carried = self._write_credentials(replica, admission)
        trace = self._journey.traceparent
        head = write_continuing_head(replica, self._request, key, carried, trace, len(body))
        self._front.metrics.continued.inc()
        relay.continue_with(connection)
        await self._exchange(replica, admission, relay, connection, head + body)

    # --- one request to a replica ----------------------------------------------------------------

    def _write_credentials(self, replica: Replica, admission: Admission) -> tuple[str, str]:
        """Return the cluster key, and the field that carries the account for a new attempt."""
        key = self._front.access.cluster_key.find()
        return key, admission.encode(replica.name, self._landmarks)

    async def _watch(self, connection: Connection) -> None:
        """Send the rest of the body, and return when the client has disconnected."""
        if self._is_upload:
            is_chunked = "content-length" not in self._request.headers
            too_large = BadRequest("The body is too large.", status=413)
            async for part in receive_parts(self._request, MAX_UPLOAD, too_large):
                if part:
                    await connection.write(
                        b"%x\r\n%s\r\n" % (len(part), part) if is_chunked else part
                    )
            if is_chunked:
                await connection.write(b"0\r\n\r\n")
            self._is_sent = True
        await wait_for_disconnect(self._request.receive)

    async def _finish(
        self,
        replica: Replica,
        admission: Admission,
        relay: Relay,
        answering: asyncio.Future[Answer],
    ) -> None:
        """Pass on the end of the answer, or what has become of it."""
        error, replay = answering.exception(), relay.replay
        if replay is not None and replay.ending is not None and replay.is_complete:
            admission.note_ending(replay.ending)
            error = None
        elif replay is not None and (error is None or isinstance(error, OSError)):
            if relay.has_started:
                self._lose(replica, relay, replay, is_lost=error is not None)
            error = error or ConnectionError("a stream without a beginning")
        if error is None:
            admission.end(relay.response.headers, is_stream=relay.kind in SILENCE)
            if relay.is_refusal and not self._is_upload:
                raise Refused(relay)
            if relay.response.status == 404 and not relay.has_started and self._stored is not None:
                raise Moved(relay)
            await relay.pass_on()
            return
        if not isinstance(error, OSError):
            raise error
        replica.wake.set()  # to find out at once whether it has died
        if not relay.has_started:
            if self._is_repeatable:
                raise ReplicaLost("The replica has ended.") from error
            message = (
                "The replica has ended before it has answered. It may have done what was asked."
            )
            raise BadRequest(message, code="replica_lost", status=502)
        await self._fail(relay, ReplicaLost("The replica has ended."))

    def _lose(self, replica: Replica, relay: Relay, replay: Replay, *, is_lost: bool) -> NoReturn:
        """Raise StreamCut, because a replica has ended a stream that is not complete; or, if it has
        refused to continue, CannotContinue, or ReplicaLost if it may be able to do it later.
        ``is_lost`` says that the connection was lost.
        """
        rest = relay.rest
        relay.detach()
        if is_lost:
            replica.wake.set()  # to find out at once whether it has died
        elif rest is not None and FRAMED not in rest.headers:
            is_busy = rest.status in REFUSALS
            raise (ReplicaLost if is_busy else CannotContinue)("The replica does not continue.")
        replay.lose(replica)
        raise StreamCut(relay)

    async def _fail(self, relay: Relay, error: CLLMError) -> None:
        """End the answer with ``error``. Raises it if the answer has not begun."""
        if not relay.has_started:
            raise error
        self._front.metrics.cut.inc()
        record = self._journey.record
        record.outcome, record.error_code = "error", getattr(error, "code", "replica_lost")
        if relay.kind in SILENCE:
            await relay.end_with(write_fault(self._request, error))
        # other answers end without their last bytes, so the client sees that they are cut

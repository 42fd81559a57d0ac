"""What becomes of a request that a replica was asked and did not answer to its end.

``event`` says it in a sentence whose subject is the replica.
"""

from __future__ import annotations

from typing import ClassVar

from cllm.cluster.relay import Relay
from cllm.errors import EngineError
from cllm.server.queueing import TICKET


class ReplicaLost(EngineError):
    """The replica that answered a request has ended or cannot be reached."""

    event: ClassVar[str] = "did not begin to answer"


class CannotContinue(ReplicaLost):
    """A replica can never continue the stream: it has another model, or makes another prompt."""

    event = "cannot continue it"


class StreamCut(Exception):
    """A replica has ended in the middle of a stream; ``relay`` has what the client has got."""

    event = "ended in the middle of its answer"

    def __init__(self, relay: Relay) -> None:
        super().__init__()
        self.relay = relay


class Refused(Exception):
    """A replica has refused a request; ``relay`` has its answer."""

    event = "refused it"

    def __init__(self, relay: Relay) -> None:
        super().__init__()
        self.relay = relay

    @property
    def is_full(self) -> bool:
        """Whether the replica's queue is full. In Ollama's dialect, that has the status 503 too."""
        response = self.relay.response
        return response.status != 503 or TICKET.encode() in response.headers

    @property
    def retry_after(self) -> float:
        """Seconds after which the client may retry."""
        value = self.relay.response.headers.get(b"retry-after", b"")
        return float(value) if value.isdigit() else 1.0


class Moved(Exception):
    """A replica does not have what names it in its id; ``relay`` has its answer."""

    event = "does not have what the request names"

    def __init__(self, relay: Relay) -> None:
        super().__init__()
        self.relay = relay

"""Runs Ray's head, and answers the commands of ``cllm cluster`` and of the front.

``main`` runs in a process of its own, because Ray may end its process.
"""

from __future__ import annotations

import json
import logging
import os
import socketserver
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import ray
from ray import serve

from cllm.cluster.control import FOREVER, SOCKET
from cllm.cluster.ray.deployment import deploy
from cllm.cluster.ray.registry import NAMESPACE, RAY_SECONDS, get_registry
from cllm.cluster.ray.replica import EXTRA_SECONDS, Spec

log = logging.getLogger("cllm.cluster")


class Head:
    """Answers the commands of ``cllm cluster`` and of the front."""

    def __init__(self, spec: Spec) -> None:
        self._spec = spec
        self._registry = get_registry()
        self._known: dict[str, Any] = {"replicas": [], "state": "starting"}
        self._changing = threading.Lock()
        self.down = threading.Event()
        self.has_failed = False  # set if the first replicas could not be started

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """Return the answer to a command; raise RuntimeError if it fails."""
        match request["command"]:
            case "status":
                return self.status()
            case "scale":
                self.change(least=request["least"], most=request["most"])
            case "upgrade":
                self.upgrade(request["settings"])
            case "drain":
                name = request["replica"]
                if not ray.get(self._registry.drain.remote(name), timeout=RAY_SECONDS):
                    raise RuntimeError(f"no replica has the name {name}")
            case "down":
                self.down.set()
            case other:
                raise RuntimeError(f"unknown command {other!r}")
        return {}

    def change(self, **changes: Any) -> None:
        """Deploy the spec with changes."""
        with self._changing:
            self._deploy(msgspec.structs.replace(self._spec, **changes))

    def upgrade(self, given: dict[str, Any]) -> None:
        """Replace all replicas. The settings ``given`` change, all others stay. If the new
        replicas cannot be started, the old ones stay.
        """
        with self._changing:
            before = self._spec
            spec = msgspec.structs.replace(
                before,
                settings=before.settings | given,
                generation=before.generation + 1,
                drain_timeout=given.get("server.drain_timeout", before.drain_timeout),
            )
            try:
                self._deploy(spec)
            except Exception:
                deploy(before)
                raise

    def _deploy(self, spec: Spec) -> None:
        deploy(spec)
        self._spec = spec

    def status(self) -> dict[str, Any]:
        """Return the replicas, machines and the state; the last known ones if Ray does not
        answer.
        """
        try:
            replicas = ray.get(self._registry.list.remote(), timeout=RAY_SECONDS)
            self._known = {
                "state": "changing" if self._changing.locked() else "running",
                "least": self._spec.least,
                "most": self._spec.most,
                "generation": self._spec.generation,
                "address": ray.get_runtime_context().gcs_address,
                "replicas": sorted(replicas, key=lambda one: one["url"]),
            }
        except Exception as error:  # noqa: BLE001  Ray has many
            log.warning("Ray does not answer: %s", error)
            self._known["state"] = "Ray does not answer"
        return self._known


def listen(head: Head, folder: Path) -> socketserver.ThreadingUnixStreamServer:
    """Return a running server of the control socket."""

    class Handler(socketserver.StreamRequestHandler):
        def handle(self) -> None:
            try:
                answer = head.answer(json.loads(self.rfile.readline()))
            except Exception as error:  # noqa: BLE001  the command prints it
                answer = {"error": " ".join(str(error).split())[:500]}
            self.wfile.write(json.dumps(answer).encode() + b"\n")

    server = socketserver.ThreadingUnixStreamServer(str(folder / SOCKET), Handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server


def start_ray(spec: Spec, folder: Path) -> None:
    """Start Ray's head on this machine. ``make_environment`` has set this process's environment."""
    if spec.port:
        os.environ["RAY_GCS_SERVER_PORT"] = str(spec.port)
    ray.init(
        address="local",
        namespace=NAMESPACE,
        include_dashboard=False,
        object_store_memory=100 * 2**20,  # replicas do not use it
        log_to_driver=False,
        logging_level=logging.ERROR,
        _node_ip_address=spec.address,
        _temp_dir=str(folder),
    )
    logging.getLogger("ray.serve").setLevel(logging.ERROR)
    serve.start(proxy_location="Disabled")


def call_within(seconds: float, function: Callable[[], object]) -> bool:
    """Call a function of Ray, which may wait forever. Return whether it has returned in time."""
    thread = threading.Thread(target=function, daemon=True)
    thread.start()
    thread.join(seconds)
    return not thread.is_alive()


def main() -> None:
    """Run the cluster until stdin ends. The arguments are the private folder and a Spec as JSON."""
    folder, spec = Path(sys.argv[1]), msgspec.json.decode(sys.argv[2], type=Spec)
    start_ray(spec, folder)
    head = Head(spec)
    server = listen(head, folder)

    def wait_for_end() -> None:
        while os.read(0, 4096):
            pass
        head.down.set()

    def begin() -> None:
        try:
            head.change()
        except Exception as error:  # noqa: BLE001  of a replica or of Ray
            log.error("%s", error)
            head.has_failed = True
            head.down.set()

    threading.Thread(target=wait_for_end, daemon=True).start()
    threading.Thread(target=begin, daemon=True).start()
    while not head.down.wait(FOREVER):
        pass
    if call_within(RAY_SECONDS, ray.nodes):  # else the replicas drain when this process has ended
        call_within(spec.drain_timeout + 2 * EXTRA_SECONDS, serve.shutdown)
    server.shutdown()
    call_within(RAY_SECONDS, ray.shutdown)
    logging.shutdown()
    os._exit(2 if head.has_failed else 0)  # threads may still wait for Ray

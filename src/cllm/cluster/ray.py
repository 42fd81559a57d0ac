"""Places replicas with Ray Serve: each one is an actor that owns a ``cllm serve`` process.

No request passes through Ray. This is the only module that imports Ray, the extra ``cluster``.
``main`` runs in a process of its own, because Ray may end its process.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import re
import socketserver
import subprocess
import sys
import threading
import time
import urllib.request
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import ray
from ray import serve
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy

from cllm.cluster.control import FOREVER, SOCKET
from cllm.config.sources import set_value
from cllm.routing.autoscale import ReplicaLoad, ScalingLimits, ScalingState, scale
from cllm.server.cluster.key import KEY_HEADER
from cllm.server.cluster.lease import LEASE_PATH, Lease

APP = "cllm"
NAMESPACE = "cllm"
REGISTRY = "replicas"  # the name of its actor
BEAT_SECONDS = 1.0
EXPIRY_SECONDS = 10.0  # without a heartbeat, after which the registry forgets a replica
LEAVE_SECONDS = 1.5  # for fronts to stop choosing a replica that will drain
LEASE_TIMEOUT = 5.0
EXTRA_SECONDS = 15.0  # that Ray Serve waits for a replica in addition to its drain timeout
RAY_SECONDS = 5.0  # for an answer of one of Ray's actors

log = logging.getLogger("cllm.cluster")


class Spec(msgspec.Struct, kw_only=True):
    """What a cluster runs.

    ``settings`` has the settings of replicas that are given, by their keys. ``folder`` (on each
    machine) has their storage folders. There are ``least`` to ``most`` replicas, each with ``gpus``
    GPUs. Another ``generation`` replaces all replicas. ``address`` and ``port`` are those of Ray's
    head; port 0 chooses a free one. ``limits`` are further ones of ScalingLimits.
    """

    settings: dict[str, Any]
    folder: str
    address: str
    port: int = 0
    least: int = 1
    most: int = 1
    gpus: float = 0
    generation: int = 0
    drain_timeout: float = 30.0
    limits: dict[str, float] = {}


class Registry:
    """An actor that knows the replicas. They tell it each second where they are, so a new registry
    soon knows them too.
    """

    def __init__(self) -> None:
        self._entries: dict[str, tuple[float, dict[str, Any]]] = {}
        self._to_drain: set[str] = set()

    def tell(self, entry: dict[str, Any]) -> bool:
        """Take the entry of a replica. Return whether the replica should drain."""
        self._entries[entry["name"]] = time.monotonic(), entry
        return entry["name"] in self._to_drain

    def leave(self, name: str) -> None:
        """Forget a replica."""
        self._entries.pop(name, None)
        self._to_drain.discard(name)

    def drain(self, name: str) -> bool:
        """Ask a replica to drain. Return whether it is known."""
        if name not in self._entries:
            return False
        self._to_drain.add(name)
        return True

    def list(self) -> list[dict[str, Any]]:
        """Return the entries of all replicas."""
        now = time.monotonic()
        for name, (heard, _) in [*self._entries.items()]:
            if now - heard > EXPIRY_SECONDS:
                self.leave(name)
        return [entry for _, entry in self._entries.values()]


def get_registry() -> Any:
    """Return the handle of the registry, which is created if there is none."""
    actor = ray.remote(Registry).options(
        name=REGISTRY,
        namespace=NAMESPACE,
        lifetime="detached",
        get_if_exists=True,
        num_cpus=0,
        max_restarts=-1,
    )
    return actor.remote()


class ReplicaProcess:
    """A replica: the actor of Ray Serve that owns a ``cllm serve`` process.

    The process reads the end of its stdin when the actor dies, and drains.
    """

    def __init__(self, content: str) -> None:
        """Start the process and wait until it is ready. ``content`` is a Spec. Raises RuntimeError
        with the last line of its log if it ends.
        """
        spec = msgspec.json.decode(content, type=Spec)
        self._drain_timeout = spec.drain_timeout
        self._generation = spec.generation
        self._host = ray.util.get_node_ip_address()
        self._registry = get_registry()
        self._process, self._url = self._start(spec)
        try:
            while (lease := self._pull()) is None or lease.status != "ready":
                if self._process.poll() is not None:
                    raise RuntimeError(self._explain_end())
                time.sleep(0.1)
        except BaseException:
            self._process.kill()
            raise
        self._lease = lease
        self._is_leaving = False
        self._tell()
        threading.Thread(target=self._beat, daemon=True).start()

    def _start(self, spec: Spec) -> tuple[subprocess.Popen[str], str]:
        folder, lock = take_folder(Path(spec.folder).expanduser())
        config = folder / "settings.yaml"
        tree: dict[str, Any] = {}
        for key, value in spec.settings.items():
            set_value(tree, key, value)
        config.write_text(json.dumps(tree))  # which is YAML too
        dropped = ("RAY_", "PYTHON", "CLLM_", "OMP_NUM_THREADS")  # Ray sets the last one
        variables = {name: v for name, v in os.environ.items() if not name.startswith(dropped)}
        variables["CLLM_CLUSTER_KEY"] = os.environ["CLLM_CLUSTER_KEY"]
        flags = ["--host", self._host, "--port", "0", "--storage.folder", str(folder / "state")]
        flags += ["--until-stdin-ends"]
        process = subprocess.Popen(
            [sys.executable, "-m", "cllm", "serve", "--config", str(config), *flags],
            stdin=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=variables,
            pass_fds=[lock],  # the folder stays taken while the process drains
            start_new_session=True,  # signals for Ray's processes are not for it
        )
        os.close(lock)
        self._tail: deque[str] = deque(maxlen=20)
        found: list[str] = []
        is_found = threading.Event()

        def read() -> None:
            assert process.stderr is not None
            with (folder / "log").open("a") as copy:
                for line in process.stderr:
                    self._tail.append(line)
                    copy.write(line)
                    copy.flush()
                    if not found and (match := re.match(r"cLLM serves .* at (http\S+): ", line)):
                        found.append(match[1])
                        is_found.set()
            is_found.set()

        threading.Thread(target=read, daemon=True).start()
        is_found.wait()
        if not found:
            process.wait()
            raise RuntimeError(self._explain_end())
        return process, found[0]

    def _explain_end(self) -> str:
        lines = [line.strip() for line in self._tail if line.strip()]
        return f"the replica ended: {lines[-1] if lines else 'without a message'}"

    def _pull(self) -> Lease | None:
        """Return its lease, None if it does not answer."""
        headers = {KEY_HEADER: os.environ["CLLM_CLUSTER_KEY"]}
        request = urllib.request.Request(self._url + LEASE_PATH, headers=headers)  # noqa: S310
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        try:
            with opener.open(request, timeout=LEASE_TIMEOUT) as answer:
                return msgspec.json.decode(answer.read(), type=Lease)
        except (OSError, msgspec.DecodeError):
            return None

    def _tell(self) -> bool:
        entry = {
            "name": self._lease.name,
            "url": self._url,
            "status": "draining" if self._is_leaving else self._lease.status,
            "version": self._lease.version,
            "generation": self._generation,
            "gpus": os.environ.get("CUDA_VISIBLE_DEVICES", ""),
            "pid": self._process.pid,
        }
        return bool(ray.get(self._registry.tell.remote(entry), timeout=RAY_SECONDS))

    def _beat(self) -> None:
        """Tell the registry each second, and drain when it says so."""
        while self._process.poll() is None and not self._is_leaving:
            time.sleep(BEAT_SECONDS)
            self._lease = self._pull() or self._lease
            try:
                if self._tell():
                    self._drain()
            except Exception as error:  # noqa: BLE001  it may be restarted; Ray has many errors
                log.warning("the registry does not answer: %s", error)

    def _drain(self) -> None:
        """Let the fronts choose other replicas, then end the process when its requests have
        ended.
        """
        if not self._is_leaving:
            self._is_leaving = True
            try:
                self._tell()
            except Exception as error:  # noqa: BLE001  the fronts retry
                log.warning("the registry does not answer: %s", error)
            time.sleep(LEAVE_SECONDS)
            assert self._process.stdin is not None
            self._process.stdin.close()
        try:
            self._process.wait(self._drain_timeout + EXTRA_SECONDS / 2)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._registry.leave.remote(self._lease.name)

    def check_health(self) -> None:
        """Raise RuntimeError if the process has ended or does not answer."""
        if self._process.poll() is not None:
            raise RuntimeError(self._explain_end())
        if not self._is_leaving and self._pull() is None:
            raise RuntimeError("the replica does not answer")

    def record_autoscaling_stats(self) -> dict[str, float]:
        """Return the load of the replica over all its models, for ScalingRule."""
        models = self._lease.models
        return {
            "num_running": float(sum(one.num_running for one in models)),
            "max_num_seqs": float(sum(one.max_num_seqs for one in models)),
            "waiting_seconds": max((one.waiting_seconds for one in models), default=0.0),
        }

    def __del__(self) -> None:
        """Drain, when Ray Serve stops this replica."""
        if hasattr(self, "_lease"):
            self._drain()


def take_folder(parent: Path) -> tuple[Path, int]:
    """Return the first folder for a replica that no other one uses, and its locked file."""
    number = 0
    while True:
        folder = parent / f"replica{number}"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        file = os.open(folder / "taken", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(file)
            number += 1
        else:
            return folder, file


class ScalingRule:
    """The policy that Ray Serve asks for the number of replicas."""

    def __init__(self, **limits: float) -> None:
        self._limits = msgspec.convert(limits, ScalingLimits, strict=False)

    def __call__(self, context: Any) -> tuple[int, dict[str, Any]]:
        """Return the number and the state for the next call."""
        metrics = context.aggregated_metrics or {}
        ready = [
            ReplicaLoad(
                round(running),
                max(1, round(metrics["max_num_seqs"].get(replica, 1))),
                metrics["waiting_seconds"].get(replica, 0.0),
            )
            for replica, running in metrics.get("num_running", {}).items()
            if replica in context.running_replicas
        ]
        state = msgspec.convert(context.policy_state or {}, ScalingState)
        num_starting = max(0, context.target_num_replicas - len(ready))
        wanted, state = scale(ready, num_starting, self._limits, state, time.time())
        return wanted, msgspec.to_builtins(state)


def deploy(spec: Spec) -> None:
    """Make Ray Serve run the replicas of ``spec``, and wait until they are ready. Raises
    RuntimeError if they cannot be.

    Number and limits may change without restarts. Otherwise new replicas replace the old ones: a
    new one is ready before an old one drains, if there is room for it.
    """
    limits = {**spec.limits, "min_replicas": spec.least, "max_replicas": spec.most}
    # for a fixed number too: a replica tells its load only if it was started with this
    scaling = AutoscalingConfig(
        min_replicas=spec.least,
        max_replicas=spec.most,
        metrics_interval_s=1.0,
        look_back_period_s=2.0,
        upscale_delay_s=0.0,  # ScalingRule has its own delays
        downscale_delay_s=0.0,
        policy=AutoscalingPolicy(policy_function=ScalingRule, policy_kwargs=limits),
    )
    deployment = serve.deployment(
        name="engine",
        ray_actor_options={"num_cpus": 0, "num_gpus": spec.gpus},
        health_check_period_s=1.0,
        health_check_timeout_s=4 * LEASE_TIMEOUT,
        graceful_shutdown_timeout_s=spec.drain_timeout + EXTRA_SECONDS,
        graceful_shutdown_wait_loop_s=0.1,
        max_constructor_retry_count=3,
        rolling_update_percentage=0.34,
        max_surge_percent=100,
        autoscaling_config=scaling,
    )(ReplicaProcess)
    # what does not need another process is not part of the arguments
    fixed = msgspec.structs.replace(spec, least=1, most=1, limits={})
    # without a version, any change would replace all replicas; Ray Serve has no public option
    deployment = deployment.options(version=str(spec.generation), _internal=True)
    app = deployment.bind(msgspec.json.encode(fixed).decode())
    try:
        serve.run(app, name=APP, route_prefix=None)
    except RuntimeError as error:  # it does not always say why
        deployments = serve.status().applications[APP].deployments.values()
        texts = [str(error), *(one.message for one in deployments)]
        found = re.search(r"the replica ended: .*", "\n".join(texts))
        raise RuntimeError(found[0] if found else texts[0]) from error


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
    os._exit(2 if head.has_failed else 0)  # threads may still wait for Ray

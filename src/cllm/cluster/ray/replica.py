"""A replica: an actor of Ray Serve, and the ``cllm serve`` process that it owns."""

from __future__ import annotations

import fcntl
import json
import logging
import os
import re
import subprocess
import sys
import threading
import time
import urllib.request
from collections import deque
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import ray

from cllm.cluster.ray.log_file import LogFile
from cllm.cluster.ray.registry import RAY_SECONDS, get_registry
from cllm.config.sources import set_value
from cllm.server.cluster.key import KEY_HEADER
from cllm.server.cluster.lease import LEASE_PATH, Lease

BEAT_SECONDS = 1.0
LEAVE_SECONDS = 1.5  # for fronts to stop choosing a replica that will drain
LEASE_TIMEOUT = 5.0
EXTRA_SECONDS = 15.0  # that Ray Serve waits for a replica in addition to its drain timeout

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
            encoding="utf-8",
            errors="replace",
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
            copy = LogFile(folder / "log")
            for line in process.stderr:
                self._tail.append(line)
                copy.write(line)
                if not found and (match := re.match(r"cLLM serves .* at (http\S+): ", line)):
                    found.append(match[1])
                    is_found.set()
            is_found.set()
            with suppress(OSError):
                copy.close()

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

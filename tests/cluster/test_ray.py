"""``cllm cluster serve``: replicas that Ray Serve places. One cluster for all tests of this file."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from pathlib import Path
from typing import Self

import pytest
from conftest import PATIENCE
from server.conftest import Server

pytest.importorskip("ray", reason="the extra cluster is not installed")
pytestmark = [pytest.mark.ray, pytest.mark.slow]

FAKE = ["--backend.name", "fake", "--context", "4096"]


class RayCluster(Server):
    """A running ``cllm cluster serve``."""

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run a command of ``cllm cluster`` for this cluster."""
        own = {
            "CLLM_STORAGE_FOLDER": str(self.keys.parent / "state"),
            "CLLM_SERVER_KEYS_FILE": str(self.keys),
        }
        return subprocess.run(
            [sys.executable, "-m", "cllm", "cluster", *arguments],
            env={**os.environ, **own},
            capture_output=True,
            text=True,
            check=False,
        )

    def status(self) -> dict:
        done = self.run("status", "--json")
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    def wait_for(self, number: int, but: tuple[str, ...] = ()) -> list[dict]:
        """Return the replicas once the front passes requests to ``number``, and none of ``but``."""
        end = time.monotonic() + PATIENCE
        while "is starting;" in self.run("status").stderr and time.monotonic() < end:
            time.sleep(0.5)
        while time.monotonic() < end:
            assert self.process.poll() is None, self.log
            replicas = self.status()["replicas"]
            ready = [one for one in replicas if one["status"] == "ready"]
            is_done = len(ready) == number == self.count_listed()
            if is_done and not {one["url"] for one in ready} & {*but}:
                return ready
            time.sleep(0.3)
        raise TimeoutError(self.log)

    def count_listed(self) -> int:
        """Return how many replicas the front passes requests to."""
        text = self.client.get("/metrics").text
        found = re.search(r'^cllm:front_replicas\{state="listed"\} (\d+)', text, re.MULTILINE)
        assert found, text
        return int(found[1])


class Load:
    """Clients that send requests, streams and others, until the end of a ``with`` block."""

    def __init__(self, url: str, num_clients: int = 6) -> None:
        self._url = url
        self.num_ended = 0
        self.failures: list[str] = []
        self._is_ending = threading.Event()
        self._threads = [threading.Thread(target=self._ask, args=(n,)) for n in range(num_clients)]

    def _ask(self, number: int) -> None:
        count = 0
        while not self._is_ending.is_set():
            count += 1
            message = {"role": "user", "content": f"client {number}, request {count}"}
            body = {"messages": [message], "max_tokens": 20, "stream": number % 2 == 0}
            request = urllib.request.Request(
                f"{self._url}/v1/chat/completions",
                json.dumps(body).encode(),
                {"content-type": "application/json"},
            )
            try:
                with urllib.request.urlopen(request, timeout=PATIENCE) as answer:
                    text = answer.read().decode()
                is_whole = text.rstrip().endswith("[DONE]") if number % 2 == 0 else "usage" in text
                if not is_whole or '"error"' in text:
                    self.failures.append(text[-300:])
            except OSError as error:
                self.failures.append(repr(error))
            self.num_ended += 1
            time.sleep(0.02)

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._is_ending.set()
        for thread in self._threads:
            thread.join()
        assert self.failures == []
        assert self.num_ended > 0


def processes(word: str) -> list[str]:
    """Return the commands of all processes that contain ``word``."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            command = path.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if word in command:
            found.append(command)
    return found


@pytest.fixture(scope="module")
def ray_cluster():
    """A cluster of one replica; nothing may be left of it."""
    arguments = ["--replicas", "1", *FAKE, "--server.drain-timeout", "10"]
    cluster = RayCluster(*arguments, command=("cluster", "serve"))
    try:
        cluster.wait_for(1)
        folder = (cluster.keys.parent / "state" / "ray_folder").read_text()
        yield cluster
    finally:
        code = cluster.stop(timeout=120)
    assert code == 0, cluster.log
    assert not Path(folder).exists()
    end = time.monotonic() + PATIENCE
    while (left := processes(folder) + processes(str(cluster.keys.parent))) and (
        time.monotonic() < end
    ):
        time.sleep(0.2)  # without the head, replicas drain on their own
    assert left == []
    cluster.forget()


def test_scaling_up_and_down_fails_no_request(ray_cluster):
    with Load(ray_cluster.url):
        assert ray_cluster.run("scale", "3").returncode == 0
        ray_cluster.wait_for(3)
        assert ray_cluster.run("scale", "1").returncode == 0
        ray_cluster.wait_for(1)


def test_rolling_upgrade_fails_no_request(ray_cluster):
    (before,) = ray_cluster.wait_for(1)
    with Load(ray_cluster.url):
        assert ray_cluster.run("upgrade").returncode == 0
        (after,) = ray_cluster.wait_for(1, but=(before["url"],))
    assert after["generation"] == before["generation"] + 1


def test_ray_asks_for_its_token_wherever_it_listens_beyond_loopback(ray_cluster):
    """All sockets are on loopback, but for one of each actor of Ray Serve, which has no setting."""
    grpc = pytest.importorskip("grpc")
    listed = subprocess.run(["ss", "-Hltnp"], capture_output=True, text=True, check=True).stdout
    (replica,) = ray_cluster.wait_for(1)
    actor = int(Path(f"/proc/{replica['pid']}/stat").read_text().rsplit(")")[1].split()[1])
    owners = session_pids(ray_cluster)
    assert actor in owners
    wide = set()
    for line in listed.splitlines():
        pids = {int(pid) for pid in re.findall(r"pid=(\d+)", line)}
        host, _, port = line.split()[3].rpartition(":")
        if pids & owners and "127.0.0.1" not in host:
            assert pids == {actor}, line
            wide.add(int(port))
    assert len(wide) <= 1
    for number in wide:
        with grpc.insecure_channel(f"127.0.0.1:{number}") as channel:
            call = channel.unary_unary("/ray.serve.ASGIService/HandleRequest")
            with pytest.raises(grpc.RpcError) as raised:
                call(b"", timeout=30)
        assert raised.value.code() == grpc.StatusCode.UNAUTHENTICATED


def session_pids(cluster: RayCluster) -> set[int]:
    """Return the process of a cluster and all its descendants."""
    pids = {cluster.process.pid}
    while True:
        more = set()
        for path in Path("/proc").glob("[0-9]*/stat"):
            try:
                parent = int(path.read_text().rsplit(")")[1].split()[1])
            except OSError:
                continue
            if parent in pids:
                more.add(int(path.parent.name))
        if more <= pids:
            return pids
        pids |= more


@pytest.mark.parametrize("victim", ["server", "actor"])
def test_killed_replica_is_replaced(ray_cluster, victim):
    (before,) = ray_cluster.wait_for(1)
    pid = before["pid"]
    if victim == "actor":
        pid = int(Path(f"/proc/{pid}/stat").read_text().rsplit(")")[1].split()[1])
    os.kill(pid, signal.SIGKILL)
    ray_cluster.wait_for(1, but=(before["url"],))
    with Load(ray_cluster.url):
        time.sleep(0.5)


def test_drained_replica_is_replaced(ray_cluster):
    (before,) = ray_cluster.wait_for(1)
    assert ray_cluster.run("drain", before["name"]).returncode == 0
    ray_cluster.wait_for(1, but=(before["url"],))
    done = ray_cluster.run("drain", "nobody")
    assert (done.returncode, done.stderr) == (2, "cllm: no replica has the name nobody\n")


def test_second_cluster_with_the_same_folder_is_refused(ray_cluster):
    done = ray_cluster.run("serve", *FAKE, "--port", "0")
    assert done.returncode == 2
    assert "a cluster runs already" in done.stderr


def test_requests_are_served_while_the_head_is_down(ray_cluster):
    """The last test of the cluster, because nothing can be placed any more."""
    ray_cluster.wait_for(1)
    (gcs,) = [
        pid
        for pid in session_pids(ray_cluster)
        if b"gcs_server" in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[0]
    ]
    with Load(ray_cluster.url):
        os.kill(gcs, signal.SIGKILL)
        time.sleep(5)
        assert ray_cluster.count_listed() == 1

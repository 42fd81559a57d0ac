"""``cllm cluster serve``: replicas that Ray Serve places. One cluster for all tests of this file.

Each replica needs a GPU. The head has none; the machines that join have as many as they say. All of
them are this machine, with other addresses.
"""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Self

import pytest
from cluster.conftest import KEY
from conftest import PATIENCE
from server.conftest import Server

from cllm.cluster.control import end_session, make_environment

pytest.importorskip("ray", reason="the extra cluster is not installed")
pytestmark = [pytest.mark.ray, pytest.mark.slow]

FAKE = ["--backend.name", "fake", "--context", "4096", "--max-num-seqs", "4"]
FIRST = "127.0.0.1"  # with any other address, agents of Ray listen on all interfaces
# `ray start` refuses to join a head on loopback
MACHINE = """
import sys, types
from ray.cluster_utils import Cluster
cluster = Cluster()
cluster.head_node = types.SimpleNamespace(gcs_address=sys.argv[1])
memory = 100 * 2**20
cluster.add_node(
    wait=False, node_ip_address=sys.argv[2], num_gpus=int(sys.argv[3]), object_store_memory=memory
)
sys.stdin.read()
"""


class RayCluster(Server):
    """A running ``cllm cluster serve``, and the machines that have joined it."""

    def __init__(self) -> None:
        arguments = ["--replicas", "1", "--gpus", "1", "--up-after", "1", "--down-after", "3"]
        arguments += [*FAKE, "--server.drain-timeout", "10"]
        self._machines: dict[str, subprocess.Popen[bytes]] = {}
        super().__init__(*arguments, command=("cluster", "serve"))

    def add_machine(self, address: str, gpus: int) -> None:
        """Let a machine join."""
        arguments = [self.status()["address"], address, str(gpus)]
        others = {name: v for name, v in os.environ.items() if not name.startswith("RAY_")}
        self._machines[address] = subprocess.Popen(
            [sys.executable, "-c", MACHINE, *arguments],
            env=others | make_environment(KEY, "127.0.0.1"),
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def kill_machine(self, address: str) -> None:
        """Kill all processes of a machine."""
        machine = self._machines.pop(address)
        for pid in descendants(machine.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        end_session(machine.pid)
        machine.communicate()

    def pids(self) -> set[int]:
        """Return the processes of all machines."""
        roots = [self.process.pid, *(one.pid for one in self._machines.values())]
        return set().union(*map(descendants, roots))

    def end(self) -> int:
        """Stop the cluster, then its machines. Return the exit code of the command."""
        code = self.stop(timeout=120)
        for address in [*self._machines]:
            self.kill_machine(address)
        return code

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
        while time.monotonic() < end:
            assert self.process.poll() is None, self.log
            replicas = self.status()["replicas"]
            ready = [one for one in replicas if one["status"] == "ready"]
            is_done = len(ready) == number == self.count_listed()
            if is_done and not {one["url"] for one in ready} & {*but}:
                return ready
            time.sleep(0.3)
        raise TimeoutError(self.log)

    def wait_until_started(self) -> None:
        """Wait until commands are answered."""
        self.wait_until(lambda: "is starting;" not in self.run("status").stderr)

    def wait_until(self, is_so: Callable[[], bool]) -> None:
        """Wait until something is so."""
        end = time.monotonic() + PATIENCE
        while not is_so():
            assert time.monotonic() < end, self.log
            time.sleep(0.1)

    def find_busy(self, host: str = "") -> dict:
        """Return a replica on ``host`` with at least three running requests, when there is one."""
        end = time.monotonic() + PATIENCE
        while time.monotonic() < end:
            for one in self.status()["replicas"]:
                is_there = one["url"].startswith(f"http://{host}")
                name = f'replica="{one["name"]}"'
                if is_there and self.metric("num_requests_running", name) >= 3:
                    return one
        raise TimeoutError(self.log)

    def find_actor(self, name: str) -> int | None:
        """Return the process of an actor of Ray."""
        for pid in self.pids():
            if read_command(pid).startswith(f"ray::{name}"):
                return pid
        return None

    def count_listed(self) -> float:
        """Return how many replicas the front passes requests to."""
        return self.count('front_replicas{state="listed"}')

    def count(self, name: str) -> float:
        """Return a metric of the front."""
        text = self.client.get("/metrics").text
        found = re.search(rf"^cllm:{re.escape(name)} (\S+)", text, re.MULTILINE)
        assert found, text
        return float(found[1])


class Load:
    """Clients that send requests until the end of a ``with`` block, a sixth of them without a
    stream. All must get the whole answer. A client always sends the same request, so all its
    answers must be equal.
    """

    def __init__(self, url: str, num_clients: int = 12) -> None:
        self._url = url
        self.num_ended = 0
        self.failures: list[str] = []
        self._is_ending = threading.Event()
        self._threads = [threading.Thread(target=self._ask, args=(n,)) for n in range(num_clients)]

    def _ask(self, number: int) -> None:
        is_stream = number % 6 != 0
        message = {"role": "user", "content": f"{number} is the number of this client"}
        body = {"messages": [message], "max_tokens": 60, "temperature": 0, "ignore_eos": True}
        request = urllib.request.Request(
            f"{self._url}/v1/chat/completions",
            json.dumps(body | {"stream": is_stream}).encode(),
            {"content-type": "application/json"},
        )
        first = ""
        while not self._is_ending.is_set():
            try:
                with urllib.request.urlopen(request, timeout=PATIENCE) as answer:
                    content = answer.read().decode()
                text = read_stream(content) if is_stream else read_answer(content)
                first = first or text
                if not text or text != first:
                    self.failures.append(f"{text!r} instead of {first!r}")
            except (OSError, LookupError, ValueError) as error:
                self.failures.append(repr(error))
            self.num_ended += 1

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


def read_answer(content: str) -> str:
    """Return the text of an answer. Raises LookupError if it is an error."""
    return json.loads(content)["choices"][0]["message"]["content"]


def read_stream(content: str) -> str:
    """Return the text of a stream. Raises LookupError or ValueError unless it is whole."""
    *events, done = [line[6:] for line in content.splitlines() if line.startswith("data: ")]
    if done != "[DONE]":
        raise ValueError(content[-300:])
    return "".join(json.loads(one)["choices"][0]["delta"].get("content") or "" for one in events)


def read_command(pid: int) -> str:
    """Return the command of a process, empty if it has ended."""
    try:
        data = Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return ""
    return data.replace(b"\0", b" ").decode(errors="replace")


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rsplit(")")[1].split()[1])


def descendants(pid: int) -> set[int]:
    """Return a process and all its descendants."""
    pids = {pid}
    while True:
        more = set()
        for path in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if parent_of(int(path.name)) in pids:
                    more.add(int(path.name))
        if more <= pids:
            return pids
        pids |= more


def list_commands(sessions: set[int]) -> list[str]:
    """Return the commands of all processes of some sessions."""
    commands = []
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if os.getsid(int(path.name)) in sessions and (command := read_command(int(path.name))):
                commands.append(command)
    return commands


@pytest.fixture(scope="module")
def ray_cluster():
    """A cluster of one replica; nothing may be left of it."""
    cluster = RayCluster()
    try:
        cluster.wait_until_started()
        cluster.add_machine(FIRST, 3)
        cluster.wait_for(1)
        folder = (cluster.keys.parent / "state" / "ray_folder").read_text()
        yield cluster
    finally:
        sessions = {os.getsid(pid) for pid in descendants(cluster.process.pid)} - {os.getsid(0)}
        code = cluster.end()
    assert code == 0, cluster.log
    assert not Path(folder).exists()
    end = time.monotonic() + PATIENCE
    while (left := list_commands(sessions)) and time.monotonic() < end:
        time.sleep(0.2)  # without the head, replicas drain on their own
    assert left == []
    cluster.forget()


def test_scaling_up_and_down_fails_no_request(ray_cluster):
    (first,) = ray_cluster.wait_for(1)
    with Load(ray_cluster.url):
        assert ray_cluster.run("scale", "3").returncode == 0
        three = ray_cluster.wait_for(3)
        assert first["url"] in [one["url"] for one in three], "it was replaced"
        assert ray_cluster.run("scale", "1").returncode == 0
        ray_cluster.wait_for(1)


def test_number_follows_the_load_and_no_request_fails(ray_cluster):
    ray_cluster.wait_for(1)
    assert ray_cluster.run("scale", "1..2").returncode == 0
    with Load(ray_cluster.url, 12):  # 4 run at a time on a replica
        ray_cluster.wait_for(2)
    with Load(ray_cluster.url, 1):
        ray_cluster.wait_for(1)
    assert ray_cluster.run("scale", "1").returncode == 0


def test_rolling_upgrade_changes_a_setting_and_fails_no_request(ray_cluster):
    (before,) = ray_cluster.wait_for(1)
    with Load(ray_cluster.url):
        done = ray_cluster.run("upgrade", "--max-num-seqs", "5")
        assert done.returncode == 0, done.stderr
        (after,) = ray_cluster.wait_for(1, but=(before["url"],))
    assert after["generation"] == before["generation"] + 1
    info = ray_cluster.client.get("/model/info").json()
    assert (info["name"], info["max_num_seqs"]) == ("fake", 5)


def test_upgrade_that_cannot_start_leaves_the_replicas(ray_cluster):
    before = ray_cluster.wait_for(1)
    done = ray_cluster.run("upgrade", "/nowhere/m.gguf", "--backend.name", "llama_cpp")
    assert (done.returncode, "There is no file /nowhere/m.gguf" in done.stderr) == (2, True)
    assert ray_cluster.wait_for(1) == before


def test_ray_asks_for_its_token_wherever_it_listens(ray_cluster):
    """All sockets are on loopback, but for one of each actor of Ray Serve, which has no setting."""
    grpc = pytest.importorskip("grpc")
    listed = subprocess.run(["ss", "-Hltnp"], capture_output=True, text=True, check=True).stdout
    (replica,) = ray_cluster.wait_for(1)
    actor = parent_of(replica["pid"])
    owners = ray_cluster.pids()
    assert actor in owners
    wide = set()
    for line in listed.splitlines():
        pids = {int(pid) for pid in re.findall(r"pid=(\d+)", line)}
        host, _, port = line.split()[3].rpartition(":")
        if pids & owners and FIRST not in host:
            assert pids == {actor}, line
            wide.add(f"127.0.0.1:{port}")
    assert len(wide) == 1

    def call(address: str, method: str, token: str = "") -> object:
        fields = [("authorization", f"Bearer {token}")] if token else []
        with grpc.insecure_channel(address) as channel:
            try:
                channel.unary_unary(method)(b"", timeout=30, metadata=fields)
            except grpc.RpcError as error:
                return error.code()
        return grpc.StatusCode.OK

    gcs, nodes = ray_cluster.status()["address"], "/ray.rpc.NodeInfoGcsService/GetAllNodeInfo"
    token = make_environment(KEY, "127.0.0.1")["RAY_AUTH_TOKEN"]
    assert call(gcs, nodes, token) == grpc.StatusCode.OK
    refused = grpc.StatusCode.UNAUTHENTICATED
    assert call(gcs, nodes) == call(gcs, nodes, "0" * len(token)) == refused
    (address,) = wide
    assert call(address, "/ray.serve.ASGIService/HandleRequest") == refused


@pytest.mark.parametrize("victim", ["server", "actor"])
def test_killed_replica_is_replaced_and_no_request_fails(ray_cluster, victim):
    assert ray_cluster.run("scale", "2").returncode == 0
    ray_cluster.wait_for(2)
    before = ray_cluster.count("front_continued_streams_total")
    with Load(ray_cluster.url):
        busy = ray_cluster.find_busy()
        pid = busy["pid"] if victim == "server" else parent_of(busy["pid"])
        os.kill(pid, signal.SIGKILL)
        ray_cluster.wait_for(2, but=(busy["url"],))
    if victim == "server":  # the server of an actor ends its requests itself
        assert ray_cluster.count("front_continued_streams_total") > before


def test_machine_that_dies_fails_no_request_and_another_one_takes_its_place(ray_cluster):
    """The other machines have no GPU for its replica."""
    ray_cluster.add_machine("127.0.0.3", 1)
    assert ray_cluster.run("scale", "4").returncode == 0
    ray_cluster.wait_for(4)
    before = ray_cluster.count("front_continued_streams_total")
    with Load(ray_cluster.url, 20):
        lost = ray_cluster.find_busy("127.0.0.3")
        ray_cluster.kill_machine("127.0.0.3")
        ray_cluster.wait_until(lambda: ray_cluster.count_listed() == 3)
        ray_cluster.add_machine("127.0.0.4", 1)
        ready = ray_cluster.wait_for(4, but=(lost["url"],))
    assert sum(one["url"].startswith("http://127.0.0.4:") for one in ready) == 1
    assert ray_cluster.count("front_continued_streams_total") > before
    assert ray_cluster.run("scale", "2").returncode == 0


def test_killed_registry_is_rebuilt_and_no_request_fails(ray_cluster):
    ray_cluster.wait_for(2)
    before = ray_cluster.find_actor("Registry")
    with Load(ray_cluster.url):
        os.kill(before, signal.SIGKILL)
        ray_cluster.wait_until(lambda: ray_cluster.find_actor("Registry") not in (before, None))
        ray_cluster.wait_until(lambda: ray_cluster.status()["state"] == "running")
        ray_cluster.wait_for(2)


def test_killed_controller_is_restarted_and_no_request_fails(ray_cluster):
    ray_cluster.wait_for(2)
    before = ray_cluster.find_actor("ServeController")
    with Load(ray_cluster.url):
        os.kill(before, signal.SIGKILL)
        ray_cluster.wait_until(
            lambda: ray_cluster.find_actor("ServeController") not in (before, None)
        )
        assert ray_cluster.run("scale", "1").returncode == 0
        ray_cluster.wait_for(1)


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
    own = ray_cluster.pids()
    (gcs,) = [pid for pid in own if "gcs_server" in read_command(pid).partition(" ")[0]]
    with Load(ray_cluster.url):
        os.kill(gcs, signal.SIGKILL)
        time.sleep(5)
        assert ray_cluster.count_listed() == 1

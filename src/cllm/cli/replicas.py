"""The commands of ``cllm cluster`` that need Ray, the extra ``cluster``, or ask its cluster."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from cllm.cli.cluster import OF_REPLICAS
from cllm.cli.options import Json
from cllm.cli.remarks import remarks_on_access
from cllm.cli.settings_flags import ConfigFlag, ModelArgument, SettingFlags, settings_from_flags
from cllm.cli.startup import open_access
from cllm.cli.table import format_table
from cllm.cluster.control import (
    DEFAULT_PORT,
    NoCluster,
    Starting,
    ask,
    check_private,
    end_session,
    find_folder,
    make_environment,
    pointer_path,
)
from cllm.config.settings import Settings
from cllm.config.sources import LoadedConfig, get_value
from cllm.errors import StartupError
from cllm.models.catalog import is_on_hub, resolve
from cllm.models.model_file import read_parts
from cllm.private_files import lock
from cllm.server.access import Access
from cllm.server.run import address as find_url
from cllm.server.run import listen

if TYPE_CHECKING:
    from cllm.cluster.front import Front

INSTALL = "this needs Ray: pip install 'cllm[cluster]', or in a checkout tools/setup.sh --cluster"
ForReplicas = Annotated[str, Parameter(help="Number of replicas, or 1..8 for as many as needed.")]
GpusOfReplica = Annotated[
    float | None, Parameter(help="GPUs of each replica. [default: 1 if there are any]")
]
HeadAddress = Annotated[
    str, Parameter(help="Private IPv4 address of this machine, with which others can join.")
]
RayPort = Annotated[
    int | None, Parameter(help=f"Port for machines that join. [default: {DEFAULT_PORT}]")
]
UpAfter = Annotated[
    float, Parameter(help="Seconds for which more replicas are needed before some are added.")
]
DownAfter = Annotated[
    float, Parameter(help="Seconds for which fewer are enough before some are removed.")
]
# concern the front, or are the replica's own, except those that both need and OF_REPLICAS
OWN_SECTIONS = ("server.", "cluster.", "storage.")
SHARED = ("server.keys_file", "server.drain_timeout", "server.max_body_mb", "cluster.hand_over")
START_SECONDS = 600.0  # that a cluster may need until its commands are answered
LEAVE_SECONDS = 10.0  # for Ray, when a machine leaves; its replicas then drain without it
CHANGE_SECONDS = 3600.0  # for a change of replicas, which load their models


def check_ray() -> None:
    """Raise StartupError unless Ray is installed."""
    if importlib.util.find_spec("ray") is None:
        raise StartupError(INSTALL)


def read_range(text: str) -> tuple[int, int]:
    """Return the least and the largest number of replicas. Raises StartupError."""
    match = re.fullmatch(r"(\d{1,5})(?:\.\.(\d{1,5}))?", text)
    least, most = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
    if not 1 <= least <= most:
        raise StartupError(f"the number of replicas must be like 2 or 1..8, not {text!r}")
    return least, most


def collect_settings(loaded: LoadedConfig) -> dict[str, Any]:
    """Return the settings of replicas by their keys: those that are given, except those of the
    front. Raises StartupError for settings that replicas cannot get, and if the model is missing
    or damaged.
    """
    if loaded.models:
        raise StartupError("cllm cluster serves one model; the section models is not supported")
    values: dict[str, Any] = {}
    for key, origin in loaded.origins.items():
        is_own = key.startswith(OWN_SECTIONS) and key not in SHARED + OF_REPLICAS
        if origin != "default" and not is_own:
            values[key] = get_value(loaded.settings, key)
    path = loaded.settings.model.path
    if path is not None and not is_on_hub(path):
        # replicas would find out only after Ray's start
        read_parts(resolve(path), check_tokens=True)
        if Path(path).exists():  # replicas run in other folders
            values["model.path"] = str(Path(path).resolve())
    return json.loads(json.dumps(values, default=lambda value: value.model_dump(mode="json")))  # type: ignore[no-any-return]


def serve(
    model: ModelArgument = None,
    /,
    *,
    replicas: ForReplicas = "1",
    gpus: GpusOfReplica = None,
    address: HeadAddress = "127.0.0.1",
    ray_port: RayPort = None,
    up_after: UpAfter = 10.0,
    down_after: DownAfter = 300.0,
    config: ConfigFlag = None,
    settings: SettingFlags | None = None,
) -> None:
    """Serve a model with several replicas at one address, until Ctrl-C. Ray starts the replicas, on
    this machine and on those that join, restarts them, and adds or removes some.
    """
    check_ray()
    from cllm.cluster.run import run_front  # takes a second to import

    least, most = read_range(replicas)
    check_private(address)
    loaded = settings_from_flags(config, settings, model)
    tree = loaded.settings
    access = open_access(loaded, is_of_front=True)
    of_replicas = collect_settings(loaded)
    key = access.cluster_key.find_or_create()
    pointer = pointer_path(tree)
    pointer_file = take_pointer(tree)
    listener = listen(tree.server.host, tree.server.port)
    spec = {
        "settings": of_replicas,
        "folder": str(pointer.parent / "replicas"),
        "address": address,
        "port": ray_port or (0 if address.startswith("127.") else DEFAULT_PORT),
        "least": least,
        "most": most,
        "limits": {"up_after": up_after, "down_after": down_after},
        "gpus": count_gpus() if gpus is None else gpus,
        "drain_timeout": tree.server.drain_timeout,
    }
    url = find_url(listener, "http" if tree.server.tls_certificate is None else "https")
    head = RayHead(spec, make_environment(key, address))
    try:
        pointer.write_text(str(head.folder))

        def on_ready(_: Front) -> None:
            print_start(spec, url, remarks_on_access(access, tree))

        head.report_progress(least)
        run_front(tree, access, listener, on_ready, head.find_urls)
    finally:
        listener.close()
        code = head.end()
        pointer.unlink(missing_ok=True)
        os.close(pointer_file)
    if code:
        raise StartupError("the replicas could not be started")


def print_start(spec: dict[str, Any], url: str, remarks: Iterable[str]) -> None:
    """Print what a cluster serves, and how other machines join."""
    print(f"cLLM serves {spec['least']} replicas at {url}: it is starting them", file=sys.stderr)
    if spec["port"]:
        join = f"cllm cluster join {spec['address']}:{spec['port']} --address ITS_ADDRESS"
        print(f"cllm: on other machines, {join}", file=sys.stderr)
        print("cllm: Ray listens on all addresses of this machine", file=sys.stderr)
    for line in remarks:
        print("cllm:", line, file=sys.stderr)
    sys.stderr.flush()


def take_pointer(settings: Settings) -> int:
    """Return the locked file that names the private folder. Raises StartupError if a cluster runs
    that has the same storage folder.
    """
    path = pointer_path(settings)
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    file = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        lock(file)
    except BlockingIOError:
        os.close(file)
        raise StartupError("a cluster runs already here; see cllm cluster status") from None
    return file


def count_gpus() -> float:
    """Return 1 if this machine has a GPU of NVIDIA, else 0."""
    return float(shutil.which("nvidia-smi") is not None and Path("/dev/nvidia0").exists())


class RayHead:
    """The process that runs Ray's head and knows the replicas."""

    def __init__(self, spec: dict[str, Any], environment: dict[str, str]) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="cllm-ray-"))  # for its owner only
        program = "from cllm.cluster.ray.head import main; main()"
        self._process = subprocess.Popen(
            [sys.executable, "-c", program, str(self.folder), json.dumps(spec)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,  # Ray prints there what it does
            env={name: v for name, v in os.environ.items() if not name.startswith("RAY_")}
            | environment,
            start_new_session=True,  # Ctrl-C is for the front
        )
        self._is_ending = False

    def find_urls(self) -> dict[str, bool]:
        """Return the addresses of the replicas, with False for those that will drain. Raises
        StartupError if they are not known.
        """
        code = self._process.poll()
        if code is not None and not self._is_ending:
            self._is_ending = True
            if code in (0, 2):  # cllm cluster down, or the first replicas could not be started
                signal.raise_signal(signal.SIGTERM)
        try:
            known = ask(self.folder, "status", 30.0)["replicas"]
        except Starting:
            return {}
        return {one["url"]: one["status"] != "draining" for one in known}

    def report_progress(self, number: int) -> None:
        """Print how many replicas are ready whenever that changes, until all are."""

        def report() -> None:
            begun, printed = time.monotonic(), 0
            while printed < number and self._process.poll() is None:
                time.sleep(0.5)
                with suppress(StartupError):
                    ready = len(ask(self.folder, "status")["replicas"])
                    if ready > printed:
                        printed = ready
                        seconds = time.monotonic() - begun
                        print(
                            f"cllm: {ready} of {number} replicas are ready after {seconds:.0f} s",
                            file=sys.stderr,
                            flush=True,
                        )

        threading.Thread(target=report, daemon=True).start()

    def end(self) -> int:
        """Let the replicas drain, end Ray, and return the exit code."""
        self._is_ending = True
        assert self._process.stdin is not None
        self._process.stdin.close()
        code = self._process.wait()
        end_session(self._process.pid)
        shutil.rmtree(self.folder, ignore_errors=True)
        return code


def join(
    head: Annotated[str, Parameter(help="Address of the head, such as 10.0.0.4:6380.")],
    /,
    *,
    address: Annotated[str, Parameter(help="Private IPv4 address of this machine.")],
    gpus: Annotated[int | None, Parameter(help="GPUs to use. [default: all]")] = None,
    config: ConfigFlag = None,
    settings: SettingFlags | None = None,
) -> None:
    """Let a cluster place replicas on this machine, until Ctrl-C. The cluster key must be that of
    the head.
    """
    check_ray()
    check_private(address)
    key = Access(settings_from_flags(config, settings).settings, is_of_front=True).cluster_key
    if not key.find():
        raise StartupError("set CLLM_CLUSTER_KEY to the key of the head, or copy its cluster.key")
    host, _, port = head.rpartition(":")
    if not host:
        host, port = head, str(DEFAULT_PORT)
    check_private(host)
    if host.startswith("127."):
        raise StartupError("machines cannot join a cluster that was started without --address")
    kept = {name: v for name, v in os.environ.items() if not name.startswith("RAY_")}
    process = subprocess.Popen(
        write_join(f"{host}:{port}", address, gpus),
        env=kept | make_environment(key.find(), address),
        start_new_session=True,  # Ctrl-C is for this process, which ends all of them
    )
    try:
        code = process.wait()
    finally:
        try:
            process.terminate()
            with suppress(subprocess.TimeoutExpired):
                process.wait(LEAVE_SECONDS)
        finally:
            end_session(process.pid)
    if code:
        raise StartupError(f"Ray ended with exit code {code}")


def write_join(head: str, address: str, gpus: int | None) -> list[str]:
    """Return the command of Ray with which this machine joins, until SIGTERM."""
    program = "from ray.scripts.scripts import main; main()"
    flags = [f"--address={head}", f"--node-ip-address={address}", "--block"]
    flags += ["--object-store-memory=104857600", "--disable-usage-stats"]
    flags += [] if gpus is None else [f"--num-gpus={gpus}"]
    return [sys.executable, "-c", program, "start", *flags]


def send(
    config: Path | None, settings: Any, command: str, timeout: float = 30.0, **arguments: object
) -> Any:
    """Send a command to the cluster of this machine."""
    folder = find_folder(settings_from_flags(config, settings).settings)
    return ask(folder, command, timeout, **arguments)


def status(
    *,
    as_json: Annotated[Json, Parameter(name="--json")] = False,
    config: ConfigFlag = None,
    settings: SettingFlags | None = None,
) -> None:
    """List the replicas of the cluster that was started on this machine."""
    answer = send(config, settings, "status")
    if as_json:
        print(json.dumps(answer))
        return
    print(f"{answer['state']}, {len(answer['replicas'])} replicas")
    columns = ("name", "status", "url", "gpus", "version", "generation")
    print(format_table([columns, *([one[c] for c in columns] for one in answer["replicas"])]))


def scale(
    number: Annotated[str, Parameter(help="A number, or 1..8 for as many as needed.")],
    /,
    *,
    config: ConfigFlag = None,
    settings: SettingFlags | None = None,
) -> None:
    """Change the number of replicas, and wait until the new ones are ready."""
    least, most = read_range(number)
    send(config, settings, "scale", CHANGE_SECONDS, least=least, most=most)


def drain(
    replica: Annotated[str, Parameter(help="Its name in cllm cluster status.")],
    /,
    *,
    config: ConfigFlag = None,
    settings: SettingFlags | None = None,
) -> None:
    """Let a replica end its requests. Another one replaces it."""
    send(config, settings, "drain", replica=replica)


def upgrade(
    model: ModelArgument = None,
    /,
    *,
    config: ConfigFlag = None,
    settings: SettingFlags | None = None,
) -> None:
    """Replace all replicas, and wait until that is done. They run the code that is installed now.
    The settings that are given change, all others stay.
    """
    loaded = settings_from_flags(config, settings, model)
    wanted = collect_settings(loaded)
    ask(find_folder(loaded.settings), "upgrade", CHANGE_SECONDS, settings=wanted)


def down(*, config: ConfigFlag = None, settings: SettingFlags | None = None) -> None:
    """End the cluster. Running requests get the drain timeout of the replicas."""
    folder = find_folder(settings_from_flags(config, settings).settings)
    ask(folder, "down")
    with suppress(NoCluster):
        while True:
            ask(folder, "status", START_SECONDS)
            time.sleep(0.2)

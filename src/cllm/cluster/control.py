"""Asks the process that places a cluster's replicas. It listens on a socket in a private folder.

A file in the storage folder names that folder, because paths of sockets must be short.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import json
import os
import signal
import socket
from contextlib import suppress
from pathlib import Path
from typing import Any

from cllm.config.settings import Settings
from cllm.errors import StartupError, describe_os_error
from cllm.http_client import is_private

POINTER = "ray_folder"  # in the storage folder
SOCKET = "control"  # in the private folder
FOREVER = 2**30  # seconds
DEFAULT_PORT = 6380  # of Ray's head


class NoCluster(StartupError):
    """No cluster that was started with these settings runs on this machine."""


class Starting(StartupError):
    """The cluster does not answer yet."""


def pointer_path(settings: Settings) -> Path:
    """Return the file that names the private folder. Raises StartupError without a storage
    folder.
    """
    if settings.storage.folder is None:
        raise StartupError("cllm cluster needs storage.folder")
    return Path(settings.storage.folder).expanduser() / POINTER


def ask(folder: Path, command: str, timeout: float | None = 10.0, **arguments: object) -> Any:
    """Send a command and return its answer. Raises NoCluster, Starting, or StartupError with the
    reason why the command failed.
    """
    if folder.is_dir() and not (folder / SOCKET).exists():
        raise Starting("the cluster is starting; try again in some seconds")
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.settimeout(timeout)
            connection.connect(str(folder / SOCKET))
            connection.sendall(json.dumps({"command": command, **arguments}).encode() + b"\n")
            with connection.makefile("rb") as file:
                answer = json.loads(file.readline())
    except TimeoutError:
        raise StartupError(f"the cluster does not answer within {timeout:g} s") from None
    except (OSError, json.JSONDecodeError) as error:
        reason = describe_os_error(error) if isinstance(error, OSError) else "it ended"
        raise NoCluster(f"no cluster runs here: {reason}") from None
    if "error" in answer:
        raise StartupError(answer["error"])
    return answer


def find_folder(settings: Settings) -> Path:
    """Return the private folder of the running cluster. Raises NoCluster."""
    try:
        return Path(pointer_path(settings).read_text())
    except OSError:
        raise NoCluster(
            "no cluster that cllm cluster serve has started runs here; a front that was started "
            "with cllm cluster front lists its replicas at GET /health?level=full"
        ) from None


def check_private(address: str) -> None:
    """Raise StartupError unless ``address`` is an IPv4 address of this machine alone or of a
    private network: Ray's traffic is not encrypted, and whoever has its token can run code.
    """
    try:
        is_safe = is_private(address)
    except ValueError:
        raise StartupError(f"{address!r} is not an IPv4 address, such as 10.0.0.4") from None
    if not is_safe:
        raise StartupError(
            f"{address} is not private; Ray is only safe on a private network, because its "
            "traffic is not encrypted"
        )


def make_environment(key: str, address: str) -> dict[str, str]:
    """Return the variables for all processes of Ray on a machine with this address.

    Ray's token is derived from the cluster key. If Ray's head ends, its other processes wait for
    it and do not end, so replicas go on. On loopback Ray listens on all interfaces unless it is
    told that it has no cluster.
    """
    token = hmac.new(key.encode(), b"ray", hashlib.sha256).hexdigest()
    variables = {
        "CLLM_CLUSTER_KEY": key,
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": token,
        "RAY_ENABLE_AUTO_CONNECT": "0",
        "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_gcs_rpc_server_reconnect_timeout_s": str(FOREVER),
    }
    if ipaddress.ip_address(address).is_loopback:
        variables["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
    return variables


def end_session(leader: int) -> None:
    """Kill what is left of the processes of a session whose leader is or was ``leader``.

    Agents and workers of Ray wait without end for a registry (GCS) that has died. Without /proc
    they are left alone.
    """
    killed: set[int] = set()
    while found := _list_session(leader) - killed:  # those that are killed may have started others
        for pid in found:
            with suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        killed |= found


def _list_session(leader: int) -> set[int]:
    found = set()
    for path in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if os.getsid(int(path.name)) == leader:
                found.add(int(path.name))
    return found

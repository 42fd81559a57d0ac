"""Lists the servers that need no API keys until a file of keys exists.

Each has a file ``servers/PID-PORT.json`` next to the file of keys, which it locks until it ends.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec

from cllm.private_files import lock, open_private

FOLDER = "servers"


class OpenServer(msgspec.Struct):
    """A server at ``url``, which needs keys once ``keys_file`` exists."""

    url: str
    keys_file: str


@contextmanager
def announce_open_server(keys_file: Path, url: str) -> Iterator[None]:
    """Let ``list_open_servers`` find this server. Does nothing if the folder cannot be written."""
    path = keys_file.parent / FOLDER / f"{os.getpid()}-{url.rpartition(':')[2]}.json"
    file = None
    with suppress(OSError):
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        file = open_private(path, "wb")
        lock(file)
        file.write(msgspec.json.encode(OpenServer(url, str(keys_file.absolute()))))
        file.flush()
    try:
        yield
    finally:
        if file is not None:
            with suppress(OSError):
                path.unlink()
            file.close()


def list_open_servers(keys_file: Path) -> list[str]:
    """Return the URLs of the servers that need keys once ``keys_file`` exists."""
    urls = []
    for path in sorted((keys_file.parent / FOLDER).glob("*.json")):
        with suppress(OSError, msgspec.MsgspecError), path.open("rb") as file:
            try:
                lock(file, shared=True)  # on Windows, such servers are not known
                path.unlink()  # its server was killed
            except BlockingIOError:
                server = msgspec.json.decode(file.read(), type=OpenServer)
                if server.keys_file == str(keys_file.absolute()):
                    urls.append(server.url)
    return urls

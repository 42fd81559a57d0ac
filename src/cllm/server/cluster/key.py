"""The cluster key: the secret that the fronts and the servers of a cluster share."""

from __future__ import annotations

import hmac
import secrets
from contextlib import suppress
from pathlib import Path

from starlette.datastructures import Headers

from cllm.config.settings import Settings
from cllm.errors import StartupError, describe_os_error
from cllm.private_files import open_private

KEY_HEADER = "x-cllm-cluster-key"
INTERNAL = "/internal/"  # paths for fronts; a front never passes a client's request to them
FILE_NAME = "cluster.key"  # beside the file of API keys
MIN_LENGTH = 16  # characters; a shorter key could be guessed


class ClusterKey:
    """The key of the settings, or the one in a file, which may appear or change later."""

    def __init__(self, settings: Settings) -> None:
        """Raises StartupError if the key in the settings is too short."""
        named = settings.cluster.key_file
        keys_file = Path(settings.server.keys_file).expanduser()
        self.path = Path(named).expanduser() if named else keys_file.with_name(FILE_NAME)
        self._given = settings.cluster.key
        if self._given is not None and len(self._given) < MIN_LENGTH:
            raise StartupError(f"cluster.key must have at least {MIN_LENGTH} characters")
        self._stamp: tuple[int, int] | None = None  # time of change and size of the file as read
        self._read = ""

    def find(self) -> str:
        """Return the key, or "" if there is none."""
        if self._given is not None:
            return self._given
        try:
            status = self.path.stat()
            stamp = status.st_mtime_ns, status.st_size
            if stamp != self._stamp:
                self._read = self.path.read_text("ascii").strip()
                self._stamp = stamp
        except (OSError, UnicodeDecodeError):
            return ""
        return self._read if len(self._read) >= MIN_LENGTH else ""

    def find_or_create(self) -> str:
        """Return the key; write a random one to the file if there is none. Raises StartupError."""
        if key := self.find():
            return key
        try:
            self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            with suppress(FileExistsError), open_private(self.path, "xb") as file:
                file.write(secrets.token_urlsafe(32).encode() + b"\n")
        except OSError as error:
            reason = describe_os_error(error)
            raise StartupError(f"the cluster key cannot be created: {reason}") from None
        if key := self.find():
            return key
        raise StartupError(
            f"{self.path} has no cluster key: it needs at least {MIN_LENGTH} characters of ASCII"
        )

    def is_sent_in(self, headers: Headers) -> bool:
        """Return whether a request has the key, so it comes from a front of the cluster."""
        sent = headers.get(KEY_HEADER)
        if sent is None or not (key := self.find()):
            return False
        return hmac.compare_digest(sent.encode("latin-1"), key.encode())

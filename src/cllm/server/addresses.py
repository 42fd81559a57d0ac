"""Host names and addresses of clients and servers."""

from __future__ import annotations

import ipaddress
import re
import socket
from urllib.parse import urlsplit

from cllm.errors import StartupError
from cllm.http_client import parse_address

WITH_PORT = re.compile(r"(?:(?P<host>::1?|\*)?:)?(?P<port>[1-9]\d{1,4})", re.ASCII)


def is_loopback(host: str) -> bool:
    """Return whether ``host`` is an address or a name that only this machine reaches."""
    if (address := parse_address(host)) is not None:
        return address.is_loopback
    name = host.lower().removesuffix(".")
    return name == "localhost" or name.endswith(".localhost")


def split_host(host: str) -> str:
    """Return the name or the address in a Host header field, in lower case without the port."""
    host = host.strip().lower()
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0].removesuffix(".")


def is_network(text: str) -> bool:
    """Return whether ``text`` is an address, or a network such as 10.0.0.0/8."""
    try:
        ipaddress.ip_network(text, strict=False)
    except ValueError:
        return False
    return True


def check_host(host: str) -> None:
    """Raise StartupError if the form of ``host`` shows that a server cannot listen on it."""
    name: str | None
    port: int | None
    if match := WITH_PORT.fullmatch(host):
        name, port = match["host"], int(match["port"])
        name = "0.0.0.0" if name == "*" else name
    elif is_network(host) and "/" not in host:
        return
    elif not any(sign in host for sign in ":/[]@ "):
        if not is_loopback(host) and not is_known(host):
            raise StartupError(
                f"server.host is {host!r}, which is not an address or a known name; 0.0.0.0 is all "
                "addresses of this machine"
            )
        return
    else:
        name, port = split_url(host)
    flags = f" --host {name}" * bool(name) + f" --port {port}" * bool(port)
    advice = f"; use{flags}" if flags else ""
    raise StartupError(f"server.host is {host!r}, but it must be an address or a name{advice}")


def split_url(text: str) -> tuple[str | None, int | None]:
    """Return the host and the port in a URL, whose scheme may be missing. A part that the URL does
    not have is None.
    """
    try:
        url = urlsplit(text if "://" in text else f"//{text}")
        name, port = (url.hostname or "").strip(), url.port
    except ValueError:
        return None, None
    is_scheme = name in ("unix", "http", "https", "tcp")  # "http:"
    return (None, None) if not name or " " in name or is_scheme else (name, port)


def is_known(name: str) -> bool:
    """Return whether the system's resolver knows an address for a name."""
    try:
        socket.getaddrinfo(name, None)
    except (OSError, UnicodeError):
        return False
    return True

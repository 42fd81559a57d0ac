"""Host names and addresses of clients and servers."""

from __future__ import annotations

import ipaddress
import socket
from urllib.parse import urlsplit

from cllm.errors import StartupError


def is_loopback(host: str) -> bool:
    """Return whether ``host`` is an address or a name that only this machine reaches."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        name = host.lower().removesuffix(".")
        return name == "localhost" or name.endswith(".localhost")
    mapped = getattr(address, "ipv4_mapped", None)
    return address.is_loopback or (mapped is not None and mapped.is_loopback)


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
    """Raise StartupError unless a server can listen on ``host``, as far as its form says."""
    if is_network(host) and "/" not in host:
        return
    if not any(sign in host for sign in ":/[]@ "):
        if not is_loopback(host) and not is_known(host):
            raise StartupError(
                f"server.host is {host!r}, which is not an address or a known name; 0.0.0.0 is all "
                "addresses of this machine"
            )
        return
    try:
        url = urlsplit(host if "://" in host else f"//{host}")
        name, port = url.hostname, url.port
    except ValueError:
        name, port = None, None
    advice = ""
    if name and (name := name.strip()) and " " not in name:
        advice = f"; use --host {name} --port {port}" if port else f"; use --host {name}"
    raise StartupError(f"server.host is {host!r}, but it must be an address or a name{advice}")


def is_known(name: str) -> bool:
    """Return whether a name stands for an address, as the system's resolver says."""
    try:
        socket.getaddrinfo(name, None)
    except (OSError, UnicodeError):
        return False
    return True

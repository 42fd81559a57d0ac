"""HTTP clients of other servers. They use the proxies that the environment names, but none for
servers on this machine.
"""

from __future__ import annotations

import ipaddress
import os
import re
import socket
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from cllm.errors import StartupError

if TYPE_CHECKING:
    import httpx2

# Loopback, private and link-local addresses, and those of carriers and private overlay networks.
PRIVATE = [
    ipaddress.ip_network(net)
    for net in (
        *("127.0.0.0/8", "10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16"),
        *("169.254.0.0/16", "100.64.0.0/10"),
    )
]
VARIABLES = ("http_proxy", "https_proxy", "all_proxy")


def is_on_this_machine(url: str) -> bool:
    """Return whether a URL names a loopback address."""
    try:
        host = (urlsplit(url).hostname or "").rstrip(".")
    except ValueError:
        return False
    if host == "localhost" or host.endswith(".localhost"):
        return True
    address = parse_address(host)
    return address is not None and (address.is_loopback or address.is_unspecified)


def parse_address(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """Return the IP address that a text means; None if it is a name. It may be in one of IPv4's
    short forms, such as 127.1, and is an IPv4 address if it is mapped to IPv6.
    """
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        try:
            short = re.fullmatch(r"[\da-fx.]+", host, re.IGNORECASE | re.ASCII)
            return ipaddress.IPv4Address(socket.inet_aton(host)) if short else None
        except OSError:
            return None
    return getattr(address, "ipv4_mapped", None) or address


def is_private(address: str) -> bool:
    """Return whether an IPv4 address is of this machine alone or of a private network.

    Raises ValueError if it is no IPv4 address.
    """
    return any(ipaddress.IPv4Address(address) in net for net in PRIVATE)


def open_client(url: str, **options: Any) -> httpx2.Client:
    """Return a client for the server at ``url``. ``options`` are those of httpx2.Client. Raises
    StartupError if a proxy cannot be used.
    """
    import httpx2

    is_direct = is_on_this_machine(url) or is_excepted(url)
    with explained_proxies():
        return httpx2.Client(transport=httpx2.HTTPTransport() if is_direct else None, **options)


def is_excepted(url: str) -> bool:
    """Return whether NO_PROXY names the host of a URL. Its proxy then need not be usable."""
    try:
        host = urlsplit(url).hostname
    except ValueError:
        return False
    return bool(host and urllib.request.proxy_bypass_environment(host))  # type: ignore[attr-defined]


@contextmanager
def explained_proxies() -> Iterator[None]:
    """Raise StartupError if a client cannot be made because of a proxy."""
    import httpx2

    try:
        yield
    except (ImportError, ValueError, httpx2.InvalidURL) as error:
        named = [name for name in os.environ if name.lower() in VARIABLES]
        if isinstance(error, ImportError):
            reason = "SOCKS proxies need the Python package socksio"
        else:
            reason = str(error)
        raise StartupError(f"the proxy in {', '.join(named)} cannot be used: {reason}") from None


@contextmanager
def without_proxies() -> Iterator[None]:
    """Hide the environment's proxies from HTTP clients that a library creates in this context."""
    hidden = {name: os.environ.pop(name) for name in [*os.environ] if name.lower() in VARIABLES}
    try:
        yield
    finally:
        os.environ.update(hidden)


def read_local(url: str, timeout: float | None = None) -> bytes:
    """Return the answer of a server on this machine. Raises OSError, also for an error's status."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(url, timeout=timeout) as answer:
        return bytes(answer.read())

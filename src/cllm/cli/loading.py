"""A bar for a model that a running server loads for a request."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Any

from cllm.cli.progress import Bar, open_bar

EVENTS = "/models/sse"
TIMEOUT = 60.0  # seconds of silence; a server writes more often


@contextmanager
def show_loading(client: Any, model: str) -> Iterator[None]:
    """Show on stderr how far ``model`` is, until the block ends. ``client`` is an HTTP client of
    the server. A server without the route shows nothing.
    """
    has_ended = threading.Event()
    with closing(open_bar(f"loading {model}")) as bar:
        thread = threading.Thread(
            target=follow, args=(client, model, bar, has_ended), name="cllm-loading", daemon=True
        )
        thread.start()
        try:
            yield
        finally:
            has_ended.set()


def follow(client: Any, model: str, bar: Bar, has_ended: threading.Event) -> None:
    """Update ``bar`` with the events about ``model`` until it is loaded, or ``has_ended``."""
    import httpx2

    try:
        with client.stream("GET", EVENTS, timeout=TIMEOUT) as response:
            if response.status_code != 200:
                return
            for line in response.iter_lines():
                if has_ended.is_set():
                    return
                share = read_share(line, model)
                if share is not None:
                    bar.update(share)
                    if share >= 1:
                        return
    except (httpx2.HTTPError, ValueError, LookupError, TypeError, AttributeError):
        return


def read_share(line: str, model: str) -> float | None:
    """Return the loaded share that a line of the events tells of ``model``, or None. Raises
    ValueError, LookupError, TypeError and AttributeError for other servers' lines.
    """
    name, _, text = line.partition(":")
    event = json.loads(text) if name == "data" else {}
    if event.get("model") != model or event.get("event") != "model_status":
        return None
    if event["data"]["status"] == "loaded":
        return 1.0
    progress = event["data"].get("progress")
    return None if progress is None else float(progress["value"])

"""``cllm top``: the live view of a server in the terminal."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Generator, Iterator
from typing import TYPE_CHECKING, Annotated

import msgspec
from cyclopts import Parameter

from cllm.cli.explain import describe_sequence
from cllm.cli.remote import LOCAL, Url, auth_headers, error_message, lost, read_lines, server_url
from cllm.errors import CLLMError, StartupError
from cllm.http_client import open_client
from cllm.scheduler.trace import SequenceState
from cllm.server.live.schema import EngineState, ModelState, ReplicaState, Snapshot

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.text import Text

SILENCE = 60.0  # seconds without a snapshot after which the connection counts as lost
WIDTH = 20  # characters of the bars of cells
COLORS = {"queued": "yellow", "prefill": "cyan", "decode": "green", "parked": "magenta"}
SHOWN_AGE = 3.0  # seconds above which the age of what is shown of a replica is named
NO_EVENTS = "it has no live view, or is not a cLLM server"


def top(
    url: Url = LOCAL,
    *,
    once: Annotated[
        bool, Parameter(help="Print the present state, and end. So does a pipe without --json.")
    ] = False,
    as_json: Annotated[
        bool, Parameter(name="--json", help="Print JSON, a snapshot on each line.")
    ] = False,
) -> None:
    """Watch the requests, engines and models of a running server, or of all replicas behind a front
    of a cluster, until Ctrl-C. The same is shown at the address /live, with a history.

    A server with keys wants that of an administrator, in CLLM_API_KEY.
    """
    once = once or not (as_json or sys.stdout.isatty())
    with contextlib.closing(read_snapshots(url)) as snapshots:
        if once:
            next(snapshots, b"")  # rates are those since the snapshot before
            data = next(snapshots, b"")
            snapshot = decode(data, url)
            if as_json:
                print(data.decode())
            else:
                print_snapshot(snapshot, url)
        elif as_json:
            for data in snapshots:
                print(data.decode(), flush=True)
        else:
            show(snapshots, url)
    if not once:
        raise CLLMError(f"the server at {url} has stopped")


def read_snapshots(url: str) -> Generator[bytes, None, None]:
    """Yield the snapshots of a server, as JSON. Raises StartupError if it cannot be reached, and
    CLLMError if it answers with an error or the connection is lost.
    """
    import httpx2

    base = server_url(url)
    has_begun = False
    try:
        timeout = httpx2.Timeout(SILENCE, connect=10)
        with (
            open_client(base, headers=auth_headers(), timeout=timeout) as client,
            client.stream("GET", f"{base}/live/events") as answer,
        ):
            if answer.status_code != 200:
                answer.read()
                raise CLLMError(f"{error_message(answer)} ({url})")
            has_begun = True
            for line in read_lines(answer.iter_bytes()):
                name, _, data = line.partition(b": ")
                if name == b"data":
                    yield data
    except (httpx2.HTTPError, httpx2.InvalidURL) as error:
        if has_begun:
            raise lost(error) from None
        raise StartupError(f"cannot connect to {url}: {error}") from None


def decode(data: bytes, url: str) -> Snapshot:
    try:
        return msgspec.json.decode(data, type=Snapshot)
    except msgspec.MsgspecError:
        raise CLLMError(f"the server at {url} sent no snapshot: {NO_EVENTS}") from None


def print_snapshot(snapshot: Snapshot, url: str) -> None:
    from rich.console import Console

    console = Console()
    console.print(render(snapshot, url, None))


def show(snapshots: Iterator[bytes], url: str) -> None:
    """Show snapshots on the whole terminal, until they end."""
    from rich.live import Live

    with Live(screen=True, auto_refresh=False) as live:
        for data in snapshots:
            height = live.console.size.height
            live.update(render(decode(data, url), url, height), refresh=True)


def render(snapshot: Snapshot, url: str, height: int | None) -> RenderableType:
    """Return a snapshot as text of at most ``height`` lines; None for any number."""
    from rich.console import Group
    from rich.text import Text

    state = "ready" if snapshot.is_ready else "not ready"
    last = snapshot.last_minute
    if snapshot.is_draining:
        state = "shuts down after its requests"
    lines = [
        Text.assemble((f"cLLM {snapshot.version} at {url}", "bold"), f", {state}"),
        Text(f"Last minute: {last.num_requests} requests, {last.num_failed} failed")
        + Text(format_percentiles("first token", last.ttft, 1.0, "s"))
        + Text(format_percentiles("between tokens", last.itl, 1000.0, "ms")),
    ]
    lines += map(describe_replica, snapshot.replicas)
    sequences = [("front: ", seq) for seq in snapshot.at_front]
    for model in snapshot.models:
        where = f"{model.replica}: " if model.replica else ""
        lines.append(describe_model(model, where))
        lines += [describe_engine(engine) for engine in model.engines]
        sequences += [(where, seq) for seq in model.waiting]
        sequences += [(where, seq) for engine in model.engines for seq in engine.sequences]
    lines.append(Text(f"Requests: {len(sequences)}"))
    room = None if height is None else max(0, height - len(lines) - 1)
    lines += [
        Text(where + describe_sequence(seq) + describe_journey(seq, snapshot), COLORS[seq.phase])
        for where, seq in sequences[:room]
    ]
    if room is not None and len(sequences) > room:
        lines.append(Text(f"... and {len(sequences) - room} more"))
    for line in lines:
        line.no_wrap, line.overflow = height is not None, "ellipsis"
    return Group(*lines)


def format_percentiles(what: str, values: list[float], factor: float, unit: str) -> str:
    """Return the median and the last percentile as text; "" if there are none."""
    if not values:
        return ""
    return f"; {what}: {factor * values[0]:.3g} {unit}, 99 %: {factor * values[-1]:.3g} {unit}"


def describe_replica(replica: ReplicaState) -> Text:
    from rich.text import Text

    facts = [replica.status + (f" ({replica.trouble})" if replica.trouble else "")]
    facts.append(f"{replica.num_requests} requests of this front")
    if replica.seconds_old is not None and replica.seconds_old > SHOWN_AGE:
        facts.append(f"shown as it was {replica.seconds_old:.0f} s ago")
    return Text.assemble("replica ", (replica.name, "bold"), ": ", ", ".join(facts))


def describe_journey(seq: SequenceState, snapshot: Snapshot) -> str:
    """Return which replicas a front has asked for a sequence, if there were several."""
    sentences = snapshot.journeys.get(seq.name.rpartition("-")[0])
    return f" Sent more than once: {'; '.join(sentences)}." if sentences else ""


def describe_model(model: ModelState, where: str) -> Text:
    from rich.text import Text

    facts = [model.status]
    if model.status == "loading":
        facts = [f"loading, {model.loaded_share:.0%}"]
    if model.num_bytes:
        facts.append(f"{model.num_bytes / 1e9:.2f} GB")
    facts += [
        f"{model.num_requests} requests",
        f"{model.output_tokens_per_s:.0f} output tokens/s",
        f"{model.prompt_tokens_per_s:.0f} prompt tokens/s",
    ]
    return Text.assemble(where, (model.name, "bold"), ": ", ", ".join(facts))


def describe_engine(engine: EngineState) -> Text:
    from rich.text import Text

    state = "ready" if engine.is_ready else "not ready"
    restarts = f", {engine.num_restarts} restarts" if engine.num_restarts else ""
    held = round(WIDTH * engine.num_cells_held / max(1, engine.num_cells))
    idle = min(WIDTH - held, round(WIDTH * engine.num_cells_idle / max(1, engine.num_cells)))
    stages = ", ".join(f"{name} {ms:.2f}" for name, ms in engine.stage_ms.items() if ms)
    step = f"; ms of a step: {stages}" if stages else ""
    return Text.assemble(
        f"  engine {engine.number} {state}{restarts}, cells ",
        ("█" * held, "green"),
        ("▒" * idle, "blue"),
        "·" * (WIDTH - held - idle),
        f" {engine.num_cells_held} used, {engine.num_cells_shared} saved by sharing, "
        f"{engine.num_cells_idle} cached of {engine.num_cells}{step}",
    )

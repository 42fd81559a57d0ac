"""``cllm cluster``: one address for several servers."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from cyclopts import App

from cllm.cli.remarks import remarks_on_access
from cllm.cli.settings_flags import ConfigFlag, flags, settings_from_flags
from cllm.cli.startup import open_access
from cllm.config.settings import OPTIONS
from cllm.server.run import address, address_elsewhere, listen

# settings that a front ignores, because replicas check them
OF_REPLICAS = (
    *("server.allow_pull", "server.allow_model_changes", "server.strict", "server.benchmark"),
    *("server.enable_faults", "server.live_prompts"),
)

if TYPE_CHECKING:
    from cllm.cluster.front import Front

    FrontFlags = dict[str, object]
else:
    SCHEDULING = ("scheduler.weights", "scheduler.priorities")
    SECTIONS = ("server.", "cluster.", "log.", "trace.", *SCHEDULING)
    OTHERS = {"storage.folder"}
    FrontFlags = flags(
        option
        for option in OPTIONS.values()
        if (option.key.startswith(SECTIONS) or option.key in OTHERS)
        and option.key not in OF_REPLICAS
    )

app = App(name="cluster", help="Serve from several machines at one address.")
for name, summary in {
    "serve": "Serve a model with several replicas, which Ray places, until Ctrl-C.",
    "join": "Let a cluster use this machine, until Ctrl-C.",
    "status": "List the replicas of the cluster of this machine.",
    "scale": "Change the number of replicas.",
    "drain": "Let a replica end its requests, and replace it.",
    "upgrade": "Replace all replicas, one after another; no request fails.",
    "down": "End the cluster when its requests have ended.",
}.items():
    app.command(f"cllm.cli.replicas:{name}", name=name, help=summary)


@app.command
def front(*, config: ConfigFlag = None, settings: FrontFlags | None = None) -> None:
    """Pass requests to the servers named by --urls, each to the one that knows its prompt best,
    until Ctrl-C.

    The servers are started with cllm serve, and have the same cluster key.
    """
    from cllm.cluster.run import check_front, run_front  # takes a second to import

    loaded = settings_from_flags(config, settings)
    tree = loaded.settings
    access = open_access(loaded, is_of_front=True)
    check_front(tree, access)
    listener = listen(tree.server.host, tree.server.port)
    scheme = "http" if tree.server.tls_certificate is None else "https"
    url = address(listener, scheme)

    def on_ready(front: Front) -> None:
        replicas = front.replicas.all
        listed = [*front.replicas.listed()]
        names = {model.name for one in listed if one.lease for model in one.lease.models}
        what = ", ".join(sorted(names)) or "no replica answers yet"
        print(
            f"cLLM serves {len(listed)} of {len(replicas)} replicas at {url}: {what}",
            file=sys.stderr,
        )
        for replica in replicas:
            if replica.trouble:
                print(f"cllm: {replica.url}: {replica.trouble}", file=sys.stderr)
        if elsewhere := address_elsewhere(listener, scheme):
            print(f"cllm: other machines can use {elsewhere}", file=sys.stderr)
        for line in remarks_on_access(access, tree):
            print("cllm:", line, file=sys.stderr)
        sys.stderr.flush()

    run_front(tree, access, listener, on_ready)

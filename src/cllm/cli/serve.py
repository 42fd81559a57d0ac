"""``cllm serve``."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from cllm.cli.peer_flags import remark_on_variables
from cllm.cli.progress import open_bar
from cllm.cli.remarks import capacity, hint, remarks, remarks_on_access
from cllm.cli.settings_flags import ConfigFlag, ModelArgument, SettingFlags, settings_from_flags
from cllm.cli.startup import open_access
from cllm.config.settings import Settings
from cllm.config.sources import LoadedConfig
from cllm.errors import StartupError
from cllm.models import hub
from cllm.process.launch import Popen
from cllm.server.access import Access
from cllm.server.run import ServerSetup, address, address_elsewhere, listen, run_forever
from cllm.serving.sources import Source, list_sources
from cllm.store.open_servers import announce_open_server

if TYPE_CHECKING:
    from cllm.serving.registry import Registry

Launched = Annotated[Popen[bytes] | None, Parameter(parse=False)]
UntilStdinEnds = Annotated[
    bool,
    Parameter(help="Shut down as after SIGTERM when stdin ends, so when its parent process ends."),
]


def serve(
    model: ModelArgument = None,
    /,
    *,
    config: ConfigFlag = None,
    settings: SettingFlags | None = None,
    until_stdin_ends: UntilStdinEnds = False,
    launched: Launched = None,
) -> None:
    """Serve a model over HTTP until Ctrl-C, with the APIs of OpenAI, Anthropic and Ollama, and
    cLLM's own.
    """
    if until_stdin_ends:
        Thread(target=terminate_at_end_of_stdin, daemon=True).start()
    loaded = settings_from_flags(config, settings, model)
    tree = loaded.settings
    if remark := remark_on_variables(os.environ):
        print("cllm:", remark, file=sys.stderr)
    access = open_access(loaded)
    with hub.stderr_progress() as progress:
        sources = list_sources(loaded, progress)
    first = next((source for source in sources if source.is_first), None)
    params = None if first is None else first.read_params()

    listener = listen(tree.server.host, tree.server.port)
    scheme = "http" if tree.server.tls_certificate is None else "https"
    url = address(listener, scheme)
    preloaded = [s.name for s in sources if s.is_first or s.settings.model.preload]
    bar = open_bar(f"cllm: loading {', '.join(preloaded)}", announce=bool(preloaded))

    def on_ready(registry: Registry) -> None:
        bar.close()
        print_start(registry, loaded, sources, access, (url, address_elsewhere(listener, scheme)))

    def read_again() -> tuple[Settings, list[Source]]:
        again = settings_from_flags(config, settings, model)
        if names_models(loaded) and not names_models(again):
            raise StartupError("the settings no longer name a model")
        return again.settings, list_sources(again, again=True)

    keys_file = Path(tree.server.keys_file).expanduser()
    announced = nullcontext() if access.is_required else announce_open_server(keys_file, url)
    try:
        with announced:
            run_forever(
                ServerSetup(
                    settings=tree,
                    access=access,
                    sources=sources,
                    params=params,
                    listener=listener,
                    on_loading=bar.update,
                    on_ready=on_ready,
                    launched=launched,
                    read_again=read_again,
                )
            )
    finally:
        bar.close()


def terminate_at_end_of_stdin() -> None:
    """Raise SIGTERM in this process when stdin ends."""
    with suppress(OSError):
        while os.read(0, 4096):  # sys.stdin has a lock, which would block the exit of this process
            pass
    signal.raise_signal(signal.SIGTERM)


def print_start(
    registry: Registry,
    loaded: LoadedConfig,
    sources: Sequence[Source],
    access: Access,
    urls: tuple[str, str | None],
) -> None:
    """Print what is served. The first one of ``urls`` is for clients on this machine, the second
    for clients on other machines.
    """
    url, elsewhere = urls
    info = registry.models[0].info if registry.models else None
    engines = [len(service.engine.members) for service in registry.loaded.services[:1]]
    what = "each is loaded with its first request" if info is None else capacity(info, *engines)
    print(f"cLLM serves {describe(sources)} at {url}: {what}", file=sys.stderr)
    if elsewhere:
        print(
            f"cllm: other machines can use {elsewhere} if they can resolve that name",
            file=sys.stderr,
        )
    has_first = any(source.is_first for source in sources)
    about_model = remarks(loaded, info) if info is not None and has_first else ()
    for line in (*about_model, *remarks_on_access(access, loaded.settings)):
        print("cllm:", line, file=sys.stderr)
    is_base = bool(registry.models) and registry.models[0].task == "completion"
    print(
        hint(url, info, needs_key=access.is_required, is_base=is_base),
        file=sys.stderr,
        flush=True,
    )


def names_models(loaded: LoadedConfig) -> bool:
    """Return whether the settings name models or a folder of them."""
    settings = loaded.settings
    return bool(loaded.models or settings.model.path or settings.models.folder)


MAX_NAMES = 8


def describe(sources: Sequence[Source]) -> str:
    """Return the names of the models, or as many as fit on a line."""
    names = [source.name for source in sources]
    if len(names) <= MAX_NAMES:
        return ", ".join(names) or "no model yet"
    return f"{', '.join(names[:MAX_NAMES])} and {len(names) - MAX_NAMES} more"

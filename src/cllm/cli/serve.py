"""``cllm serve``."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from cllm.backends.registry import import_loader
from cllm.cli.progress import open_bar
from cllm.cli.remarks import capacity, hint, print_notes, remarks
from cllm.cli.settings_flags import ConfigFlag, ModelArgument, SettingFlags, settings_from_flags
from cllm.engine.settings import engine_params
from cllm.errors import StartupError
from cllm.models import catalog, hub
from cllm.observe import log
from cllm.process.launch import Popen
from cllm.server.run import address, address_elsewhere, is_loopback, listen, run_forever

if TYPE_CHECKING:
    from cllm.service import Service

Launched = Annotated[Popen[bytes] | None, Parameter(parse=False)]


def serve(
    model: ModelArgument = None,
    /,
    *,
    config: ConfigFlag = None,
    settings: SettingFlags | None = None,
    launched: Launched = None,
) -> None:
    """Serve a model over HTTP until Ctrl-C, with the APIs of OpenAI, Anthropic and Ollama, and
    cLLM's own.
    """
    loaded = settings_from_flags(config, settings, model)
    tree = loaded.settings
    print_notes(loaded)
    log.configure(tree.log.level)
    loader = import_loader(tree.backend.name)
    with hub.stderr_progress() as progress:
        path = loader.resolve(tree.model.path, tree.model.quantization, progress)
    name = tree.model.name or (catalog.derive_model_name(path) if path else tree.backend.name)
    params = engine_params(tree, path)

    if tree.server.enable_faults and not is_loopback(tree.server.host):
        raise StartupError(
            f"server.enable_faults needs a loopback address as server.host, not {tree.server.host}"
        )
    listener = listen(tree.server.host, tree.server.port)
    url = address(listener)
    bar = open_bar(f"cllm: loading {name}", announce=True)

    def on_ready(service: Service) -> None:
        bar.close()
        info = service.info
        print(f"cLLM serves {service.model_name} at {url}: {capacity(info)}", file=sys.stderr)
        if elsewhere := address_elsewhere(listener):
            print(
                f"cllm: other machines can use {elsewhere} if they can resolve that name",
                file=sys.stderr,
            )
        for line in remarks(loaded, info):
            print("cllm:", line, file=sys.stderr)
        print(hint(url, info), file=sys.stderr, flush=True)

    try:
        run_forever(tree, params, name, listener, bar.update, on_ready, launched)
    finally:
        bar.close()

"""``cllm serve``."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from cllm.backends.registry import import_loader
from cllm.cli.progress import open_bar
from cllm.cli.remarks import capacity, hint, print_notes, remarks, remarks_on_access
from cllm.cli.settings_flags import ConfigFlag, ModelArgument, SettingFlags, settings_from_flags
from cllm.engine.settings import engine_params
from cllm.models import catalog, hub
from cllm.observe import log
from cllm.process.launch import Popen
from cllm.server.access import Access, check_access
from cllm.server.run import address, address_elsewhere, listen, run_forever

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
    access = Access(tree)
    check_access(tree, access)
    loader = import_loader(tree.backend.name)
    with hub.stderr_progress() as progress:
        path = loader.resolve(tree.model.path, tree.model.quantization, progress)
    name = tree.model.name or (catalog.derive_model_name(path) if path else tree.backend.name)
    params = engine_params(tree, path)

    listener = listen(tree.server.host, tree.server.port)
    scheme = "http" if tree.server.tls_certificate is None else "https"
    url = address(listener, scheme)
    bar = open_bar(f"cllm: loading {name}", announce=True)

    def on_ready(service: Service) -> None:
        bar.close()
        info = service.info
        print(f"cLLM serves {service.model_name} at {url}: {capacity(info)}", file=sys.stderr)
        if elsewhere := address_elsewhere(listener, scheme):
            print(
                f"cllm: other machines can use {elsewhere} if they can resolve that name",
                file=sys.stderr,
            )
        for line in (*remarks(loaded, info), *remarks_on_access(access, tree)):
            print("cllm:", line, file=sys.stderr)
        print(hint(url, info, needs_key=access.is_required), file=sys.stderr, flush=True)

    try:
        run_forever(tree, access, params, name, listener, bar.update, on_ready, launched)
    finally:
        bar.close()

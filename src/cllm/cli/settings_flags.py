"""The settings as flags of a command: one flag for each option of ``cllm.config``, and short names
for some.

A command declares them like this, and gets only the flags that were given::

    def serve(model: ModelArgument = None, /, *, config: ConfigFlag = None, settings: SettingFlags |
    None = None): ...

Commands that load a model without serving it use ModelFlags instead, which name the model and how
to load it.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypedDict

from cyclopts import Group, Parameter

from cllm.cli.peer_flags import DEFAULT_VALUES, OTHER_NAMES
from cllm.config.file import show
from cllm.config.options import Option
from cllm.config.settings import OPTIONS
from cllm.config.sources import Given, LoadedConfig, check_value, load_settings, parse_value
from cllm.errors import StartupError

SHORT_NAMES = {
    "server.host": "--host",
    "server.port": "--port",
    "server.api_key": "--api-key",
    "server.insecure": "--insecure",
    "server.enable_faults": "--enable-faults",
    "cluster.urls": "--urls",
    "model.path": "--model",
    "model.max_context_length": "--context",
    "backend.llama_cpp.n_threads": "--threads",
    "scheduler.max_num_seqs": "--max-num-seqs",
}

ModelArgument = Annotated[str | None, Parameter(help="The model, the same as --model.")]
ConfigFlag = Annotated[
    Path | None, Parameter(name="--config", help="YAML file of settings. [default: CLLM_CONFIG]")
]


def find_section(option: Option) -> str:
    return option.key.rpartition(".")[0]


PANELS = {
    name: Group(name, sort_key=i)
    for i, name in enumerate(dict.fromkeys(map(find_section, OPTIONS.values())))
}


def flag(option: Option) -> Any:
    """Return the type of an option's flag, with its names, help and panel."""
    short = [SHORT_NAMES[option.key]] if option.key in SHORT_NAMES else []
    names = [option.flag, *short, *OTHER_NAMES.get(option.key, ())]
    help_text = f"{option.help} [default: {show(option.default)}]"
    kind = option.type | None if option.nullable else option.type
    reads = None
    if option.type in (int, float):  # as in variables: a flag's own conversion would round 1.5

        def reads(_: Any, tokens: Sequence[Any]) -> object:
            word = tokens[-1].value
            if word in DEFAULT_VALUES.get(option.key, ()):
                return option.default
            return check_value(option, Given(parse_value(option, word), tokens[-1].keyword)).value

    group = PANELS[find_section(option)]
    # with the opposites of switches, such as --no-mlock
    given = Parameter(name=names, help=help_text, group=group, converter=reads, negative=None)
    return Annotated[kind, given]


def flags(options: Iterable[Option]) -> Any:
    """Return the type of an argument that takes the flags of ``options``."""
    # a TypedDict may have any string as a key and omits flags that were not given, as
    # load_settings expects
    given: Any = TypedDict("Flags", {option.key: flag(option) for option in options}, total=False)  # type: ignore[misc]
    return Annotated[given, Parameter(name="*")]


# the other sections concern serving and HTTP, or have other flags there, such as --temperature
MODEL_SECTIONS = ("model.", "kv.", "backend.")
SERVED = {"model.name", "model.aliases"}

if TYPE_CHECKING:
    SettingFlags = dict[str, object]
    ModelFlags = dict[str, object]
else:
    SettingFlags = flags(OPTIONS.values())
    ModelFlags = flags(
        option
        for option in OPTIONS.values()
        if option.key.startswith(MODEL_SECTIONS) and option.key not in SERVED
    )


def settings_from_flags(
    config: Path | None, flags: Mapping[str, object] | None, model: str | None = None
) -> LoadedConfig:
    """Return the effective settings of a command, from its flags and the environment. Some commands
    take the ``model`` as an argument.

    Raises StartupError.
    """
    given = dict(flags or {})
    if model is not None:
        if "model.path" in given:
            raise StartupError(
                f"the model is named twice: {show(model)} and --model {show(given['model.path'])}"
            )
        given["model.path"] = model
    return load_settings(config, os.environ, given)

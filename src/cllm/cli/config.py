"""``cllm config``: shows the effective settings with their sources, and describes all settings."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import groupby
from typing import Annotated, Any

from cyclopts import App, Parameter

from cllm.cli.settings_flags import (
    SHORT_NAMES,
    ConfigFlag,
    SettingFlags,
    find_section,
    settings_from_flags,
)
from cllm.config.file import ALIASES, NOT_NEEDED, SWITCHES
from cllm.config.file import show as shown
from cllm.config.options import Option
from cllm.config.settings import MODEL_KEYS, OPTIONS, ModelSettings
from cllm.config.sources import LoadedConfig, get_value, set_value

app = App(name="config", help="Show the effective settings and describe all of them.")

SECRETS = {key for key, option in OPTIONS.items() if option.is_secret}
HIDDEN = "***"  # in place of a secret

JsonFlag = Annotated[
    bool, Parameter(help="Print one JSON object with settings, origins and notes.")
]


@app.command
def show(
    *, config: ConfigFlag = None, settings: SettingFlags | None = None, json: JsonFlag = False
) -> None:
    """Print the effective settings and their sources. The output is a YAML file that --config
    accepts.
    """
    loaded = settings_from_flags(config, settings)
    print(as_json(loaded) if json else as_lines(loaded))


@app.command
def docs() -> None:
    """Print the page docs/configuration.md, which describes all settings."""
    print(page(), end="")


def as_json(loaded: LoadedConfig) -> str:
    settings = loaded.settings.model_dump()
    for key in SECRETS:
        set_value(settings, key, visible_value(loaded, key))
    content = {
        "settings": settings,
        "models": {name: own_settings(loaded, name) for name in loaded.models},
        "adapters": list_adapters(loaded),
        "origins": loaded.origins,
        "notes": loaded.notes,
    }
    return json.dumps(content, indent=2)


def as_lines(loaded: LoadedConfig) -> str:
    lines = {key: f"{key}: {shown(visible_value(loaded, key), width=30_000)}" for key in OPTIONS}
    width = min(max(map(len, lines.values())), 60)
    return "\n".join(
        [
            *(f"{line:{width}}  # {loaded.origins[key]}" for key, line in lines.items()),
            *named_lines("models", {name: own_settings(loaded, name) for name in loaded.models}),
            *named_lines("adapters", list_adapters(loaded)),
            *(f"# note: {note}" for note in loaded.notes),
        ]
    )


def named_lines(section: str, named: dict[str, dict[str, Any]]) -> list[str]:
    """Return a section with names that the user chose as lines of YAML; none if it is empty."""
    lines = [f"  {shown(name)}: {shown(values, width=30_000)}" for name, values in named.items()]
    return [f"{section}:", *lines] if lines else []


def list_adapters(loaded: LoadedConfig) -> dict[str, dict[str, Any]]:
    return {name: adapter.model_dump() for name, adapter in loaded.adapters.items()}


def own_settings(loaded: LoadedConfig, name: str) -> dict[str, Any]:
    """Return the settings of a model of the section models that differ from those of the others."""
    settings = loaded.models[name]
    shared = loaded.settings.model_copy(update={"model": ModelSettings()})
    return {
        short: get_value(settings, key)
        for short, key in MODEL_KEYS.items()
        if get_value(settings, key) != get_value(shared, key)
    }


def visible_value(loaded: LoadedConfig, key: str) -> Any:
    value = get_value(loaded.settings, key)
    return HIDDEN if key in SECRETS and value is not None else value


INTRODUCTION = """\
# Configuration

This page lists all options. `cllm config docs` generates it from `src/cllm/config/settings.py`.

You can set every option in a YAML file, in the environment or as a flag. Later sources override earlier ones:

1. the default below,
2. the YAML file named by `--config` or `CLLM_CONFIG`,
3. the environment: `server.port` is `CLLM_SERVER_PORT`,
4. the flag: `server.port` is `--server.port`; underscores may be written as dashes.

```yaml
model:
  path: hf:owner/repo:q4_k_m
server:
  port: 9000
```

`cllm config show` prints the effective values and where each one came from. An unknown key, a value of the wrong type
or a value out of range stops the start with one line that names its source. An unknown environment variable that
begins with `CLLM_` is ignored with a warning. The variables that Kubernetes sets for a service named `cllm` or
`cllm-...` (`CLLM_SERVICE_HOST`, `CLLM_PORT=tcp://...`, also `CLLM_SERVER_PORT=tcp://...`) are ignored silently. An
empty variable counts as unset.

In the file, the sections `models` and `adapters` also have a mapping for each model and each LoRA adapter, by the name
that you choose: [several models](models.md).
"""

OTHER_NAMES = """\
## Other names

A YAML file may use these keys of other servers and earlier designs. If it has several names for one option, the
smallest value applies; the option's own name overrides all others.

| Key | Read as |
|---|---|
"""

WITHOUT_EFFECT = """\
## Keys without effect

These keys are accepted in a YAML file, with a note at startup.

| Key | Why it is not needed |
|---|---|
"""


def page() -> str:
    """Return a page about all options, as Markdown."""
    switches = {f"{key}: true": f"{name}: {value}" for key, (name, value) in SWITCHES.items()}
    return "\n".join(
        [
            *sections(),
            OTHER_NAMES + table(ALIASES | switches, "`{}`"),
            WITHOUT_EFFECT + table(NOT_NEEDED, "{}"),
        ]
    )


def sections() -> Iterator[str]:
    yield INTRODUCTION
    for name, group in groupby(OPTIONS.values(), key=find_section):
        rows = "".join(row(option) for option in group)
        yield f"## {name}\n\n| Key | Default | Values | What it does |\n|---|---|---|---|\n{rows}"


def row(option: Option) -> str:
    short = f" (`{SHORT_NAMES[option.key]}`)" if option.key in SHORT_NAMES else ""
    return (
        f"| `{option.key}`{short} | `{shown(option.default)}` | {option.expects} | "
        f"{option.help} |\n"
    )


def table(entries: dict[str, str], form: str) -> str:
    return "".join(f"| `{key}` | {form.format(text)} |\n" for key, text in entries.items())

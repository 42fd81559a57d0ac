"""Combines the settings from their sources.

Later sources win: defaults < YAML file < environment (``CLLM_SERVER_PORT``) < flags
(``--server.port``).
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from cllm.config.file import (
    ALIASES,
    NOT_NEEDED,
    SWITCHES,
    Given,
    describe_unknown_key,
    read_exponents,
    read_yaml,
    show,
)
from cllm.config.options import Option, list_options
from cllm.config.settings import MODEL_KEYS, OPTIONS, Adapter, Settings
from cllm.errors import StartupError

VARIABLES = {option.variable: option for option in OPTIONS.values()}
VARIABLES["CLLM_API_KEY"] = OPTIONS["server.api_key"]  # also the key that client commands send
# CLLM_ variables that are not settings: the config file, and how client commands reach a server.
OTHER_VARIABLES = frozenset({"CLLM_CONFIG", "CLLM_URL"})
MAPPINGS = frozenset(key for key, option in OPTIONS.items() if option.expects_of_entries)
LISTS = frozenset(key for key, option in OPTIONS.items() if option.is_list)
FILE_KEYS = frozenset({*OPTIONS, *ALIASES, *SWITCHES, *NOT_NEEDED})
ADAPTER_OPTIONS = {option.key: option for option in list_options(Adapter)}
# Names of the variables that Kubernetes sets for a service. NAME_PORT may also be an option, so its
# value decides.
SERVICE_VARIABLE = re.compile(
    r"CLLM_(\w+_)?(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT_\d+_(TCP|UDP|SCTP)(_[A-Z]+)?)"
)
SERVICE_ADDRESS = re.compile(r"(tcp|udp|sctp)://\S+:\d+")


@dataclass(frozen=True, slots=True)
class LoadedConfig:
    """The effective settings, the origin of each dotted key, and notes for the operator, one line
    each.

    An origin is "default", "cllm.yaml:12", "CLLM_SERVER_PORT" or "--server.port". ``models`` has
    the settings of each model in the section models of the file: the global settings, overridden by
    the model's.
    """

    settings: Settings
    origins: dict[str, str]
    notes: list[str]
    models: dict[str, Settings] = field(default_factory=dict)
    adapters: dict[str, Adapter] = field(default_factory=dict)


def load_settings(
    config: Path | None, environ: Mapping[str, str], flags: Mapping[str, object]
) -> LoadedConfig:
    """Combine the settings from all sources. ``config`` is the YAML file; without it, CLLM_CONFIG
    may name one. ``flags`` maps the dotted keys of the given flags to their values.

    Raises StartupError with one line that names the source (file and line, variable or flag) and
    the key.
    """
    named = environ.get("CLLM_CONFIG")
    path = Path(named) if config is None and named else config
    path = path and path.expanduser()
    given, models, adapters, notes = from_file(path) if path is not None else ({}, {}, {}, [])
    from_variables, more_notes = from_environment(environ)
    given |= from_variables | from_flags(flags)
    origins = {key: given[key].origin if key in given else "default" for key in OPTIONS}
    shared = {key: one for key, one in given.items() if not key.startswith("model.")}
    of_models = {
        name: make_settings(shared | of_model | {"model.name": Given(name, "")})
        for name, of_model in models.items()
    }
    return LoadedConfig(make_settings(given), origins, notes + more_notes, of_models, adapters)


def make_settings(given: Mapping[str, Given]) -> Settings:
    """Return the settings with these values, which have been checked."""
    tree: dict[str, Any] = {}
    for key, one in given.items():
        set_value(tree, key, one.value)
    return Settings.model_validate(tree)


def get_value(settings: Settings, key: str) -> Any:
    """Return the value of a dotted key."""
    value: Any = settings
    for name in key.split("."):
        value = getattr(value, name)
    return value


def set_value(tree: dict[str, Any], key: str, value: object) -> None:
    *path, leaf = key.split(".")
    for name in path:
        tree = tree.setdefault(name, {})
    tree[leaf] = value


def check_value(option: Option, given: Given, named: str = "") -> Given:
    """Return ``given`` with its value converted to the option's type. ``named`` is the name that a
    file uses for the option.

    Raises StartupError, naming the source and the expected type.
    """
    tree: dict[str, Any] = {}
    set_value(tree, option.key, read_number(option, given.value))
    try:
        return Given(get_value(Settings.model_validate(tree), option.key), given.origin)
    except ValidationError as error:
        path = error.errors(include_url=False)[0]["loc"][option.key.count(".") + 1 :]
    entries = given.value if isinstance(given.value, dict) else {}
    entry = str(path[0]) if path and entries else None
    source = given.origin if entry is None else given.places.get(entry, given.origin)
    source += f": {named}" if named else ""
    if entry is None:
        instead = "" if option.is_secret else f", not {show(given.value)}"
        is_text = option.type is str and not option.expects_of_entries
        if is_text and isinstance(given.value, bool | int | float):
            instead += "; write it in quotes"
        raise StartupError(f"{source} must be {option.expects}{instead}")
    if len(path) > 1:
        raise StartupError(f"{source}: a name must be one line of text, not {show(entry)}")
    value = show(entries[entry])
    raise StartupError(
        f"{source}: {show(entry)[1:-1]} must be {option.expects_of_entries}, not {value}"
    )


def read_number(option: Option, value: object) -> object:
    """Return the number that PyYAML read as text, if the option wants one; else ``value``."""
    wants_number = (option.expects_of_entries or option.expects).startswith("a number")
    return read_exponents(value) if wants_number else value


def from_file(
    path: Path,
) -> tuple[dict[str, Given], dict[str, dict[str, Given]], dict[str, Adapter], list[str]]:
    """Return the settings of a YAML file under their own names, those of each model in it, its
    adapters, and a note for each key that is not used as written.
    """
    entries: dict[str, Given] = {}
    notes = []
    keys: dict[str, Collection[str]] = {"models": MODEL_KEYS, "adapters": ADAPTER_OPTIONS}
    leaves, named = read_yaml(path, FILE_KEYS, MAPPINGS, LISTS, keys)
    for key, entry in leaves.items():
        if key in NOT_NEEDED:
            notes.append(f"{entry.origin}: {key} is not needed: {NOT_NEEDED[key]}")
            continue
        if key in SWITCHES:
            notes += read_switch(key, entry, leaves, entries)
            continue
        option = OPTIONS[ALIASES.get(key, key)]
        entries[key] = check_value(option, entry, key)
    for target in dict.fromkeys(ALIASES.values()):
        others = {
            key: entries.pop(key)
            for key, canonical in ALIASES.items()
            if canonical == target and key in entries
        }
        if not others:
            continue
        how = "by its own name"
        if target not in entries:
            taken = min(others, key=lambda key: as_limit(others[key].value))
            how = f"by {taken}, the smallest"
            entries[target] = others.pop(taken)
        if others:
            winner = entries[target]
            losers = ", ".join(f"{key}: {show(other.value)}" for key, other in others.items())
            notes.append(
                f"{winner.origin}: {target} is {show(winner.value)} {how}; ignored: {losers}"
            )
    of_models = {
        name: {
            MODEL_KEYS[key]: check_value(OPTIONS[MODEL_KEYS[key]], entry, f"models.{name}.{key}")
            for key, entry in values.items()
        }
        for name, values in named["models"].items()
    }
    adapters = {name: make_adapter(name, values) for name, values in named["adapters"].items()}
    return entries, of_models, adapters, notes


def read_switch(
    key: str, given: Given, leaves: Mapping[str, Given], entries: dict[str, Given]
) -> list[str]:
    """Add what a switch means to ``entries``, unless ``leaves`` has that option too; then return a
    note. Raises StartupError.
    """
    target, value = SWITCHES[key]
    if not isinstance(given.value, bool):
        raise StartupError(f"{given.origin}: {key} must be true or false, not {show(given.value)}")
    if not given.value:
        return []
    if (other := leaves.get(target)) is None:
        entries[target] = check_value(OPTIONS[target], Given(value, given.origin), key)
    elif other.value != value:
        winner = f"{other.origin}: {target} is {show(other.value)} by its own name"
        return [f"{winner}; ignored: {key}: true"]
    return []


def make_adapter(name: str, given: Mapping[str, Given]) -> Adapter:
    """Return the settings of an adapter. Raises StartupError."""
    try:
        values = {key: read_number(ADAPTER_OPTIONS[key], one.value) for key, one in given.items()}
        return Adapter.model_validate(values)
    except ValidationError as error:
        key = str(error.errors(include_url=False)[0]["loc"][0])
    if key not in given:
        raise StartupError(f"adapters.{name} needs a {key}")
    one = given[key]
    expects = ADAPTER_OPTIONS[key].expects
    raise StartupError(
        f"{one.origin}: adapters.{name}.{key} must be {expects}, not {show(one.value)}"
    )


def as_limit(value: object) -> float:
    """Return ``value`` as a number; null means no limit."""
    return value if isinstance(value, int) else math.inf


def from_flags(flags: Mapping[str, object]) -> dict[str, Given]:
    """Return the values of flags. Raises StartupError for unknown ones."""
    given = {}
    for key, value in flags.items():
        if key not in OPTIONS:
            raise StartupError("--" + describe_unknown_key(key, OPTIONS))
        option = OPTIONS[key]
        given[key] = check_value(option, Given(from_json(option, value), option.flag))
    return given


def from_environment(environ: Mapping[str, str]) -> tuple[dict[str, Given], list[str]]:
    """Return the settings in the environment, and a note for each ignored variable that looks like
    a setting. An empty setting counts as unset.
    """
    given = {}
    notes = []
    for variable in sorted(environ):
        if (
            not variable.startswith("CLLM_")
            or variable in OTHER_VARIABLES
            or is_from_kubernetes(variable, environ)
        ):
            continue
        if variable in VARIABLES and not environ[variable]:
            continue  # templates of containers often set empty variables
        if variable in VARIABLES:
            option = VARIABLES[variable]
            given[option.key] = check_value(
                option, Given(parse_value(option, environ[variable]), variable)
            )
        else:
            notes.append(
                "ignored: " + describe_unknown_key(variable, {*VARIABLES, *OTHER_VARIABLES})
            )
    return given, notes


def is_from_kubernetes(variable: str, environ: Mapping[str, str]) -> bool:
    """Return whether Kubernetes set the variable, as it does in each pod for a service named cllm,
    cllm-server etc.
    """
    if variable.endswith("_PORT") and SERVICE_ADDRESS.fullmatch(environ[variable]):
        return True
    return variable not in VARIABLES and SERVICE_VARIABLE.fullmatch(variable) is not None


def parse_value(option: Option, text: str) -> object:
    """Return the text converted to the option's type, or the text itself if that fails."""
    if option.nullable and text.lower() in ("", "null", "none"):
        return None
    try:
        if option.type is bool:
            return {"true": True, "1": True, "false": False, "0": False}[text.strip().lower()]
        return option.type(text) if option.type in (int, float) else from_json(option, text)
    except (KeyError, ValueError):
        return text


def from_json(option: Option, value: object) -> object:
    """Return the mapping that ``value`` contains as JSON text; any other value unchanged."""
    if option.expects_of_entries and isinstance(value, str):
        try:
            return json.loads(value)
        except (ValueError, RecursionError):
            return value
    return value

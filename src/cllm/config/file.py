"""Reads a YAML file as flat dotted keys with line numbers, and rejects YAML's other features.

Aliases, tags, duplicate keys and unknown keys are errors. Each error is one line that names file,
line and key. A few keys take a mapping of names to values, or a list, which is kept whole.
"""

from __future__ import annotations

import difflib
import json
import re
from codecs import BOM_UTF16_BE, BOM_UTF16_LE
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import NoneType
from typing import Any

import yaml
from pydantic_core import from_json

from cllm.errors import StartupError
from cllm.input_files import read_input

MAX_FILE_BYTES = 1_000_000

# Other names of settings, taken from YAML files of other servers and earlier designs. If several
# names of a setting are given, they all mean the same limit, so the smallest applies.
ALIASES = {
    "scheduler.max_batch_size": "scheduler.max_num_seqs",
    "resources.max_batch_size": "scheduler.max_num_seqs",
    "backend.llama_cpp.n_seq_max": "scheduler.max_num_seqs",
    "backend.llama_cpp.n_batch": "scheduler.max_num_batched_tokens",
    "resources.kv_cache_max_memory_mb": "kv.max_memory_mb",
    "cache.default_max_size": "cache.max_results",
    "cache.default_max_memory_mb": "cache.max_memory_mb",
}

# Switches of earlier designs: true means this value of another option, and false changes nothing.
SWITCHES = {"server.use_libtorch": ("backend.name", "torch")}

# Keys that a YAML file may contain although they change nothing, with the reason that the user
# sees.
NOT_NEEDED = {
    "server.num_threads": "one event loop serves all connections, without worker threads",
    "server.min_threads": "one event loop serves all connections, so there is no thread pool to "
    "keep filled",
    "scheduler.max_iterations": "the engine steps while there is work; each request ends by its "
    "own limits",
    "scheduler.batch_timeout_ms": "batches are continuous: sequences join and leave at every step",
    "scheduler.loop_interval": "each step begins when the one before has ended",
    "scheduler.idle_loop_interval": "an idle engine sleeps until a request wakes it",
    "scheduler.wait_poll_interval_ms": "tokens are pushed to waiting requests; nothing polls",
    "resources.kv_cache_max_size": "the KV cache is limited by memory (kv.max_memory_mb), not by "
    "entries",
    "cache.eviction_threshold": "at a limit, the least recently used result is evicted",
    "cache.cleanup_interval": "new results evict old ones, so nothing has to be cleaned up",
}


# The last parts of keys in files of other servers -> the setting to use instead.
PEER_KEYS = {
    **dict.fromkeys(("n_ctx", "ctx_size", "num_ctx", "max_model_len"), "model.max_context_length"),
    **dict.fromkeys(("model_path", "hf_repo", "hf_model_repo_id", "repo_id"), "model.path"),
    **dict.fromkeys(("alias", "model_alias", "served_model_name"), "model.name"),
    **dict.fromkeys(("parallel", "n_parallel", "num_parallel"), "scheduler.max_num_seqs"),
    **dict.fromkeys(("n_batch", "batch_size"), "scheduler.max_num_batched_tokens"),
    **dict.fromkeys(("ubatch_size",), "backend.llama_cpp.n_ubatch"),
    **dict.fromkeys(("threads", "num_thread"), "backend.llama_cpp.n_threads"),
    **dict.fromkeys(("gpu_layers", "num_gpu", "ngl"), "backend.llama_cpp.n_gpu_layers"),
    **dict.fromkeys(("flash_attn", "flash_attention"), "backend.llama_cpp.flash_attention"),
    **dict.fromkeys(("split_mode", "tensor_parallel_size"), "backend.llama_cpp.split"),
    **dict.fromkeys(("mmap", "no_mmap"), "backend.llama_cpp.use_mmap"),
    "mlock": "backend.llama_cpp.use_mlock",
    **dict.fromkeys(("type_k", "type_v", "cache_type_k", "cache_type_v"), "kv.type"),
    **dict.fromkeys(("kv_cache_dtype",), "kv.type"),
    "gpu_memory_utilization": "kv.max_memory_mb",
    **dict.fromkeys(("n_predict", "num_predict"), "sampling.max_tokens"),
    "temp": "sampling.temperature",
    "models_dir": "models.folder",
}


@dataclass(frozen=True, slots=True)
class Given:
    """A given value, and its origin ("cllm.yaml:12", "CLLM_SERVER_PORT", "--server.port").

    ``places`` has the origins of a mapping's entries, if they differ from that.
    """

    value: object
    origin: str
    places: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Compound:
    """A list or a mapping where a single value is expected; ``kind`` is "a list" or "a mapping"."""

    kind: str


def show(value: object, width: int = 80) -> str:
    """Return a value as YAML writes it, on one line and cut to ``width`` characters."""
    if isinstance(value, Compound):
        return value.kind
    if not isinstance(value, str | bool | int | float | dict | list | NoneType):
        return "a list"
    try:
        text = json.dumps(value, ensure_ascii=isinstance(value, str) and not value.isprintable())
    except ValueError:  # Python refuses to write numbers of thousands of digits
        return "a huge number"
    return text if len(text) <= width else text[: width - 3] + "..."


def describe_unknown_key(name: str, known: Collection[str]) -> str:
    """Return a message that no setting has this name, with up to three similar names."""
    section, _, last = name.rpartition(".")
    plain = last.replace("-", "_")
    sections = {key.rpartition(".")[0] for key in known}  # the key's own section is not a hint
    candidates = [key for key in known if key not in sections or not name.startswith(f"{key}.")]
    peer = PEER_KEYS.get(plain.lower(), "")
    peers = [key for key in (peer, peer.removeprefix("model.")) if key in candidates]
    same = f"{section}.{plain}".lstrip(".")
    near = (
        [same] * (same in candidates)
        or peers[:1]
        or sorted(key for key in candidates if key.endswith(f".{plain}"))
        or difflib.get_close_matches(name, candidates, 1, 0.7)
    )
    hint = f"; did you mean {' or '.join(near[:3])}?" if near else ""
    return f"{show(name)[1:-1]} is not a setting{hint}"


def read_auto(value: object) -> object:
    """Return None for auto, and any other value unchanged."""
    return None if str(value).lower() == "auto" else value


def strip_brackets(value: object) -> object:
    """Return an IPv6 address without a URL's brackets; any other value unchanged."""
    is_bracketed = isinstance(value, str) and re.fullmatch(r"\[[^\[\]]*:[^\[\]]*\]", value)
    return str(value)[1:-1] if is_bracketed else value


NUMBER = re.compile(r"[-+]?[\d.]+[eE][-+]?\d+", re.ASCII)


def read_exponents(value: object) -> object:
    """Return numbers such as 1e-3, which PyYAML reads as text, also in a mapping; any other value
    unchanged.
    """
    if isinstance(value, dict):
        return {key: read_exponents(one) for key, one in value.items()}
    is_number = isinstance(value, str) and NUMBER.fullmatch(value)
    try:
        return float(str(value)) if is_number else value
    except ValueError:  # for example, a number with two points
        return value


def split_names(value: object) -> object:
    """Split a text at its commas, or read it as JSON if it begins like a list; return any other
    value unchanged.

    Raises ValueError for invalid JSON.
    """
    if not isinstance(value, str):
        return value
    if value.lstrip().startswith("["):
        return from_json(value)
    return list(filter(None, map(str.strip, value.split(","))))


class PlainLoader(yaml.SafeLoader):
    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        # A few lines of nested aliases can expand to gigabytes; a settings file needs none.
        if self.check_event(yaml.AliasEvent):
            mark = self.current_event.start_mark
            raise yaml.MarkedYAMLError(problem="aliases (*name) are not allowed", problem_mark=mark)
        return super().compose_node(parent, index)


NO_KEYS: Mapping[str, Collection[str]] = {}
NAME = re.compile(r"[^\x00-\x1f\x7f]{1,300}")


def read_yaml(
    path: Path,
    keys: Collection[str],
    mappings: Collection[str] = (),
    lists: Collection[str] = (),
    named_keys: Mapping[str, Collection[str]] = NO_KEYS,
) -> tuple[dict[str, Given], dict[str, dict[str, dict[str, Given]]]]:
    """Return the leaves of the file, and those of each name in the sections of ``named_keys``.

    The file may contain the dotted ``keys``. Values of those in ``mappings`` are mappings; values
    of those in ``lists`` may be lists. ``named_keys`` has the dotted keys under a name, by section.

    Raises StartupError if the file cannot be read or has an error.
    """
    text = read_text(path)
    collector = Collector(path, keys, mappings, lists, named_keys)
    try:
        root = yaml.compose(text, Loader=PlainLoader)
        if root is not None and read_value(root, f"{path}:1") is not None:
            collector.collect(root, "")
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        raise StartupError(f"{path}:{line}: not valid YAML: {describe_problem(error)}") from None
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise StartupError(
            f"{path}:{line}: not valid YAML: unprintable character #x{error.character:04x}"
        ) from None
    except RecursionError:
        raise StartupError(f"{path}: nested too deeply") from None
    return collector.entries, collector.named


def describe_problem(error: yaml.MarkedYAMLError) -> str:
    """Return the problem, with a hint if a tab caused it: YAML has several rules for tabs."""
    tab = "; use spaces instead of tabs" if r"'\t'" in str(error.problem) else ""
    return f"{error.problem}{tab}"


def read_text(path: Path) -> str:
    """Return the text of a settings file. Raises StartupError."""
    try:
        content = read_input(path, MAX_FILE_BYTES + 1)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise StartupError(f"{path}: cannot be read: {reason}") from None
    if len(content) > MAX_FILE_BYTES:
        raise StartupError(f"{path}: larger than {MAX_FILE_BYTES} bytes, so not a file of settings")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        if content.startswith((BOM_UTF16_LE, BOM_UTF16_BE)):
            raise StartupError(f"{path}: is UTF-16 text; save it as UTF-8") from None
        line = content.count(b"\n", 0, error.start) + 1
        raise StartupError(f"{path}:{line}: not valid UTF-8") from None


class Collector:
    """Walks the nodes of one file and fills ``entries`` and ``named``."""

    def __init__(
        self,
        path: Path,
        keys: Collection[str],
        mappings: Collection[str],
        lists: Collection[str],
        named_keys: Mapping[str, Collection[str]] = NO_KEYS,
        title: str = "",
    ) -> None:
        """``title`` begins the errors about unknown keys."""
        self.path = path
        self.title = title
        self.keys = keys
        self.mappings = mappings
        self.lists = lists
        self.sections = {key[: dot.start()] for key in keys for dot in re.finditer(r"\.", key)}
        self.sections |= named_keys.keys()
        self.named_keys = named_keys
        self.entries: dict[str, Given] = {}
        self.named: dict[str, dict[str, dict[str, Given]]] = {name: {} for name in named_keys}
        self.seen: set[str] = set()

    def collect(self, node: yaml.Node, section: str) -> None:
        """Add the leaves under ``node`` to the entries; "server.port: 1" means the same as a
        mapping in "server".

        Raises StartupError, naming the line.
        """
        place = self.place(node)
        if not isinstance(node, yaml.MappingNode):
            value = read_value(node, place)
            raise StartupError(
                f"{place}: {section or 'the file'} must be a mapping, not {show(value)}"
                f"{self.suggest_mapping(section, value)}"
            )
        for key_node, value_node in node.value:
            if section in self.named and f"{section}.{key_node.value}" not in self.keys:
                self.collect_named(section, key_node, value_node)
                continue
            key = self.key(key_node, section)
            value = read_value(value_node, self.place(key_node))
            if key in self.mappings and isinstance(value_node, yaml.MappingNode):
                self.entries[key] = self.mapping(value_node, key, self.place(key_node))
            elif key in self.lists and isinstance(value_node, yaml.SequenceNode):
                self.entries[key] = Given(
                    [self.word(node, "a name") for node in value_node.value], self.place(key_node)
                )
            elif key in {*self.mappings, *self.lists} and value is None:
                continue
            elif key in self.keys:
                self.entries[key] = Given(value, self.place(key_node))
            elif value is not None:  # null is a mapping whose keys are all commented out
                self.collect(value_node, key)

    def suggest_mapping(self, section: str, value: object) -> str:
        """Return a hint for a value in place of a section's mapping."""
        if isinstance(value, str) and re.match(r"\w+:\S", value):
            return "; a space must follow a colon"
        main = [key for key in (f"{section}.path", f"{section}.name") if key in self.keys]
        return f"; did you mean {main[0]}?" if isinstance(value, str) and main else ""

    def collect_named(self, section: str, name_node: yaml.Node, node: yaml.Node) -> None:
        """Add the keys under a name that the user chose."""
        name, place = self.word(name_node, "a name"), self.place(name_node)
        if not isinstance(node, yaml.MappingNode):
            value = show(read_value(node, place))
            raise StartupError(
                f"{place}: {section}.{name} must be a mapping with a path, not {value}"
            )
        if not NAME.fullmatch(name):
            raise StartupError(f"{place}: a name must be one line of up to 300 characters")
        if name in self.named[section]:
            raise StartupError(f"{place}: {section}.{name} is given twice")
        title = f"{section}.{name}: "
        inner = Collector(self.path, self.named_keys[section], (), {"aliases"}, title=title)
        inner.collect(node, "")
        self.named[section][name] = inner.entries

    def mapping(self, node: yaml.MappingNode, key: str, origin: str) -> Given:
        values: dict[str, object] = {}
        places = {}
        for name_node, value_node in node.value:
            name, place = self.word(name_node), self.place(name_node)
            if name in values:
                raise StartupError(f"{place}: {key}.{show(name)[1:-1]} is given twice")
            values[name], places[name] = read_value(value_node, place), place
        return Given(values, origin, places)

    def word(self, node: yaml.Node, what: str = "a key") -> str:
        if not isinstance(node, yaml.ScalarNode):
            place = self.place(node)
            raise StartupError(
                f"{place}: {what} must be a word, not {show(read_value(node, place))}"
            )
        return str(node.value)

    def key(self, node: yaml.Node, section: str) -> str:
        place, word = self.place(node), self.word(node)
        key = f"{section}.{word}" if section else word
        if key not in self.keys and key not in self.sections:
            message = describe_unknown_key(key, {*self.keys, *self.sections})
            raise StartupError(f"{place}: {self.title}{message}")
        if key in self.seen:
            raise StartupError(f"{place}: {self.title}{key} is given twice")
        self.seen.add(key)
        return key

    def place(self, node: yaml.Node) -> str:
        return f"{self.path}:{node.start_mark.line + 1}"


def read_value(node: yaml.Node, place: str) -> object:
    """Return the value of a plain scalar; for a list or a mapping, only its kind.

    Raises StartupError.
    """
    kind = node.tag.removeprefix("tag:yaml.org,2002:")
    if kind in ("str", "timestamp", "value", "merge"):
        return node.value
    if kind in ("seq", "map"):
        return Compound("a list" if kind == "seq" else "a mapping")
    try:
        if kind in ("int", "float", "bool", "null"):
            return PlainLoader("").construct_object(node)
    except (ValueError, LookupError):
        raise StartupError(f"{place}: {show(node.value)} cannot be read as {kind}") from None
    raise StartupError(f"{place}: the tag {show(node.tag)[1:-1]} is not allowed")

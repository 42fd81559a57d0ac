"""Every setting of cLLM, written once: type, default, bounds and help.

The YAML file, the environment, the flags, ``--help`` and ``docs/configuration.md`` are derived from the tree below;
``config_sources.py`` reads them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from types import NoneType
from typing import Annotated, Any, Literal, get_args, get_origin

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field
from pydantic.fields import FieldInfo

from cllm.config_file import ALIASES, NOT_NEEDED, split_names

ONE_LINE = r"^[^\x00-\x1f\x7f]+$"
Text = Annotated[str, Field(min_length=1, max_length=4096, pattern=ONE_LINE)]
Name = Annotated[str, Field(min_length=1, max_length=300, pattern=ONE_LINE)]
Names = Annotated[list[Name], BeforeValidator(split_names)]
NAMES = "names with commas between them, or a JSON list of names"
Weight = Annotated[float, Field(ge=0.001, le=1000)]
PriorityName = Literal["interactive", "normal", "batch"]


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False, hide_input_in_errors=True)


class Server(Section):
    """The HTTP server."""

    host: Text = Field(
        default="127.0.0.1", description="Address to listen on; 0.0.0.0 is reachable from other machines."
    )
    port: int = Field(default=8000, ge=0, le=65535, description="Port to listen on; 0 takes any free one.")
    allow_pull: bool = Field(
        default=False, description="Let clients of Ollama's API download models from the hub (POST /api/pull)."
    )
    max_body_mb: int = Field(
        default=4, ge=1, le=1024, description="Largest request body in MB; a larger one is refused (413)."
    )
    strict: bool = Field(
        default=False,
        description="Refuse requests with parameters that are not known (400); else these are counted and ignored.",
    )
    benchmark: bool = Field(
        default=False, description="Let clients run POST /benchmark, which keeps the engine busy for up to a minute."
    )
    drain_timeout: float = Field(
        default=30.0, ge=0, le=86400, description="Seconds that running streams get to end after SIGTERM."
    )


class Model(Section):
    """The model that is served."""

    path: Text | None = Field(
        default=None,
        description="A GGUF file, or hf:owner/repo[:quant] from the Hugging Face hub; null is the built-in model.",
    )
    name: Text | None = Field(default=None, description="Name shown in /v1/models; null takes it from the model.")
    aliases: Names = Field(
        default=[],
        description='Other names that requests may use for the model, or patterns such as claude-*; "*" accepts any.',
    )
    max_context_length: int | None = Field(
        default=None,
        ge=2,
        le=10_000_000,
        description="Tokens per sequence; null chooses from the model and the memory.",
    )
    draft_path: Text | None = Field(
        default=None,
        description="A small GGUF model with the same vocabulary, or hf:owner/repo[:quant], that guesses tokens.",
    )
    quantization: Text | None = Field(
        default=None, description="Which file of a hub repository to take when the path does not say, e.g. q4_k_m."
    )


class Scheduler(Section):
    """What is computed in one step."""

    max_num_seqs: int = Field(
        default=32, ge=1, le=256, description="Sequences computed at the same time; the others wait."
    )
    max_num_batched_tokens: int = Field(default=512, ge=1, le=8192, description="Tokens computed in one step, at most.")
    target_itl_ms: float | None = Field(
        default=1000.0,
        ge=1,
        le=600_000,
        description="Milliseconds from token to token that the prompts of others may cause; null is without limit.",
    )
    policy: Text = Field(
        default="fair",
        description="Who is served next: fair (classes, then the key served least), priority (classes, then arrival), "
        "fcfs, or package.module:Class.",
    )
    weights: dict[Name, Weight] = Field(
        default={},
        description="Shares of keys against the others, whose share is 1, e.g. {user-alice: 2}; a key is user- and the "
        "user of the body, or key- and the first 16 hex digits of the token's SHA-256. JSON in a variable or a flag.",
    )
    priorities: dict[Name, PriorityName] = Field(
        default={},
        description="Classes of keys, e.g. {user-nightly: batch}: their requests are of that class, or of a lower one "
        "that they name. JSON in a variable or a flag.",
    )
    speculation: Literal["off", "prompt_lookup", "draft_model"] = Field(
        default="prompt_lookup",
        description="Guess tokens and verify them in one step, while that pays: from the text so far, or with "
        "model.draft_path.",
    )
    max_draft_tokens: int = Field(default=8, ge=1, le=64, description="Guesses for one sequence in one step, at most.")
    max_queue_requests: int | None = Field(
        default=1000,
        ge=0,
        le=10_000_000,
        description="Requests that may wait ahead of one; further requests get 429. Null is without limit.",
    )
    max_queue_tokens: int | None = Field(
        default=None, ge=0, le=10**12, description="Prompt tokens that may wait, likewise; null is without limit."
    )
    max_queue_seconds: float | None = Field(
        default=300.0,
        ge=0,
        le=604800,
        description="Estimated seconds to the first token that a request may face; null is without limit.",
    )
    request_timeout: float | None = Field(
        default=600.0,
        gt=0,
        le=604800,
        description="Seconds a request may take, waiting included; null is without limit.",
    )
    trace_file: Text | None = Field(
        default=None,
        description="File to which every request is added when it has ended or was refused, for cllm simulate: times, "
        "lengths, keys and what prompts share, without a word of them; null records nothing.",
    )


class KV(Section):
    """The KV cache."""

    layout: Literal["auto", "partitioned", "unified"] = Field(
        default="auto",
        description="partitioned gives each sequence its own cells, the fastest for unrelated requests; unified is one "
        "pool for all, the better one for long shared prefixes; auto follows the load.",
    )
    type: Literal["f16", "q8_0", "q4_0"] = Field(
        default="f16",
        description="How keys and values are stored: q8_0 takes half of f16's memory, q4_0 a quarter; both change the "
        "answers a little and may be slower.",
    )
    max_memory_mb: int | None = Field(
        default=None, ge=1, le=100_000_000, description="Memory for the KV cache in MB; null chooses from what is free."
    )
    ram_cache_mb: int | None = Field(
        default=None,
        ge=0,
        le=100_000_000,
        description="RAM for prefixes that left the KV cache, in MB; null chooses from what is free, 0 is none.",
    )
    disk_cache: Text | None = Field(
        default=None, description="Folder for prefixes that outlive RAM and restarts; null keeps none."
    )
    disk_cache_mb: int = Field(default=10_000, ge=1, le=10**9, description="Size of that folder in MB, at most.")


class Cache(Section):
    """Results of finished requests, given again where computing them again would give the same."""

    max_results: int = Field(
        default=0,
        ge=0,
        le=10_000_000,
        description="Answers kept of requests without chance (temperature 0 or a seed); 0 is off.",
    )
    max_memory_mb: int = Field(default=64, ge=1, le=1_000_000, description="Memory for them in MB, at most.")


class Storage(Section):
    """What clients leave with the server."""

    max_responses: int = Field(
        default=1000,
        ge=0,
        le=10_000_000,
        description="Answers of /v1/responses kept in memory, for previous_response_id; 0 keeps none.",
    )
    max_responses_mb: int = Field(default=64, ge=1, le=1_000_000, description="Memory for them in MB, at most.")
    folder: Text | None = Field(
        default="~/.local/state/cllm",
        description="Folder for the files and batches of /v1/files and /v1/batches; null turns both off.",
    )
    max_files: int = Field(default=1000, ge=1, le=1_000_000, description="Files kept in it, at most.")
    max_files_mb: int = Field(default=2000, ge=1, le=10**9, description="Size of all files in MB, at most.")
    max_file_mb: int = Field(default=100, ge=1, le=1_000_000, description="Size of an uploaded file in MB, at most.")


class LlamaCpp(Section):
    """What llama.cpp is told when it loads the model."""

    n_threads: int | None = Field(
        default=None, ge=1, le=1024, description="Threads that compute; null takes all cores."
    )
    n_threads_batch: int | None = Field(
        default=None,
        ge=1,
        le=1024,
        description="Threads for steps of more than one token: prompts, several sequences; null takes n_threads.",
    )
    n_ubatch: int = Field(
        default=512, ge=1, le=8192, description="Tokens computed in one pass over the weights, at most."
    )
    n_gpu_layers: int = Field(
        default=99, ge=-1, le=10_000, description="Layers kept on the GPU, where there is one; 0 is none, -1 is all."
    )
    use_mmap: bool = Field(default=True, description="Map the model file into memory instead of reading it.")
    use_mlock: bool = Field(default=False, description="Lock the model in RAM, so that it is never swapped out.")


class Backend(Section):
    """What computes."""

    name: Literal["llama_cpp", "fake"] = Field(
        default="llama_cpp",
        description="llama_cpp computes; fake only keeps time like a model, for tests and load studies.",
    )
    llama_cpp: LlamaCpp = LlamaCpp()


class Sampling(Section):
    """How tokens are chosen where a request does not say."""

    temperature: float = Field(
        default=0.8, ge=0, le=100, description="0 takes the most probable token; more is more varied."
    )
    top_k: int = Field(
        default=40, ge=0, le=10_000_000, description="Keep this many of the most probable tokens; 0 is off."
    )
    top_p: float = Field(
        default=0.95, ge=0, le=1, description="Keep the best tokens up to this probability mass; 1 is off."
    )
    min_p: float = Field(
        default=0.05,
        ge=0,
        le=1,
        description="Leave out tokens less probable than this share of the best one; 0 is off.",
    )
    max_tokens: int | None = Field(
        default=None,
        ge=1,
        le=10_000_000,
        description="Tokens to generate at most; null goes on to the end of the context.",
    )


class Log(Section):
    """What the server writes to stderr."""

    level: Literal["debug", "info", "warning", "error"] = Field(
        default="info", description="The least that is worth a line."
    )


class Settings(Section):
    """All settings; ``Settings()`` is all defaults."""

    server: Server = Server()
    model: Model = Model()
    scheduler: Scheduler = Scheduler()
    kv: KV = KV()
    cache: Cache = Cache()
    storage: Storage = Storage()
    backend: Backend = Backend()
    sampling: Sampling = Sampling()
    log: Log = Log()


# CLLM_ variables that are no settings: the file to read, and what the client commands use to reach a server.
OTHER_VARIABLES = frozenset({"CLLM_CONFIG", "CLLM_API_KEY", "CLLM_URL"})


@dataclass(frozen=True, slots=True)
class Option:
    """One leaf of the settings tree; ``type`` is without None, ``expects`` completes "must be ...".

    ``expects_of_entries`` does so for each entry of a mapping; the type of a mapping is str, for it is given as JSON.
    The type of a list is str too, because a variable or a flag separates its entries by commas.
    """

    key: str
    type: Any
    nullable: bool
    default: object
    help: str
    expects: str
    expects_of_entries: str = ""
    is_list: bool = False

    @property
    def variable(self) -> str:
        return "CLLM_" + self.key.replace(".", "_").upper()

    @property
    def flag(self) -> str:
        return "--" + self.key.replace("_", "-")


def options_of(model: type[BaseModel], prefix: str = "") -> Iterator[Option]:
    for name, field in model.model_fields.items():
        key = prefix + name
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from options_of(field.annotation, key + ".")
        else:
            yield option_of(key, field)


def option_of(key: str, field: FieldInfo) -> Option:
    kind: Any = field.annotation
    nullable = NoneType in get_args(kind)
    if nullable:
        (kind,) = (part for part in get_args(kind) if part is not NoneType)
    if get_origin(kind) is Annotated:
        kind = get_args(kind)[0]
    if get_origin(kind) is list:
        return Option(key, str, nullable, field.get_default(), field.description or "", NAMES, is_list=True)
    if get_origin(kind) is dict:
        entry = get_args(kind)[1]
        number, bounds = get_args(entry) if get_origin(entry) is Annotated else (entry, None)
        entries = describe(number, bounds.metadata if bounds else [])
        expects = f"a mapping of names, each to {entries}"
        return Option(key, str, nullable, field.get_default(), field.description or "", expects, entries)
    expects = describe(kind, field.metadata) + (" or null" if nullable else "")
    return Option(key, kind, nullable, field.default, field.description or "", expects)


def describe(kind: Any, metadata: list[Any]) -> str:
    if get_origin(kind) is Literal:
        *others, last = get_args(kind)
        return f"{', '.join(others)} or {last}"
    text = {int: "a whole number", float: "a number", bool: "true or false", str: "one line of text"}[kind]
    for word, bound in (("from", "ge"), ("above", "gt"), ("up to", "le")):
        text += "".join(f" {word} {getattr(rule, bound)}" for rule in metadata if hasattr(rule, bound))
    return text


OPTIONS = {option.key: option for option in options_of(Settings)}
VARIABLES = {option.variable: option for option in OPTIONS.values()}
MAPPINGS = frozenset(key for key, option in OPTIONS.items() if option.expects_of_entries)
LISTS = frozenset(key for key, option in OPTIONS.items() if option.is_list)
FILE_KEYS = frozenset({*OPTIONS, *ALIASES, *NOT_NEEDED})

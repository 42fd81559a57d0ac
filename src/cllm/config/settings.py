"""Every setting of cLLM, written once: type, default, bounds and help. Each backend declares its
own in ``backends/<name>/options.py``.

The YAML file, the environment, the flags, ``--help`` and ``docs/configuration.md`` are derived from
the tree below; ``config/sources.py`` reads them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, create_model

from cllm.backends.registry import AUTO, BACKENDS, import_options
from cllm.config.file import read_auto, split_names, strip_brackets
from cllm.config.options import SECRET, list_options
from cllm.core.params import PARAMETERS
from cllm.core.request import PriorityName

ONE_LINE = r"^[^\x00-\x1f\x7f]+$"
Text = Annotated[str, Field(min_length=1, max_length=4096, pattern=ONE_LINE)]
Name = Annotated[str, Field(min_length=1, max_length=300, pattern=ONE_LINE)]
Names = Annotated[list[Name], BeforeValidator(split_names)]
Secret = Annotated[str, Field(min_length=1, max_length=4096, pattern=r"^[!-~]+$"), SECRET]
Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
Weight = Annotated[float, Field(ge=0.001, le=1000)]
if TYPE_CHECKING:
    BackendName = str
else:
    BackendName = Literal[(AUTO, *BACKENDS)]


class Section(BaseModel):
    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, allow_inf_nan=False, hide_input_in_errors=True
    )


class ServerSettings(Section):
    """The HTTP server."""

    host: Annotated[Text, BeforeValidator(strip_brackets)] = Field(
        default="127.0.0.1",
        description="Address to listen on; 0.0.0.0 is reachable from other machines.",
    )
    port: int = Field(
        default=8000, ge=0, le=65535, description="Port to listen on; 0 chooses a free port."
    )
    allow_pull: bool = Field(
        default=False,
        description="Let clients of Ollama's API download models from the hub (POST /api/pull).",
    )
    allow_model_changes: bool = Field(
        default=False,
        description="Let clients load and unload models, and delete and copy them in Ollama's API. "
        "With API keys, only an administrator may.",
    )
    max_body_mb: int = Field(
        default=4, ge=1, le=1024, description="Largest request body in MB; a larger one gets 413."
    )
    strict: bool = Field(
        default=False,
        description="Reject requests with unknown parameters (400) instead of counting and "
        "ignoring the parameters.",
    )
    benchmark: bool = Field(
        default=False,
        description="Let administrators put load on the server: load runs of the page /bench, and "
        "POST /benchmark, which takes up to a minute of the engine.",
    )
    enable_faults: bool = Field(
        default=False,
        description="Let clients cause faults of the engine with POST /faults, for tests; only on "
        "a loopback address.",
    )
    live_prompts: bool = Field(
        default=False,
        description="Show the end of each unfinished prompt, at most 1,000 characters, in the live "
        "view: whoever may watch it then reads what others ask. These are administrators or, "
        "without API keys, everyone on this machine.",
    )
    keys_file: Text = Field(
        default="~/.config/cllm/keys.json",
        description="File with the accounts and the hashes of their API keys, which `cllm keys` "
        "writes. If it exists, every request needs a key.",
    )
    api_key: Secret | None = Field(
        default=None,
        description="One API key for everything; every request then needs a key. CLLM_API_KEY "
        "sets it too, and keeps it out of the list of processes.",
    )
    insecure: bool = Field(
        default=False,
        description="Serve other machines without API keys: anyone who reaches the address may "
        "use the server.",
    )
    allowed_hosts: Names = Field(
        default=[],
        description="Host names by which clients may call the server, or patterns such as "
        "*.example.com. Without API keys, loopback names are always allowed, and no others by "
        "default; with keys, all are.",
    )
    cors_origins: Names = Field(
        default=[],
        description="Origins whose pages may call the server from a browser, such as "
        'https://chat.example.com; "*" allows all.',
    )
    open_metrics: bool = Field(default=False, description="Answer GET /metrics without an API key.")
    trusted_proxies: Names = Field(
        default=[],
        description="Addresses or networks of proxies whose X-Forwarded-For and "
        "X-Forwarded-Proto are believed.",
    )
    tls_certificate: Text | None = Field(
        default=None,
        description="PEM file with the certificate chain, for HTTPS; needs server.tls_key.",
    )
    tls_key: Text | None = Field(
        default=None, description="File with the private key of the certificate in PEM format."
    )
    shared_tenants: Names = Field(
        default=[],
        description="Tenants that share cached prefixes and results with each other; others "
        'share only among their own accounts. "*" means all.',
    )
    revoked_streams: Literal["end", "finish"] = Field(
        default="end",
        description="What happens to the running requests of an account whose last key is revoked.",
    )
    max_connections_per_address: int | None = Field(
        default=None,
        ge=1,
        le=65_536,
        description="Connections that one address may have; further ones are closed. Null means "
        "half of those that the limit of open files allows, and no limit for this machine.",
    )
    drain_timeout: float = Field(
        default=30.0,
        ge=0,
        le=86400,
        description="Seconds that running streams may take to finish after SIGTERM.",
    )


class ModelSettings(Section):
    """The model."""

    path: Text | None = Field(
        default=None,
        description="A GGUF file, a checkpoint (a folder with config.json and safetensors), or "
        "hf:owner/repo[:quant] from the Hugging Face hub; null selects the built-in model.",
    )
    name: Text | None = Field(
        default=None, description="Name in /v1/models; null derives it from the model."
    )
    aliases: Names = Field(
        default=[],
        description="Other names that requests may use for the model, or patterns such as "
        'claude-*; "*" accepts any.',
    )
    max_context_length: int | None = Field(
        default=None,
        ge=2,
        le=10_000_000,
        description="Tokens per sequence; null means as many as the model was trained for or as "
        "the KV cache holds, whichever is less.",
    )
    draft_path: Text | None = Field(
        default=None,
        description="A small model with the same vocabulary, as in model.path, that drafts tokens. "
        "It may be a GGUF file for a checkpoint, or the other way round.",
    )
    chat_template_file: Text | None = Field(
        default=None,
        description="A file with a Jinja chat template to use instead of the model's own.",
    )
    sha256: Sha256 | None = Field(
        default=None,
        description="The model file's SHA-256 in hex; a file with a different hash is not loaded.",
    )
    quantization: Text | None = Field(
        default=None,
        description="Quantization to download if the path does not name one, e.g. q4_k_m.",
    )
    keep_alive: float | None = Field(
        default=None,
        ge=0,
        le=31_536_000,
        description="Seconds without a request after which the model is unloaded; the next request "
        "loads it again. Null keeps it until another model needs its memory.",
    )
    pinned: bool = Field(
        default=False, description="Never unload the model to make room for another one."
    )
    preload: bool = Field(
        default=False,
        description="Load the model at the start instead of with its first request. If model.path "
        "names the only model, it is always loaded at the start.",
    )


class ModelsSettings(Section):
    """Several models in one server, see [models](models.md)."""

    folder: Text | None = Field(
        default=None,
        description="Folder whose GGUF files and checkpoints are served too, each under its name "
        "without .gguf.",
    )
    hub_cache: bool = Field(
        default=False,
        description="Serve the models in the Hugging Face cache too, as owner/repo:quantization. "
        "server.allow_pull implies it.",
    )
    default: Name | None = Field(
        default=None,
        description="Model for requests that name none; null means the one of model.path, or else "
        "the first one that is not a base model.",
    )
    max_memory_mb: int | None = Field(
        default=None,
        ge=1,
        le=100_000_000,
        description="Memory for all loaded models together in MB, including their KV caches; null "
        "means the memory that is free at the start.",
    )


class EngineSettings(Section):
    """The engines of a model."""

    count: Annotated[int | None, BeforeValidator(read_auto)] = Field(
        default=None,
        ge=1,
        le=64,
        description="Engines that share a model's requests; auto is one per GPU or NUMA node.",
    )


class Adapter(Section):
    """A LoRA adapter, which is served as a model."""

    path: Text = Field(description="A GGUF file or, for a checkpoint, a folder in PEFT's form.")
    base: Name | None = Field(
        default=None, description="The model that it changes; null means the default model."
    )
    scale: float = Field(default=1.0, ge=-100, le=100, description="Scale of its change.")


class SchedulerSettings(Section):
    """How requests are scheduled."""

    max_num_seqs: int = Field(
        default=64,
        ge=1,
        le=256,
        description="Largest number of sequences in a batch; other sequences wait.",
    )
    max_num_batched_tokens: int = Field(
        default=512, ge=1, le=8192, description="Largest number of tokens in one step."
    )
    target_itl_ms: float | None = Field(
        default=None,
        ge=1,
        le=600_000,
        description="Longest time in ms between two tokens of a stream that prefill may cause; "
        "null means 23 to 35 times the time of a token of a single sequence, at least 100.",
    )
    prefill_share: float | None = Field(
        default=None,
        gt=0,
        le=1,
        description="Share of the time for prompts while streams are generated: higher gives "
        "earlier first tokens, lower gives steadier streams. 1 computes prompts in every step. "
        "Null means 0.75 on CPUs and 1 on GPUs.",
    )
    policy: Text = Field(
        default="fair",
        description="Order of service: fair (by class, then the account with the least service), "
        "priority (by class, then by arrival), fcfs, or package.module:Class.",
    )
    weights: dict[Name, Weight] = Field(
        default={},
        description="Shares of accounts, e.g. {user-alice: 2}; the default is 1. An account is "
        "user- and the body's user, or key- and the first 16 hex digits of the API key's SHA-256. "
        "Use JSON in a variable or a flag.",
    )
    priorities: dict[Name, PriorityName] = Field(
        default={},
        description="Highest classes of accounts, e.g. {user-nightly: batch}; a request may name "
        "a lower one. Use JSON in a variable or a flag.",
    )
    speculation: Literal["auto", "prompt_lookup", "mtp", "draft_model", "off"] = Field(
        default="auto",
        description="Draft tokens and verify them in one step while that saves time: prompt_lookup "
        "takes them from the text so far, mtp from a head that the model was trained with, "
        "draft_model from model.draft_path. auto is prompt_lookup, and mtp if there is a head.",
    )
    max_draft_tokens: int = Field(
        default=8,
        ge=1,
        le=64,
        description="Maximum number of draft tokens for one sequence in one step.",
    )
    max_queue_requests: int | None = Field(
        default=1000,
        ge=0,
        le=10_000_000,
        description="Requests that may wait, including a new one; further requests get 429. Null "
        "means no limit.",
    )
    max_queue_tokens: int | None = Field(
        default=None,
        ge=0,
        le=10**12,
        description="Prompt tokens that may wait, including those of a new request; further "
        "requests get 429. Null means no limit.",
    )
    max_queue_seconds: float | None = Field(
        default=300.0,
        ge=0,
        le=604800,
        description="Longest estimated time to first token, in seconds; further requests get "
        "429. It applies once five sequences have ended. Null means no limit.",
    )
    request_timeout: float | None = Field(
        default=None,
        gt=0,
        le=604800,
        description="Seconds that a request may take, including its time in the queue; null "
        "means no limit.",
    )
    trace_file: Text | None = Field(
        default=None,
        description="File to record requests for cllm simulate: times, lengths, accounts and "
        "shared prefixes, but no text; null records nothing.",
    )


class KVSettings(Section):
    """The KV cache."""

    layout: Literal["auto", "paged", "partitioned", "unified"] = Field(
        default="auto",
        description="paged takes memory page by page and shares the pages of common prefixes, but "
        "needs Linux and a model on the CPU; partitioned gives each sequence cells for a whole "
        "context; unified is one pool. auto is paged if possible, otherwise partitioned if the "
        "memory is enough, otherwise unified.",
    )
    type: Literal["f16", "q8_0", "q4_0"] = Field(
        default="f16",
        description="Type of keys and values: q8_0 needs half of f16's memory, q4_0 a quarter; "
        "both change the answers slightly and may be slower.",
    )
    max_memory_mb: int | None = Field(
        default=None,
        ge=1,
        le=100_000_000,
        description="Memory for the KV cache in MB, with recurrent states and their checkpoints; "
        "null means half of the memory that the weights leave free, at most 4 GiB, or four fifths "
        "of the memory that they leave on GPUs. A paged cache takes it only as tokens need it.",
    )
    ram_cache_mb: int | None = Field(
        default=None,
        ge=0,
        le=100_000_000,
        description="RAM for prefixes evicted from the KV cache, in MB; null chooses by free "
        "memory, 0 is none.",
    )
    disk_cache: Text | None = Field(
        default=None,
        description="Folder to store prefixes on disk, so that they survive a restart; null "
        "stores none.",
    )
    disk_cache_mb: int = Field(
        default=10_000, ge=1, le=10**9, description="Maximum size of the folder disk_cache in MB."
    )


class CacheSettings(Section):
    """The cache of finished results, for requests whose result would be the same again."""

    max_results: int = Field(
        default=0,
        ge=0,
        le=10_000_000,
        description="Answers to keep for requests with temperature 0 or a seed; 0 is off.",
    )
    max_memory_mb: int = Field(
        default=64, ge=1, le=1_000_000, description="Maximum memory for these answers in MB."
    )


class StorageSettings(Section):
    """Data that clients store on the server."""

    max_responses: int = Field(
        default=1000,
        ge=0,
        le=10_000_000,
        description="Answers of /v1/responses to keep in memory for previous_response_id; 0 "
        "keeps none.",
    )
    max_responses_mb: int = Field(
        default=64, ge=1, le=1_000_000, description="Maximum memory for these answers in MB."
    )
    folder: Text | None = Field(
        default="~/.local/state/cllm",
        description="Folder for /v1/files and stored batches; null disables both.",
    )
    max_files: int = Field(default=1000, ge=1, le=1_000_000, description="Largest number of files.")
    max_files_mb: int = Field(
        default=2000, ge=1, le=10**9, description="Largest size of all files in MB."
    )
    max_file_mb: int = Field(
        default=100, ge=1, le=1_000_000, description="Largest size of an uploaded file in MB."
    )


class ClusterSettings(Section):
    """Several servers behind one address, see [clusters](cluster.md)."""

    urls: Names = Field(
        default=[],
        description="Addresses of the replicas that a front passes requests to, such as "
        "http://10.0.0.5:8000.",
    )
    key: Secret | None = Field(
        default=None,
        description="The secret that fronts and replicas share, at least 16 characters. Null "
        "reads it from cluster.key_file.",
    )
    key_file: Text | None = Field(
        default=None,
        description="File with the cluster key; null means cluster.key beside server.keys_file. A "
        "front creates it.",
    )
    lease_seconds: float = Field(
        default=3.0,
        ge=1.5,
        le=60,
        description="Seconds without an answer after which a replica gets no further requests; "
        "after three times as long, its running ones are given up.",
    )
    continue_seconds: float = Field(
        default=10.0,
        ge=0,
        le=3600,
        description="Seconds that a stream waits for a replica that can continue it, after its own "
        "has ended; then it ends with an error.",
    )
    hand_over: float = Field(
        default=0.0,
        ge=0,
        le=600,
        description="Seconds that a replica which shuts down may use to send the prefixes in its "
        "kv.disk_cache to another replica, which needs one too; 0 sends and accepts none. Fronts "
        "need it to choose the other replica.",
    )


BACKEND_OPTIONS = {name: import_options(name) for name in BACKENDS}
SUMMARIES = (f"{name} {module.SUMMARY}" for name, module in BACKEND_OPTIONS.items())
BACKEND_SECTIONS = {
    name: create_model(name, __base__=(module.Options, Section), __doc__=module.Options.__doc__)
    for name, module in BACKEND_OPTIONS.items()
    if module.Options.model_fields
}


class ChosenBackend(Section):
    """The backend, which computes."""

    name: BackendName = Field(
        default=AUTO,
        description="auto takes torch for a checkpoint, and else llama_cpp; "
        f"{'; '.join(SUMMARIES)}.",
    )


if TYPE_CHECKING:
    Backend = ChosenBackend
else:  # a section for each backend that has options
    Backend = create_model(
        "Backend",
        __base__=ChosenBackend,
        **{name: (section, section()) for name, section in BACKEND_SECTIONS.items()},
    )


class NewTokens(Section):
    """Defaults of sampling parameters, for requests that do not set them."""

    max_tokens: int | None = Field(
        default=None,
        ge=1,
        le=10_000_000,
        description="Maximum number of tokens to generate; null means all that fit the context.",
    )


if TYPE_CHECKING:
    Sampling = NewTokens
else:  # and the parameters that core/params.py declares with a default for the server
    Sampling = create_model(
        "Sampling",
        __base__=NewTokens,
        __doc__=NewTokens.__doc__,
        **{
            name: (
                parameter.type,
                Field(
                    default=parameter.default,
                    ge=parameter.bounds[0],
                    le=parameter.bounds[1],
                    description=parameter.help,
                ),
            )
            for name, parameter in PARAMETERS.items()
            if parameter.default is not None
        },
    )


class LogSettings(Section):
    """The log on stderr."""

    level: Literal["debug", "info", "warning", "error"] = Field(
        default="info", description="Lowest level to write."
    )
    format: Literal["console", "json"] = Field(
        default="console", description="Lines of text, or one JSON object on each line."
    )
    slow_seconds: float | None = Field(
        default=10.0,
        ge=0,
        le=86_400,
        description="A request whose first token takes this many seconds or more is logged as a "
        "warning, with the reason; null means never.",
    )
    summary_seconds: float | None = Field(
        default=10.0,
        ge=1,
        le=86_400,
        description="Seconds between two lines about each model that computes: requests, tokens "
        "per second, cells; null writes none.",
    )
    allow_header: bool = Field(
        default=False,
        description="Let requests choose the level of their own lines with the header "
        "x-cllm-log-level, such as debug.",
    )


class MetricsSettings(Section):
    """The metrics at /metrics, see [monitoring](howto/monitoring.md)."""

    vllm_names: bool = Field(
        default=False,
        description="Also export the metrics that vLLM has under vLLM's names, with vllm: instead "
        "of cllm:, for dashboards made for vLLM.",
    )
    max_accounts: int = Field(
        default=100,
        ge=0,
        le=10_000,
        description="How many accounts appear under their own names; the others are added up as "
        "other.",
    )


class TraceSettings(Section):
    """OpenTelemetry spans of requests, see [monitoring](howto/monitoring.md#opentelemetry)."""

    endpoint: str | None = Field(
        default=None,
        description="Where to send spans (OTLP over HTTP), such as "
        "http://127.0.0.1:4318/v1/traces; needs the extra cllm[otel].",
    )
    sample: float = Field(
        default=0.01,
        ge=0,
        le=1,
        description="The share of requests that are sent, unless their traceparent header decides.",
    )


class Settings(Section):
    """All settings; ``Settings()`` is all defaults."""

    server: ServerSettings = ServerSettings()
    model: ModelSettings = ModelSettings()
    models: ModelsSettings = ModelsSettings()
    engine: EngineSettings = EngineSettings()
    scheduler: SchedulerSettings = SchedulerSettings()
    kv: KVSettings = KVSettings()
    cache: CacheSettings = CacheSettings()
    storage: StorageSettings = StorageSettings()
    cluster: ClusterSettings = ClusterSettings()
    backend: Backend = Backend()
    sampling: Sampling = Sampling()
    log: LogSettings = LogSettings()
    metrics: MetricsSettings = MetricsSettings()
    trace: TraceSettings = TraceSettings()


OPTIONS = {option.key: option for option in list_options(Settings)}
MODEL_KEYS = {
    key.removeprefix("model."): key
    for key in OPTIONS
    if key.startswith(("model.", "kv.", "engine.", "backend.", "sampling.")) and key != "model.name"
}
"""Maps the keys that a file may have for one of several models to those of the options."""

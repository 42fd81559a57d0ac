"""Flags and variables of llama-server, llama-cli, vLLM and Ollama: other names of cLLM's options,
and hints for what has another name here or no counterpart. docs/cli.md shows both tables.

A flag is another name only if it means the same.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

# An option -> other names of its flag, in addition to the short name that cLLM itself uses.
OTHER_NAMES = {
    "model.path": ("-m",),
    "model.name": ("-a", "--alias", "--served-model-name"),
    "model.chat_template_file": ("--chat-template-file",),
    "model.max_context_length": ("-c", "--ctx-size", "--max-model-len"),
    "models.folder": ("--models-dir",),
    "scheduler.max_num_seqs": ("-np", "--parallel"),
    "scheduler.max_num_batched_tokens": ("-b", "--batch-size", "--max-num-batched-tokens"),
    "scheduler.policy": ("--scheduling-policy",),
    "server.tls_certificate": ("--ssl-cert-file", "--ssl-certfile"),
    "server.tls_key": ("--ssl-key-file", "--ssl-keyfile"),
    "backend.llama_cpp.n_threads": ("-t",),
    "backend.llama_cpp.n_threads_batch": ("-tb", "--threads-batch"),
    "backend.llama_cpp.n_ubatch": ("-ub", "--ubatch-size"),
    "backend.llama_cpp.n_gpu_layers": ("-ngl", "--n-gpu-layers", "--gpu-layers"),
    "backend.llama_cpp.split": ("-sm", "--split-mode"),
    "backend.llama_cpp.main_gpu": ("-mg", "--main-gpu"),
    "backend.llama_cpp.tensor_split": ("-ts", "--tensor-split"),
    "backend.llama_cpp.devices": ("-dev", "--device"),
    "backend.llama_cpp.cpu_moe_layers": ("-ncmoe", "--n-cpu-moe"),
    "backend.llama_cpp.override_tensors": ("-ot", "--override-tensor"),
    "backend.llama_cpp.rpc": ("--rpc",),
    "backend.llama_cpp.numa": ("--numa",),
    "backend.llama_cpp.use_mlock": ("--mlock",),
    "backend.llama_cpp.flash_attention": ("-fa", "--flash-attn"),
    "backend.llama_cpp.rope_scaling": ("--rope-scaling",),
    "backend.llama_cpp.rope_scale": ("--rope-scale",),
    "backend.llama_cpp.rope_freq_base": ("--rope-freq-base",),
    "backend.llama_cpp.yarn_original_context": ("--yarn-orig-ctx",),
    "sampling.max_tokens": ("-n", "--predict", "--n-predict"),
    "sampling.temperature": ("--temp",),
    "sampling.top_k": ("--top-k",),
    "sampling.top_p": ("--top-p",),
    "sampling.min_p": ("--min-p",),
}
# An option -> values of peers that mean cLLM's default.
DEFAULT_VALUES = {
    "model.max_context_length": ("0", "-1", "auto"),
    "scheduler.max_num_seqs": ("-1", "auto"),
    "backend.llama_cpp.n_threads": ("-1",),
    "backend.llama_cpp.n_threads_batch": ("-1",),
    "backend.llama_cpp.n_gpu_layers": ("all", "auto"),
    "sampling.max_tokens": ("-1",),
}
# Other names of flags of chat, run and generate that are not options of the configuration.
OTHER_SAMPLING_NAMES = {
    "max_tokens": ("-n", "--predict", "--n-predict"),
    "temperature": ("--temp",),
    "seed": ("-s",),
}

AUTOMATIC = "cLLM does this by itself."
FOUND = "The format is found from the model's chat template."
# Flags of peers -> what to use, or why there is nothing to set.
HINTS = {
    ("-hf", "-hfr", "--hf-repo"): "Use --model hf:owner/repo:Q4_K_M.",
    ("-hff", "--hf-file"): "Name the quantization: --model hf:owner/repo:Q4_K_M.",
    ("-hft", "--hf-token"): "Set the variable HF_TOKEN.",
    ("-mu", "--model-url", "-dr", "--docker-repo"): "Use --model hf:owner/repo:Q4_K_M, or a file.",
    ("-md", "--model-draft", "--spec-draft-model"): (
        "Use --model.draft-path FILE --scheduler.speculation draft_model."
    ),
    ("-ngld", "-devd", "-cd", "-ctkd", "-ctvd", "-td", "-tbd"): (
        "A draft model has no settings of its own."
    ),
    (
        *("--speculative-config", "--draft", "--draft-max", "--draft-min", "--draft-p-min"),
        *("--spec-type", "--spec-draft-n-max"),
    ): "Use --scheduler.speculation (mtp for a head) and --scheduler.max-draft-tokens.",
    ("-mm", "--mmproj", "-mmu", "--mmproj-url", "--limit-mm-per-prompt"): (
        "Images are not supported."
    ),
    ("--lora", "--lora-scaled", "--lora-modules", "--enable-lora"): (
        "Name adapters in the section adapters of the YAML file, see docs/models.md."
    ),
    ("--no-mmap", "--mmap"): "Use --backend.llama-cpp.use-mmap, true or false.",
    ("-ctk", "--cache-type-k", "-ctv", "--cache-type-v", "--kv-cache-dtype"): (
        "Use --kv.type, which applies to keys and values."
    ),
    ("-cram", "--cache-ram", "--swap-space", "--cpu-offload-gb"): "Use --kv.ram-cache-mb.",
    ("-kvu", "--kv-unified"): "Use --kv.layout; the default shares memory between all sequences.",
    ("-tp", "--tensor-parallel-size", "-pp", "--pipeline-parallel-size"): (
        "Use --backend.llama-cpp.split, and --backend.llama-cpp.devices to choose GPUs."
    ),
    ("-dp", "--data-parallel-size"): "Use --engine.count.",
    (
        "--gpu-memory-utilization",
        "--kv-cache-memory-bytes",
    ): "Use --kv.max-memory-mb, which limits the KV cache.",
    ("-cmoe", "--cpu-moe"): "Use --n-cpu-moe 1000, which keeps the experts of all layers in RAM.",
    ("-cb", "--cont-batching", "-nocb", "--no-cont-batching"): (
        "Batches are always continuous; --max-num-seqs 1 computes one request at a time."
    ),
    ("--enable-prefix-caching", "--no-enable-prefix-caching", "--cache-prompt", "--cache-reuse"): (
        f"Prefixes are always cached. {AUTOMATIC}"
    ),
    ("--no-cache-prompt", "-sps", "--slot-prompt-similarity"): (
        f"Prefixes are always cached. {AUTOMATIC}"
    ),
    ("--n_ctx", "--n-ctx", "--num_ctx", "--num-ctx"): "Use --context.",
    ("--list-devices",): "Use cllm doctor, which lists them.",
    ("--rope-freq-scale",): "Use --rope-scale with 1 divided by this value.",
    ("--chat-template-kwargs",): "Requests set it: chat_template_kwargs.",
    ("--seed", "--repeat-penalty", "--presence-penalty", "--frequency-penalty"): (
        "Requests set it."
    ),
    ("--enable-chunked-prefill", "--no-enable-chunked-prefill"): (
        "Long prompts are always computed in parts; --scheduler.prefill-share sets how fast."
    ),
    ("--jinja", "--no-jinja"): "Chat templates are always rendered as Jinja.",
    ("--chat-template",): "Use --chat-template-file FILE; the default is the model's own.",
    ("--reasoning-format", "--reasoning-parser", "--enable-reasoning"): FOUND,
    ("--tool-call-parser", "--enable-auto-tool-choice", "--chat_format", "--chat-format"): FOUND,
    ("--reasoning-budget",): "Requests set it: thinking_token_budget, or thinking.budget_tokens.",
    ("--reasoning-budget-message",): "Requests set it: reasoning_budget_message.",
    ("-to", "--timeout"): "Use --scheduler.request-timeout.",
    ("--max-num-queued-reqs",): "Use --scheduler.max-queue-requests.",
    ("--metrics",): "GET /metrics is always served; --server.open-metrics needs no key.",
    ("--slots", "--no-slots", "--props"): "GET /scheduler shows what runs; see cllm explain.",
    ("--slot-save-path",): "Use --kv.disk-cache FOLDER, which saves and finds prefixes by itself.",
    ("-ctxcp", "--ctx-checkpoints", "--swa-checkpoints", "-cms", "--checkpoint-min-step"): (
        "States are saved where later prompts are expected to continue; see docs/scheduling.md."
    ),
    ("--embedding", "--embeddings", "--pooling", "--runner", "--task"): (
        "Embeddings need no flag; encoders and rerankers are recognized."
    ),
    ("--rerank", "--reranking"): "Rerankers are recognized by their file.",
    ("--api-key-file",): "Use cllm keys add NAME, which gives each user a key.",
    ("--webui", "--no-webui", "--ui", "--no-ui", "--path", "--api-prefix"): (
        "A page is always served at /; a proxy can hide or move paths."
    ),
    ("--allowed-origins", "--cors-origins"): "Use --server.cors-origins.",
    ("-v", "--verbose", "-lv", "--verbosity", "--uvicorn-log-level"): "Use --log.level debug.",
    ("--dtype", "-q", "--quantization"): (
        "A GGUF file has its types; name the quantization: hf:owner/repo:Q4_K_M. For a checkpoint, "
        "use --backend.torch.dtype."
    ),
    ("--load-format", "--tokenizer", "--trust-remote-code", "--hf-config-path"): (
        "A GGUF file, or the folder of a checkpoint, contains everything; nothing else is loaded."
    ),
    ("--offline",): "Set the variable HF_HUB_OFFLINE to 1.",
    ("--download-dir",): "Set the variable HF_HOME.",
    ("--models-preset",): "Use --config FILE with a section models, see docs/models.md.",
    ("--models-max",): "Use --models.max-memory-mb, which limits the memory of all models.",
    ("--sleep-idle-seconds",): "Use --model.keep-alive SECONDS.",
    ("-cnv", "--conversation", "-no-cnv", "--no-conversation", "-i", "--interactive"): (
        "cllm chat is a conversation, cllm generate continues a text."
    ),
    ("-f", "--file"): "Read the text from stdin: cllm generate - < FILE.",
    (
        *("--nowordwrap", "--experimental", "--insecure-registry", "--override-kv"),
        *("--log-file", "--context-shift", "--swa-full", "--enforce-eager"),
    ): "There is no such option.",
    ("--warmup", "--no-warmup"): "A few tokens are always computed while a model is loaded.",
    ("--log-disable",): "Use --log.level error.",
    (
        *("--disable-log-requests", "--no-enable-log-requests", "--disable-log-stats"),
        "--disable-uvicorn-access-log",
    ): "Use --log.level warning; then only slow and failed requests have a line.",
    ("--enable-log-requests", "--log-requests"): "The log has a line for each request.",
    ("--max-log-len",): "Texts of requests are never logged.",
    ("--uds", "--root-path", "--middleware", "--allow-credentials", "--allowed-methods"): (
        "There is no such option; a proxy in front of the server can do this."
    ),
    (
        "--allowed-headers",
        "--cors-allow-headers",
    ): "All headers are allowed; see --server.cors-origins.",
    ("--no-context-shift",): "The context is never shifted.",
    ("--threads-http",): "One event loop serves all connections.",
    ("--block-size",): "Pages of the KV cache have the size of the system's pages.",
}
FLAGS: Mapping[str, str] = {flag: text for flags, text in HINTS.items() for flag in flags}

# Flags that ask for what cLLM does anyway: they are accepted, and their hints are notes.
NOT_NEEDED = (
    *("-cb", "--cont-batching", "--jinja", "--metrics", "--slots", "--props", "-kvu"),
    *("--kv-unified", "--enable-prefix-caching", "--cache-prompt", "--enable-chunked-prefill"),
    *("--enable-auto-tool-choice", "--enable-reasoning", "--embedding", "--embeddings"),
    *("--rerank", "--reranking", "--webui", "--ui", "--trust-remote-code", "--no-context-shift"),
    *("-cnv", "--conversation", "--warmup", "--no-warmup", "--disable-log-requests"),
    *("--no-enable-log-requests", "--disable-log-stats", "--disable-uvicorn-access-log"),
)
NOT_NEEDED_WITH_VALUE = (
    *("--cache-reuse", "--reasoning-format", "--reasoning-parser", "--tool-call-parser", "--dtype"),
    *("--load-format", "--tokenizer", "--hf-config-path", "-sps", "--slot-prompt-similarity"),
    *("--runner", "--task", "--threads-http", "--block-size", "--chat_format", "--chat-format"),
)
NOT_NEEDED_IF_ONE = (
    *("-tp", "--tensor-parallel-size", "-pp", "--pipeline-parallel-size", "-dp"),
    "--data-parallel-size",
)
# Flags that a flag of cLLM replaces, with the value in another form.
REWRITTEN = {
    "--no-mmap": "--backend.llama-cpp.use-mmap=false",
    "--mmap": "--backend.llama-cpp.use-mmap=true",
    "-v": "--log.level=debug",
    "--verbose": "--log.level=debug",
    "--no-cont-batching": "--scheduler.max-num-seqs=1",
    "-nocb": "--scheduler.max-num-seqs=1",
}
HUB = ("-hf", "-hfr", "--hf-repo")

# Variables of peers -> what to use. cLLM does not read them, because they are meant for other
# programs on the same machine.
VARIABLES = {
    "OLLAMA_HOST": "server.host and server.port; commands that use a server read CLLM_URL",
    "OLLAMA_MODELS": "models.folder, or HF_HOME for downloads",
    "OLLAMA_KEEP_ALIVE": "model.keep_alive",
    "OLLAMA_NUM_PARALLEL": "scheduler.max_num_seqs",
    "OLLAMA_MAX_LOADED_MODELS": "models.max_memory_mb",
    "OLLAMA_MAX_QUEUE": "scheduler.max_queue_requests",
    "OLLAMA_CONTEXT_LENGTH": "model.max_context_length",
    "OLLAMA_FLASH_ATTENTION": "backend.llama_cpp.flash_attention",
    "OLLAMA_KV_CACHE_TYPE": "kv.type",
    "OLLAMA_ORIGINS": "server.cors_origins",
    "OLLAMA_DEBUG": "log.level",
    "LLAMA_API_KEY": "CLLM_API_KEY",
    "VLLM_API_KEY": "CLLM_API_KEY",
}
COMMANDS_WITH_HINTS = ("cllm serve", "cllm chat", "cllm run", "cllm generate")


def accept_flags(arguments: Sequence[str], known: Collection[str]) -> tuple[list[str], list[str]]:
    """Return the arguments of a command without the flags of peers that are not needed and with
    cLLM's flags in place of others, and a note about each.

    ``known`` are the names of the command's own options, which stay as they are.
    """
    kept, notes, rest = [], [], list(arguments)
    while rest:
        argument = rest.pop(0)
        flag, has_value, value = argument.partition("=")
        if flag in known:
            kept.append(argument)
            continue
        takes_value = flag in (*NOT_NEEDED_WITH_VALUE, *NOT_NEEDED_IF_ONE, *HUB)
        following = value if has_value else (rest[0] if rest and takes_value else "")
        instead = REWRITTEN.get(flag, "")
        if flag in HUB and following:
            name = f"hf:{following.removeprefix('hf:')}"
            instead = f"--model={name}" if "--model" in known else name
        is_not_needed = (flag in NOT_NEEDED and not has_value) or (
            bool(following)
            and (flag in NOT_NEEDED_WITH_VALUE or (flag in NOT_NEEDED_IF_ONE and following == "1"))
        )
        if instead and (instead.partition("=")[0] in known or flag in HUB):
            kept.append(instead)
            notes.append(f"{flag} is read as {instead}")
        elif is_not_needed:
            notes.append(f"{flag} is not needed. {FLAGS[flag]}")
        else:
            kept.append(argument)
            continue
        if takes_value and not has_value:
            rest.pop(0)
    return kept, notes


def flags_in(hint: str) -> set[str]:
    """Return the flags that a hint names."""
    words = (word.strip(",.;:").partition("=")[0] for word in hint.split())
    return {word for word in words if word.startswith("--")}


def remark_on_variables(environment: Mapping[str, str]) -> str:
    """Return a line about variables of peers that are set, or "" if there are none."""
    unread = [f"{name} ({text})" for name, text in VARIABLES.items() if environment.get(name)]
    others = sorted(name for name in environment if name.startswith("LLAMA_ARG_"))
    if others:
        unread.append(f"{', '.join(others)} (flags of the same name)")
    return f"not read: {'; '.join(unread)}" if unread else ""

"""Messages about settings that do not apply as requested, and about the server's capacity."""

from __future__ import annotations

import sys
from collections.abc import Iterator

from cllm.config.settings import Settings
from cllm.config.sources import LoadedConfig
from cllm.core.model_info import ModelInfo
from cllm.server.access import Access
from cllm.server.addresses import is_loopback

SHORT_KEY = 16  # characters
NUM_SEQS, CONTEXT = "scheduler.max_num_seqs", "model.max_context_length"


def print_notes(loaded: LoadedConfig) -> None:
    """Print on stderr the notes about settings that do not apply as written."""
    for note in loaded.notes:
        print("cllm:", note, file=sys.stderr)


def remarks(loaded: LoadedConfig, info: ModelInfo) -> Iterator[str]:
    """Yield a line for each requested size that does not apply, or that the model was not trained
    for.
    """
    num_seqs, context = (
        loaded.settings.scheduler.max_num_seqs,
        loaded.settings.model.max_context_length,
    )
    if info.max_num_seqs < num_seqs and loaded.origins[NUM_SEQS] != "default":
        yield (
            f"{NUM_SEQS} is {info.max_num_seqs} instead of {num_seqs}, because the KV cache has no "
            f"room for more sequences of {info.context_length} tokens; raise kv.max_memory_mb or "
            f"lower {CONTEXT}"
        )
    if context is None:
        return
    if info.context_length < context:
        yield (
            f"{CONTEXT} is {info.context_length} instead of {context}, because the KV cache has no "
            f"room for more; raise kv.max_memory_mb"
        )
    if context > info.trained_context_length > 0:
        yield (
            f"{CONTEXT} is {context}, but the model was trained with "
            f"{info.trained_context_length} tokens; beyond that, its output may be meaningless"
        )


def capacity(info: ModelInfo, num_engines: int = 1) -> str:
    """Return the number and the length of the sequences that the server can run."""
    if not info.generates:
        what = "scores" if info.pooling == "rank" else "embeddings"
        return f"{what} of texts of up to {info.max_embedding_tokens} tokens"
    size = info.num_cells * info.kv_bytes_per_token / 1e6
    most = "up to " if info.layout == "paged" else ""  # its memory is taken as tokens need it
    attention = f", cLLM's attention for {info.attention}" if info.attention else ""
    several = f"{num_engines} engines, each with " if num_engines > 1 else ""
    return (
        f"{several}{info.max_num_seqs} sequence{'s' * (info.max_num_seqs != 1)} at a time, up to "
        f"{info.context_length} tokens each ({info.layout} KV cache, {most}{size:.0f} MB)"
        f"{attention}{', draft tokens by its own head' * info.drafts}"
    )


def remarks_on_access(access: Access, settings: Settings) -> Iterator[str]:
    """Yield a line for each setting that admits more clients than the operator may expect."""
    key = settings.server.api_key
    if key is not None and len(key) < SHORT_KEY:
        yield f"the API key has only {len(key)} characters and may be guessed"
    if key is not None and "," in key:
        yield "the API key with its comma is one key; cllm keys add NAME gives others their own"
    if access.is_for_fronts:
        yield "there are no API keys, so only fronts with the cluster key may use this address"
    if not access.is_required and not is_loopback(settings.server.host):
        yield "no API key is needed: anyone who reaches this address may use the server"


def remark_on_base(model: str) -> str:
    """Return a remark on how to use a base model."""
    return (
        f"{model} has no chat template, so it is a base model: cllm generate continues texts. "
        "Chats with it use ChatML, which it was not trained for"
    )


def hint(
    url: str, info: ModelInfo | None, *, needs_key: bool = False, is_base: bool = False
) -> str:
    """Return a command that tries the server out, and where to chat in a browser. A model that
    ``is_base`` only continues texts.
    """
    route, body = (
        "chat/completions",
        '{"messages": [{"role": "user", "content": "What is 27 plus 45?"}]}',
    )
    if info is not None and info.pooling == "rank":
        route, body = (
            "rerank",
            '{"query": "Where is Paris?", "documents": ["In France.", "Berlin is large."]}',
        )
    elif info is not None and not info.generates:
        route, body = "embeddings", '{"input": "What is 27 plus 45?"}'
    elif is_base:
        route, body = "completions", '{"prompt": "The capital of France is", "max_tokens": 20}'
    key = ' -H "Authorization: Bearer $CLLM_API_KEY"' if needs_key else ""
    what = "continue texts" if is_base else "chat"
    chat = f"Open {url} in a browser to {what}\n" if info is None or info.generates else ""
    return (
        f'{chat}Try: curl {url}/v1/{route} -H "Content-Type: application/json"{key} \\\n'
        f"  -d '{body}'"
    )

"""Parts of requests that are left out because they cannot be served: counted, logged once, named in a header."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable

from starlette.requests import Request

from cllm.service import Service

HEADER = "x-cllm-skipped"
# The types by which parts are counted and named; a client can make up any number of others.
KINDS = frozenset(
    {
        "additional_tools",
        "advisor_tool_result",
        "apply_patch",
        "bash_code_execution_tool_result",
        "browser_state",
        "code_execution_tool_result",
        "code_interpreter",
        "compaction",
        "computer",
        "computer_use_preview",
        "container_upload",
        "fallback",
        "file_search",
        "image_generation",
        "image_generation_call",
        "item_reference",
        "local_shell",
        "mcp",
        "mcp_call",
        "mcp_list_tools",
        "mcp_tool_listing",
        "mcp_tool_use",
        "server_tool_use",
        "shell",
        "text_editor_code_execution_tool_result",
        "tool_addition",
        "tool_removal",
        "tool_search",
        "tool_search_tool_result",
        "web_fetch_tool_result",
        "web_search",
        "web_search_call",
        "web_search_preview",
        "web_search_tool_result",
    }
)

log = logging.getLogger("cllm.server")


def note_skipped(request: Request, kinds: Iterable[str]) -> dict[str, str]:
    """Count what is left out of ``request``, by its type; and the header that says so, if there is something."""
    service: Service = request.app.state.service
    names = [name if (name := re.sub(r"_20\d\d_\d\d_\d\d$", "", kind)) in KINDS else "other" for kind in kinds]
    if not names:
        return {}
    logged: set[str] = request.app.state.skipped
    for name in names:
        service.metrics.skipped(name)
        if name not in logged:
            logged.add(name)
            log.warning("%s cannot be served and is left out of requests; it is counted, and logged once", name)
    return {HEADER: ", ".join(dict.fromkeys(names))}

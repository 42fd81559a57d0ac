"""Parts of requests that are left out because this server cannot serve them."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable

from cllm.server.call import Call
from cllm.serving.service import Service

HEADER = "x-cllm-skipped"
# Types with a label of their own. Clients can invent types, so all others are counted as "other".
KINDS = frozenset(
    {
        "additional_tools",
        "advisor_tool_result",
        "agent_message",
        "apply_patch",
        "apply_patch_call",
        "apply_patch_call_output",
        "bash_code_execution_tool_result",
        "browser_state",
        "code_execution_tool_result",
        "code_interpreter",
        "code_interpreter_call",
        "compaction",
        "compaction_trigger",
        "computer",
        "computer_call",
        "computer_call_output",
        "computer_use_preview",
        "container_upload",
        "context_compaction",
        "fallback",
        "file_search",
        "file_search_call",
        "image_generation",
        "image_generation_call",
        "item_reference",
        "local_shell",
        "mcp",
        "mcp_approval_request",
        "mcp_approval_response",
        "mcp_call",
        "mcp_list_tools",
        "mcp_tool_listing",
        "mcp_tool_use",
        "server_tool_use",
        "shell",
        "shell_call",
        "shell_call_output",
        "text_editor_code_execution_tool_result",
        "tool_addition",
        "tool_removal",
        "tool_search",
        "tool_search_call",
        "tool_search_output",
        "tool_search_tool_result",
        "web_fetch_tool_result",
        "web_search",
        "web_search_call",
        "web_search_preview",
        "web_search_tool_result",
    }
)

log = logging.getLogger("cllm.server")


def note_skipped(call: Call, service: Service, kinds: Iterable[str]) -> dict[str, str]:
    """Count the parts of ``call`` that are left out, and log each type once. Return a header that
    names the types.

    ``service`` answers the call.
    """
    names = [
        name if (name := re.sub(r"_20\d\d_\d\d_\d\d$", "", kind)) in KINDS else "other"
        for kind in kinds
    ]
    if not names:
        return {}
    logged = call.state.skipped
    for name in names:
        service.metrics.count_skipped_part(name)
        if name not in logged:
            logged.add(name)
            log.warning(
                "requests contain %s, which cannot be served; it is left out, counted, and not "
                "logged again",
                name,
            )
    return {HEADER: ", ".join(dict.fromkeys(names))}

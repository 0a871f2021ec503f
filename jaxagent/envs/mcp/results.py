"""The result of a tool of an MCP server, as text for the policy."""

from __future__ import annotations

import json

import mcp_types

MAX_CHARS = 200_000  # of a result: what comes behind is left out before it is encoded
FAILED = "The call failed.\n"


def as_text(result: mcp_types.CallToolResult) -> str:
    """Texts, one per line; pictures and the like by their names; structured content where there is nothing else.

    A server that gives structured content says the same in a text for clients that do not know it, so the text counts.
    """
    parts = [_part(block) for block in result.content]
    if not parts and result.structured_content is not None:
        parts = [json.dumps(result.structured_content, ensure_ascii=False)]
    text = "\n".join(parts) or "(nothing)"
    if len(text) > MAX_CHARS:
        text = f"{text[:MAX_CHARS]}\n[{len(text) - MAX_CHARS} more characters]"
    return FAILED + text if result.is_error else text


def _part(block: mcp_types.ContentBlock) -> str:
    if isinstance(block, mcp_types.TextContent):
        return block.text
    if isinstance(block, mcp_types.EmbeddedResource):
        resource = block.resource
        if isinstance(resource, mcp_types.TextResourceContents):
            return resource.text
        return f"[resource {resource.uri}]"
    if isinstance(block, mcp_types.ResourceLink):
        return f"[resource {block.uri}]"
    return f"[{block.type} of type {block.mime_type}]"

"""How each family of models writes reasoning and tool calls: sampled text in any pieces -> what it says."""

from jaxagent.gateway.tool_parsers.base import ToolParser
from jaxagent.gateway.tool_parsers.hermes import Hermes
from jaxagent.gateway.tool_parsers.llama3 import Llama3
from jaxagent.gateway.tool_parsers.qwen3_coder import Qwen3Coder

__all__ = ["Hermes", "Llama3", "Qwen3Coder", "ToolParser", "family_of"]


def family_of(template_source: str) -> type[ToolParser] | None:
    """The family whose calls a chat template writes; None where it writes none that is known here."""
    if "<function=" in template_source:
        return Qwen3Coder
    if "<tool_call>" in template_source:
        return Hermes
    if '"parameters": ' in template_source and "<|start_header_id|>" in template_source:
        return Llama3
    return None

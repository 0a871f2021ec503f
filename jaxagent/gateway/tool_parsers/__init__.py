"""How each family of models writes reasoning and tool calls: sampled text in any pieces -> what it says."""

from jaxagent.gateway.tool_parsers.base import ToolParser
from jaxagent.gateway.tool_parsers.hermes import Hermes
from jaxagent.gateway.tool_parsers.llama3 import Llama3
from jaxagent.gateway.tool_parsers.qwen3_coder import Qwen3Coder

__all__ = ["FAMILIES", "Hermes", "Llama3", "Qwen3Coder", "ToolParser"]

FAMILIES = (Hermes, Qwen3Coder, Llama3)

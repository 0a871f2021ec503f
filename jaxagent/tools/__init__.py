"""How each family of models writes reasoning and tool calls: sampled text in any pieces -> what it says."""

from jaxagent.tools.base import ToolParser
from jaxagent.tools.hermes import Hermes
from jaxagent.tools.llama3 import Llama3
from jaxagent.tools.qwen3_coder import Qwen3Coder

__all__ = ["FAMILIES", "Hermes", "Llama3", "Qwen3Coder", "ToolParser"]

FAMILIES = (Hermes, Qwen3Coder, Llama3)

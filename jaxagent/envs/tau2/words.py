"""What agent, user and judge of tau2-bench are told, and the words by which a user ends the conversation."""

from __future__ import annotations

from collections.abc import Sequence

from jaxagent.envs.base import Message
from jaxagent.envs.tau2.rows import AGENT, Past
from jaxagent.tools.calls import Call, Tool, tools_text
from jaxagent.tools.hermes import Hermes

GREETING = "Hi! How can I help you today?"  # what the agent has said when nothing was said yet
STOP, TRANSFER, OUT_OF_SCOPE = "###STOP###", "###TRANSFER###", "###OUT-OF-SCOPE###"
ENDS = (STOP, TRANSFER, OUT_OF_SCOPE)

_AGENT = """<instructions>
You are the agent of a customer service. You help the user, and you keep to the policy below.
Each of your messages is one of two things, and never both:
- something that you say to the user, or
- a call of a tool.
</instructions>
<policy>
{policy}
</policy>"""

_USER = """# How to play the customer

You play a customer who talks to an agent of a customer service. The other messages are what the agent says.{tools}

## Rules
- Write one message at a time, as a customer would write it.
- Keep strictly to the scenario below. What it does not say{nor_shown}, you do not know: never make anything up.
- Do not copy the scenario. Say what it says in words of your own, and little by little: wait until you are asked.{own}

## The end
- When what you want is done, write {stop}.
- When the agent has handed you over to somebody else, write {transfer}.
- When the scenario does not say enough for you to go on, write {out}.

<scenario>
{scenario}
</scenario>"""

_OWN_TOOLS = """
- A message of yours is either words for the agent or a call of one of your tools, and never both. The agent sees
  neither your calls nor their results.
- Call a tool when the agent asks you to, or when you need it to answer; if you are asked for several things at once,
  say that you do one at a time. Never claim a result that no tool gave you.
- When a call gives an error, mend it and try again."""


def agent_prompt(policy: str, tools: Sequence[Tool]) -> str:
    """What the agent is told."""
    return f"{_AGENT.format(policy=policy.strip())}\n\n{tools_text(tools, several=False)}"


def user_prompt(scenario: str, tools: Sequence[Tool]) -> str:
    """What the user is told."""
    text = _USER.format(
        tools=" You have tools of your own, for what the agent may ask you to look at or to do." if tools else "",
        nor_shown=", and no tool of yours shows" if tools else "",
        own=_OWN_TOOLS if tools else "",
        stop=STOP,
        transfer=TRANSFER,
        out=OUT_OF_SCOPE,
        scenario=scenario,
    )
    return f"{text}\n\n{tools_text(tools, several=False)}" if tools else text


def result_text(texts: Sequence[str]) -> str:
    """Results of calls, as whoever made them reads them."""
    return "\n".join(f"<tool_response>\n{text}\n</tool_response>" for text in texts)


def seen_by(side: str, history: Sequence[Past]) -> list[Message]:
    """The history as one side saw it: without the other's calls and their results; the user reads its own as words."""
    messages = []
    for past in history:
        if past.role == side:
            calls = [Call(use.name, use.arguments) for _, use in past.calls]
            messages.append(Message("assistant", Hermes.write(past.content, calls)))  # as its author would write it
        elif past.role == "tool" and past.requestor == side:
            agents, users = Message("tool", past.content), Message("user", result_text([past.content]))
            messages.append(agents if side == AGENT else users)
        elif past.role != "tool" and not past.calls:
            messages.append(Message("user", past.content))
    return messages

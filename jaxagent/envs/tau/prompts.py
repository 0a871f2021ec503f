"""What the policy is told: how to call tools, in three styles, as published, and a short policy of a shop.

TOOLS and QWEN_CALL are the part of Qwen's chat template that describes tools, with the sentence that slime's tau-bench
example puts in the place of "You may call one or more functions to assist with the user query.". REACT and ACT are
tau-bench's, and so is what the role that plays the customer is told, for whom the agent is the user: of tau-bench's
strategies the first, "llm", by which the role says what it says.
"""

from __future__ import annotations

from jaxagent.envs.base import Message
from jaxagent.envs.tau2.words import GREETING

POLICY = """You serve a customer of a retail store. First find the user id, by e-mail or by name and zip code. Serve only this user.
Look an order up before you change it. Only pending orders can be cancelled or modified, only delivered ones returned or exchanged.
Say what you are about to change, and change it when the user has said yes. Make one tool call at a time, and no call beside a message to the user.
Make nothing up. Transfer the user to a human only if no tool can do what is wanted."""  # noqa: E501

TOOLS = """# Tools

 At each turn, you are allowed to call one or no function to assist with task execution using <tools></tools> XML tags.
YOU MUST EXECUTE TOOLS TO MAKE ANY MODIFICATIONS OR CANCELLATIONS. Each tool call leads to a message returned by the system.
NEVER confirm execution to the user without seeing confirmation from the tool system.


You are provided with function signatures within <tools></tools> XML tags:
<tools>
{tools}
</tools>"""  # noqa: E501
QWEN_CALL = """For each function call, return a json object with function name and arguments within <tool_call></tool_call> XML tags:
<tool_call>
{"name": <function-name>, "arguments": <args-json-object>}
</tool_call>"""  # noqa: E501
CALL = "Write a function call like this:\n{example}"
_EXAMPLE = """{
    "type": "function",
    "function": {
        "name": "get_current_weather",
        "description": "Get the current weather",
        "parameters": {
            "type": "object",
            "properties": {
                "location": {
                    "type": "string",
                    "description": "The city and state, e.g. San Francisco, CA",
                },
                "format": {
                    "type": "string",
                    "enum": ["celsius", "fahrenheit"],
                    "description": "The temperature unit to use. Infer this from the users location.",
                },
            },
            "required": ["location", "format"],
        },
    }
}"""
_BEGIN = """
# Instruction
You need to act as an agent that use the above tools to help the user according to the above policy.

At each step, your generation should have exactly the following format:
"""
_ACTION = """Action:
{"name": <The name of the action>, "arguments": <The arguments to the action in json format>}
"""
_WEATHER = 'For example, if the user says "I want to know the current weather of San Francisco", and there is such a '
_CALL = """Action:
{"name": "get_current_weather", "arguments": {"location": "San Francisco, CA", "format": "fahrenheit"}}
"""
_ANSWER = """Action:
{"name": respond, "arguments": {"content": "The current weather of San Francisco is 70F."}}
"""
_SINCE = (
    "Since the user asks for the weather of San Francisco in USA, the unit should be in fahrenheit. I can query "
    "get_current_weather to get the weather."
)
REACT = f"""{_BEGIN}Thought:
<A single line of reasoning to process the context and inform the decision making. Do not include extra lines.>
{_ACTION}
The Action will be parsed, so it must be valid JSON.

You should not use made-up or placeholder arguments.

{_WEATHER}tool available
{_EXAMPLE}

Your response can be like this:
Thought:
{_SINCE}
{_CALL}
And if the tool returns "70F", your response can be:
Thought:
I can answer the user now.
{_ANSWER}
Try to be helpful and always follow the policy.
"""
ACT = f"""{_BEGIN}
{_ACTION}
You should not use made-up or placeholder arguments.

The Action will be parsed, so it must be valid JSON.

{_WEATHER}tool available
```json
{_EXAMPLE}
```

Your response can be like this:
{_CALL}
And if the tool returns "70F", your response can be:
{_ANSWER}
Try to be helpful and always follow the policy. Always make sure you generate valid JSON only.
"""
CUSTOMER = """You are a user interacting with an agent.

Instruction: {instruction}

Rules:
- Just generate one line at a time to simulate the user's message.
- Do not give away all the instruction at once. Only provide the information that is necessary for the current step.
- Do not hallucinate information that is not provided in the instruction. For example, if the agent asks for the order id but it is not mentioned in the instruction, do not make up an order id, just say you do not remember or have it.
- If the instruction goal is satisified, generate '###STOP###' as a standalone message without anything else to end the conversation.
- Do not repeat the exact instruction in the conversation. Instead, use your own words to convey the same information.
- Try to make the conversation as natural as possible, and stick to the personalities in the instruction."""  # noqa: E501


def to_customer(instruction: str) -> tuple[Message, Message]:
    """What the role that plays the customer is shown first: the task's instruction, and the agent's greeting."""
    return Message("system", CUSTOMER.replace("{instruction}", instruction)), Message("user", GREETING)

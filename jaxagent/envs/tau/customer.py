"""The simulated customer: a role that is told the task's instruction, and speaks with the agent in turn.

    customer = Customer(cast, strategy, instruction)
    text = await customer.open()              # what it says to "Hi! How can I help you today?"
    text = await customer.reply("...")        # to the agent; STOP in it ends the conversation

For the role, the agent is the user. The strategies and their prompts are tau-bench's:

    llm         says what it says
    react       thinks first; only what stands behind "User Response:" is passed on
    verify      the role judges what it would say, and says something else if it is not satisfied, 3 times at most
    reflection  ... and corrects itself if it is not, 2 attempts at most

Differences from the published program: "react" there passes the thought on, too, because it looks for "Thought:" first;
"verify" forgets a reply that no judgement accepted, and "reflection" remembers replies that were never spoken. Here a
conversation holds what was spoken.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from jaxagent.envs.base import Message
from jaxagent.envs.cast import Cast, RoleError, Talk
from jaxagent.envs.tau2.words import GREETING, STOP

ROLE = "user"
Strategy = Literal["llm", "react", "verify", "reflection"]
VERIFY_ATTEMPTS, REFLECT_ATTEMPTS = 3, 2


def instructions(strategy: Strategy, instruction: str) -> Message:
    """What the role is told before anybody speaks."""
    rules = _REACT if strategy == "react" else _RULES
    return Message(
        "system", f"You are a user interacting with an agent.\n\nInstruction: {instruction}\n\nRules:\n{rules}"
    )


class Customer:
    """One customer in one episode."""

    def __init__(self, cast: Cast, strategy: Strategy, instruction: str) -> None:
        self._cast, self._strategy = cast, strategy
        self._messages = [instructions(strategy, instruction)]
        self._talk: Talk | None = None  # of a strategy that says what it says

    async def open(self) -> str:
        """The first words."""
        return await self.reply(GREETING)

    async def reply(self, content: str) -> str:
        """What is said to the agent's words.

        Raises:
          RoleError: the role cannot speak, or what it writes cannot be read.
          TimeoutError: it did not speak in its time.
        """
        self._messages.append(Message("user", content))
        if self._strategy == "verify":
            text = await self._verified()
        elif self._strategy == "reflection":
            text = await self._reflected()
        else:
            text = await self._straight()
        self._messages.append(Message("assistant", text))
        return spoken(text) if self._strategy == "react" else text

    async def _straight(self) -> str:
        if self._talk is None:
            self._talk = self._cast.talk(ROLE)
            return (await self._talk.say(*self._messages)).text
        return (await self._talk.say(self._messages[-1])).text

    async def _verified(self) -> str:
        text = ""
        for _ in range(VERIFY_ATTEMPTS):
            text = await self._once(self._messages)
            if await self._accepted(text, self._messages):
                break
        return text

    async def _reflected(self) -> str:
        first = await self._once(self._messages)
        if await self._accepted(first, self._messages):
            return first
        messages = list(self._messages)
        for _ in range(1, REFLECT_ATTEMPTS):
            prompt = _REFLECT.format(transcript=_transcript(messages), response=first)
            _, found, better = (await self._once([Message("user", prompt)])).rpartition("Response:")
            if not found:
                raise RoleError(f'{ROLE}: its reflection has no "Response:"')
            messages.append(Message("user", better.strip()))
            text = await self._once(messages)
            if await self._accepted(text, messages):
                return text
        return first

    async def _accepted(self, text: str, messages: Sequence[Message]) -> bool:
        prompt = _VERIFY.format(transcript=_transcript(messages), response=text)
        return "true" in (await self._once([Message("user", prompt)])).lower()

    async def _once(self, messages: Sequence[Message]) -> str:
        """A conversation of its own, with one reply."""
        return (await self._cast.talk(ROLE).say(*messages)).text


def spoken(text: str) -> str:
    """What "react" says aloud.

    Raises:
      RoleError: the text has not the format.
    """
    if STOP in text:
        return STOP
    _, found, words = text.rpartition("User Response:")
    if not found:
        raise RoleError(f'{ROLE}: its reply has no "User Response:": {text!r:.200}')
    return words.strip()


def _transcript(messages: Sequence[Message]) -> str:
    names = {"user": "Customer", "assistant": "Agent", "system": "System"}  # as published, where the agent is the user
    return "\n".join(f"{names[message.role]}: {message.content}" for message in messages)


_SHARED = """- Do not give away all the instruction at once. Only provide the information that is necessary for the current step.
- Do not hallucinate information that is not provided in the instruction. For example, if the agent asks for the order id but it is not mentioned in the instruction, do not make up an order id, just say you do not remember or have it.
- If the instruction goal is satisified, generate '###STOP###' as {stop} without anything else to end the conversation.
- Do not repeat the exact instruction in the conversation. Instead, use your own words to convey the same information.
- Try to make the conversation as natural as possible, and stick to the personalities in the instruction."""  # noqa: E501
_RULES = f"""- Just generate one line at a time to simulate the user's message.
{_SHARED.format(stop="a standalone message")}"""
_REACT = f"""- First, generate a Thought about what to do next (this message will not be sent to the agent).
- Then, generate a one line User Response to simulate the user's message (this message will be sent to the agent).
{_SHARED.format(stop="the User Response")}

Format:

Thought:
<the thought>

User Response:
<the user response (this will be parsed and sent to the agent)>"""
_VERIFY = """You are a supervisor of the Agent in the conversation. You are given a Transcript of a conversation between a Customer and an Agent. The Customer has generated a Response, and you need to verify if it is satisfactory (true) or not (false).
Your answer will be parsed, so do not include any other text than the classification (true or false).
    
# Transcript:
{transcript}

# Response:
{response}

-----

Classification:"""  # noqa: E501, W293
_REFLECT = """You are a supervisor of the Agent in the conversation. You are given a Transcript of a conversation between a (simulated) Customer and an Agent. The Customer generated a Response that was marked as unsatisfactory by you.
You need to generate a Reflection on what went wrong in the conversation, and propose a new Response that should fix the issues.
Your answer will be parsed, so do not include any other text than the classification (true or false).
    
# Transcript:
{transcript}

# Response:
{response}

# Format:

Reflection:
<the reflection>

Response:
<the response (this will be parsed and sent to the agent)>"""  # noqa: E501, W293

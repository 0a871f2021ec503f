"""Turn templates: messages and observations -> text with a kind for every span, *incrementally*.

A chat template renders a whole conversation. Rendering it anew each turn and encoding the result would change tokens
that were already sampled (templates strip thoughts, trim blanks, and encoders merge across the seam). So `Chat` takes
from the template only what *follows* the policy's message: it renders a conversation in which that message is a
placeholder and keeps the text behind it. What the policy wrote never passes through a template.
"""

from __future__ import annotations

import contextlib
import datetime
import json
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from jaxagent.config import ConfigError
from jaxagent.data.tokenizer import Tokenizer
from jaxagent.envs.base import Message, Observation
from jaxagent.types import TokenKind

Spans = list[tuple[str, TokenKind]]  # consecutive pieces of text; template text is PROMPT

CHAT_DATE = datetime.datetime(2025, 1, 1)  # what a chat template that prints the date sees: the same in every run
ACTION = "PLACEHOLDER-ACTION"  # plain ASCII words: no template trims, escapes or strips them
BODY = "PLACEHOLDER-BODY"


class Plain:
    """No template: contents one after the other."""

    after_message = ""  # how the text begins that follows the policy's message; "" where messages have no end

    def prompt(self, messages: Sequence[Message]) -> str:
        """The text that the policy's first turn continues: the contents of all messages, joined."""
        return "".join(message.content for message in messages)

    def observation(self, observation: Observation, ended_by: str) -> Spans:
        """The text between the policy's turn and its next one: the parts of the observation as they are.

        `ended_by`: the EOS text that the policy sampled, or "".
        """
        return list(observation.parts)


# What a template raises where a client's tools or calls are not as it takes them.
REFUSALS = (jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError)


class Chat:
    """A tokenizer's own jinja2 chat template, rendered in a sandbox.

    The date, which `strftime_now` in a template sees, is fixed for a run, so that prompts do not change at midnight.
    """

    def __init__(self, source: str, special_strings: Mapping[str, str], date: datetime.datetime):
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _Generation]
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise
        environment.globals["strftime_now"] = date.strftime
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise ConfigError(f"The chat template is not valid jinja2: {error}") from error
        self._strings = dict(special_strings)
        self._frames: dict[str, tuple[str, str, str]] = {}
        self.after_message = self._frame("user")[1]  # a template that cannot be used fails here, before any training

    def prompt(self, messages: Sequence[Message]) -> str:
        """The messages rendered by the template, up to where the policy's message begins."""
        return self.render([{"role": m.role, "content": m.content} for m in messages])

    def observation(self, observation: Observation, ended_by: str) -> Spans:
        """The observation as a message of its role, rendered by the template.

        If the policy sampled the end-of-turn mark itself, the template's own mark is left out. A policy that ended its
        message cannot go on with it: an observation that would have continued it is shown as a user message.
        """
        if not observation.role and not ended_by:
            return list(observation.parts)
        role, header, footer = self._frame(observation.role or "user")
        after = self._after_action({"role": role, "content": observation.text})
        if not (after.startswith(header) and after.endswith(footer) and len(after) >= len(header) + len(footer)):
            raise ConfigError(f"The chat template frames a '{role}' message differently depending on its content.")
        body = after[len(header) : len(after) - len(footer)]
        if ended_by and header.startswith(ended_by):
            header = header[len(ended_by) :]
        return [(header, TokenKind.PROMPT), *body_spans(body, observation.parts), (footer, TokenKind.PROMPT)]

    def role(self, role: str) -> str:
        """The role under which the template shows a message of that role: "user" where it does not know it."""
        return self._frame(role)[0]

    def _frame(self, role: str) -> tuple[str, str, str]:
        """(role the template knows, text before a body, text after it), cached."""
        if role not in self._frames:
            header = shown = footer = ""
            with contextlib.nullcontext() if role == "user" else contextlib.suppress(ConfigError):
                header, shown, footer = self._after_action({"role": role, "content": BODY}).partition(BODY)
            if not shown and role == "user":
                raise ConfigError("The chat template does not show assistant and user messages; it cannot be used.")
            self._frames[role] = (role, header, footer) if shown else self._frame("user")
        return self._frames[role]

    def _after_action(self, message: dict[str, str]) -> str:
        """What the template writes after the policy's message, up to where the policy's next message begins."""
        opening = [{"role": "user", "content": "question"}, {"role": "assistant", "content": ACTION}]
        return self.render([*opening, message]).partition(ACTION)[2]

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
    ) -> str:
        """The template's text of messages and tools in Hugging Face's form.

        Raises:
          ConfigError: the template refuses them.
        """
        try:
            return self._template.render(
                messages=messages, add_generation_prompt=add_generation_prompt, tools=tools, **self._strings
            )
        except REFUSALS as error:
            raise ConfigError(f"The chat template failed: {error}") from error


Template = Plain | Chat  # how messages become text


def open_template(tokenizer: Tokenizer, use_chat_template: bool, date: datetime.datetime) -> Template:
    """The tokenizer's own chat template, or `Plain`.

    Raises:
      ConfigError: a chat template is asked for and there is none, or it cannot be used.
    """
    if not use_chat_template:
        return Plain()
    if not tokenizer.chat_template:
        raise ConfigError("tokenizer.use_chat_template is set, but the tokenizer has no chat template.")
    return Chat(tokenizer.chat_template, tokenizer.special_strings | tokenizer.template_variables, date)


def unended_messages(tokenizer: Tokenizer, date: datetime.datetime) -> str:
    """What to tell where the chat template ends a message by a token that ends no generation; "" where all is well.

    So it is in base models: their policy would write the token, and go on with the user's next message.
    """
    try:
        after = open_template(tokenizer, True, date).after_message
    except ConfigError:
        return ""  # a template that cannot be used is told to whoever uses it
    ids = tokenizer.encode(after.lstrip())
    if not ids or not tokenizer.eos_ids or ids[0] in tokenizer.eos_ids:
        return ""
    token = tokenizer.decode(ids[:1])
    if tokenizer.id_of(token) != ids[0] or not token.startswith("<"):
        return ""  # text, and no mark
    return (
        f"The chat template ends a message with {token}, which does not end a generation here, as in base models: the "
        f"policy would go on behind it. If it should not: --config.tokenizer.end_token='{token}'"
    )


def body_spans(body: str, parts: Sequence[tuple[str, TokenKind]]) -> Spans:
    """The parts of a message where the template kept its text (but for outer blanks); else one span for all of it."""
    text = "".join(part for part, _ in parts)
    start = text.find(body)
    end = start + len(body)
    if start < 0 or text[:start].strip() or text[end:].strip():
        kinds = {kind for _, kind in parts}
        mixed = TokenKind.PROMPT if TokenKind.PROMPT in kinds else TokenKind.OBSERVATION
        return [(body, kinds.pop() if len(kinds) == 1 else mixed)]
    spans, at = [], 0
    for part, kind in parts:
        spans.append((part[max(0, start - at) : max(0, end - at)], kind))
        at += len(part)
    return spans


class _Generation(Extension):
    """{% generation %}, with which templates mark what the assistant wrote, changes nothing of the text."""

    tags = {"generation"}  # noqa: RUF012, as jinja2 wants it

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)  # jinja2's own escapes HTML


def _raise(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)

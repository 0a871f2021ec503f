"""ToolOrchestra (arXiv 2511.21689): a small policy solves problems by calling experts of different price and skill.

Task (a problem with gold answers) + experts + search engine + sandboxes in -> observations and a verdict out. Experts
are roles of the config: `config.roles` says who each of them is and what it charges, the settings here say which tool
offers which of them. The verdict is 1 for a right answer; what an attempt cost and how long its experts took are
counters, `cost` and `latency_s`, which `rl.group_reward` weighs against it. Differences from the published code:

- The attempt is one conversation, as in LMIS's adaptation. The published code writes a new prompt for every turn, of
  the documents, programs and attempts so far, and trains each turn by itself.
- A wrong call costs a turn and is explained; there it is passed over without a word.
- An expert that fails is a failure of the episode; there its tool gives an empty result.
- The calls of the last turn are not made without an `answer` among them: nobody would read their results.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from jaxagent.algorithms.group_rewards import PREFERENCES, weights_of
from jaxagent.config import ConfigError, SandboxConfig, nearest
from jaxagent.config.choice import Choice
from jaxagent.config.ranges import NonNegativeFloat, PositiveInt, Seconds
from jaxagent.envs.base import Attempt, Environment, Message, Observation, Opening, Step, Transcript, Verdict
from jaxagent.envs.cast import POLICY, Cast, RoleError, Talk
from jaxagent.envs.judging import ask_judge
from jaxagent.envs.orchestra import experts, tools
from jaxagent.envs.orchestra.experts import FromTokens
from jaxagent.envs.orchestra.tools import ANSWER, REASON, SEARCH
from jaxagent.envs.python.environment import open_pythons
from jaxagent.envs.python.programs import Programs
from jaxagent.envs.search.retriever.backends import Bm25Config, RetrieverConfig
from jaxagent.envs.search.retriever.base import Passage, Retriever, corpus_identity, opened_by, passages_of
from jaxagent.rewards import maths
from jaxagent.rewards.judge import Item, Rubric
from jaxagent.rewards.text import exact_match, normalize_answer
from jaxagent.types import StopReason, Task, TokenKind

SOLVED = "solved"  # the verdict's component
SYSTEM = "You solve problems with the help of experts. They differ in skill, price and speed."
RESULT = ("<result>", "</result>")  # around what the policy sees, in the plain format
RUBRIC = Rubric(
    (Item("correct", "Does the answer say the same as one of the references? 1 if it does, else 0."),), 0, 1
)
JUDGED_CHARS = 4_000  # of each text that the judge is shown


@dataclasses.dataclass(frozen=True, kw_only=True)
class ToolOrchestra(Environment):
    """Problems, experts behind three tools, a search engine and sandboxes for the experts' programs."""

    prompt: Literal["orchestra", "plain"] = "orchestra"  # with the tools in a system message, or the bare problem
    # Of each tool, which roles can do it, and what the policy is told of each ("" = nothing). {} = there is no such
    # tool, and what it needs (a search engine, sandboxes) is not opened.
    reasoners: Mapping[str, str] = dataclasses.field(default_factory=dict)
    answerers: Mapping[str, str] = dataclasses.field(default_factory=dict)
    searchers: Mapping[str, str] = dataclasses.field(default_factory=dict)
    judge: str = ""  # a role that is asked of every answer that is not equal to a gold one; "" = it is wrong
    latency: Annotated[Any, Choice("jaxagent.envs.orchestra.experts:LATENCIES")] = dataclasses.field(
        default_factory=FromTokens
    )
    price_prompt: NonNegativeFloat = 0.0  # of a million tokens that the orchestrator itself is shown, turn by turn
    price_reply: NonNegativeFloat = 0.0  # of a million tokens that it writes
    code_interpreter_per_second: NonNegativeFloat = 8.3e-6  # price of a program's seconds, in the roles' currency
    run_timeout_s: Seconds = 60.0  # of one program
    output_chars: PositiveInt = 4_000  # shown of a program's output, at most
    expert_context_tokens: PositiveInt = 24_000  # of what was found, the newest that an expert is shown
    max_documents: PositiveInt = 30  # kept in an attempt
    retriever: Annotated[RetrieverConfig, Choice("jaxagent.envs.search.retriever.backends:RETRIEVERS")] = (
        dataclasses.field(default_factory=lambda: Bm25Config(topk=5))
    )
    sandbox: SandboxConfig = dataclasses.field(default_factory=SandboxConfig)

    score = SOLVED
    calls = "calls"
    cost = "cost"
    counted = ("cost", "latency_s")
    needs_answers = True

    def __post_init__(self) -> None:
        """Refuses settings under which no problem could be solved, or a slow program would look like our failure."""
        if not self.answerers:
            raise ConfigError("env.answerers names no expert: without the tool 'answer' no problem is solved.")
        for name in self.roles:
            if name in (*tools.TOOLS, POLICY):
                raise ConfigError(f"env: an expert cannot be called '{name}', as a tool or the policy is.")
        if self.reasoners and self.max_turns * self.run_timeout_s >= self.episode_timeout_s:
            raise ConfigError(
                f"env.episode_timeout_s={self.episode_timeout_s:g} must be more than env.max_turns x env.run_timeout_s "
                f"= {self.max_turns * self.run_timeout_s:g}: slow programs are an expert's own fault."
            )

    @property
    def offers(self) -> Mapping[str, Mapping[str, str]]:
        """Tool -> its experts, with what is said of each; only tools that are offered."""
        named = {REASON: self.reasoners, ANSWER: self.answerers, SEARCH: self.searchers}
        return {tool: dict(able) for tool, able in named.items() if able}

    @property
    def experts(self) -> Sequence[str]:
        """Every expert once."""
        return list(dict.fromkeys(name for able in self.offers.values() for name in able))

    @property
    def roles(self) -> Sequence[str]:  # type: ignore[override]
        """The experts, and the judge."""
        return [*self.experts, *([self.judge] if self.judge else [])]

    @property
    def priced_roles(self) -> Sequence[str]:  # type: ignore[override]
        """The experts: what an attempt costs is a part of its reward."""
        return self.experts

    @property
    def stop_strings(self) -> Sequence[str]:  # type: ignore[override]
        """A call ends the turn in the plain format; in the other the policy ends its message."""
        return ("</tool_call>",) if self.prompt == "plain" else ()

    @property
    def tokens(self) -> Sequence[str]:  # type: ignore[override]
        """The pieces of a call, and the experts' names."""
        if self.prompt == "plain":
            return (*tools.PIECES, *self.experts, *RESULT)
        return ("<tool_call>", "</tool_call>", "<think>", "</think>")

    def messages(self, text: str) -> tuple[Message, ...]:
        """The problem, after the tools."""
        if self.prompt == "plain":
            return (Message("user", f"Problem: {text}\n"),)
        from jaxagent.tools.calls import tools_text

        offered = tools_text([tools.tool(name, able) for name, able in self.offers.items()])
        return (Message("system", f"{SYSTEM}\n\n{offered}"), Message("user", f"Problem: {text}\n\nCall a tool."))

    def observation(self, action: str, text: str) -> Observation:
        """What tools have found."""
        return self.observed(text, TokenKind.OBSERVATION)

    def observed(self, text: str, kind: TokenKind) -> Observation:
        """A text that the policy is shown."""
        if self.prompt == "plain":
            return Observation(((f"{RESULT[0]}{text}{RESULT[1]}\n", kind),))
        return Observation(((text, kind),), "tool")

    @contextlib.contextmanager
    def open(self, opening: Opening) -> Iterator[Callable[[Task, Cast], OrchestraAttempt]]:  # type: ignore[override]
        """Opens the search engine and the sandboxes, each where a tool needs it."""
        opening.check(self._check_preferences)
        with contextlib.ExitStack() as stack:
            retriever, take = None, None
            if self.searchers:
                own = self.corpus(opening.dataset) if opening.dataset else None
                retriever = stack.enter_context(opened_by(self.retriever, opening, own))
            if self.reasoners:
                take = stack.enter_context(open_pythons(opening, self.sandbox))

            def attempt_at(task: Task, cast: Cast) -> OrchestraAttempt:
                programs = take and Programs(take, self.run_timeout_s, self.output_chars)
                return OrchestraAttempt(task, cast, self, retriever, programs)

            yield attempt_at

    def _check_preferences(self, task: Task) -> None:
        """Raises ConfigError for weights that are no numbers, or of what no attempt has."""
        if PREFERENCES not in task.metadata:
            return
        names = ("accuracy", "cost", "latency", *self.offers, *self.experts)
        for name in weights_of(task.metadata[PREFERENCES], task.id):
            if name not in names:
                problem = f"task '{task.id}': metadata.preferences: nothing is called '{name}'."
                raise ConfigError(f"{problem} {nearest(name, names)}")

    def corpus(self, dataset: Path) -> Path | None:
        """The passages that are searched, as far as they lie here."""
        return self.retriever.passages(super().corpus(dataset))

    def identity(self, dataset: Path) -> dict[str, str]:
        """The passages' digest."""
        return corpus_identity(self.retriever, self.corpus(dataset)) if self.searchers else {}


class OrchestraAttempt(Attempt):
    """One attempt at one problem."""

    tool_prefixes: Sequence[str] = (tools.PIECES[0],)

    def __init__(
        self, task: Task, cast: Cast, config: ToolOrchestra, retriever: Retriever | None, programs: Programs | None
    ):
        self._task = task
        self._cast = cast
        self._config = config
        self._retriever = retriever
        self._programs = programs
        self._offered = {name: tools.tool(name, able) for name, able in config.offers.items()}
        self._turns_left = config.max_turns
        self._documents: tuple[Passage, ...] = ()
        self._program_outputs: list[tuple[str, str]] = []  # programs, and what they printed
        self._answer: str | None = None
        self.stop_strings: Sequence[str] = config.stop_strings
        calls = [f"calls_{name}" for name in (*config.offers, *config.experts)]
        misses = (
            "cut_replies",
            "invalid_actions",
            "failed_programs",
            "no_program",
            "no_query",
            "no_answer",
            "asked_judge",
        )
        self.counters: dict[str, float] = dict.fromkeys(("cost", "latency_s", "calls", *calls, *misses), 0.0)

    async def start(self) -> Sequence[Message]:
        """The problem, after the tools."""
        return self._config.messages(self._task.prompt)

    async def step(self, action: str) -> Step:
        """Makes the calls of a turn in their order; `answer` ends the episode."""
        self._turns_left -= 1
        calls, problem = tools.read(action, self._offered)
        if problem:
            self.counters["invalid_actions"] += 1
        if self._turns_left <= 0 and ANSWER not in dict(calls):
            return Step(stop_reason=StopReason.TURN_LIMIT)
        if problem:
            return Step(self._config.observed(problem, TokenKind.WARNING))
        texts = []
        for tool, expert in calls:
            reply = await self._ask(tool, expert)
            if tool == ANSWER:
                self._answer = experts.answer_of(reply)
                self.counters["no_answer"] += self._answer is None
                return Step(stop_reason=StopReason.ANSWER)
            texts.append(await (self._search(reply) if tool == SEARCH else self._run(reply)))
        return Step(self._config.observed("\n".join(texts), TokenKind.OBSERVATION))

    async def verify(self, transcript: Transcript) -> Verdict:
        """1 for an answer that equals a gold one, or that the judge takes for right; else 0."""
        self._pay(transcript)
        solved = self._answer is not None and right(self._answer, self._task.answers)
        if not solved and self._answer is not None and self._config.judge:
            self.counters["asked_judge"] += 1
            solved = await judged_right(self._cast.talk(self._config.judge), self._task, self._answer)
        return Verdict(float(solved), {SOLVED: float(solved)})

    def _pay(self, transcript: Transcript) -> None:
        """Adds the price of the orchestrator's own tokens: in each turn all that it was shown, and what it wrote.

        Also of a turn that ran out of tokens, which never came to `step`. Observations count as far as it saw them.
        """
        config = self._config
        if not config.price_prompt and not config.price_reply:
            return
        prompt_tokens = len(self._cast.tokens(transcript.prompt).ids)
        for turn, (action, observation) in enumerate(transcript.turns):
            sampled = transcript.action_tokens[turn : turn + 1]
            reply_tokens = sampled[0] if sampled else len(self._cast.tokens(action).ids)
            self.counters["cost"] += (config.price_prompt * prompt_tokens + config.price_reply * reply_tokens) / 1e6
            prompt_tokens += reply_tokens + len(self._cast.tokens(observation).ids)

    async def close(self) -> None:
        """Ends the sandbox, if one was needed."""
        if self._programs is not None:
            await self._programs.close()

    async def _ask(self, tool: str, expert: str) -> str:
        """An expert's reply, each in a conversation of its own; adds what it cost and took."""
        context, most = experts.context(self._documents, self._program_outputs), self._config.expert_context_tokens
        if len(ids := self._cast.tokens(context).ids) > most:
            context = self._cast.decoded(ids[-most:]).text  # its left is cut, as published
        talk = self._cast.talk(expert)
        reply = await talk.say(Message("user", experts.question(tool, self._task.prompt, context)))
        if reply.cost is None:
            raise RoleError(f"{expert} has no price: set config.roles.{expert}.price_prompt and price_reply")
        for name in ("calls", f"calls_{tool}", f"calls_{expert}"):
            self.counters[name] += 1
        self.counters["cut_replies"] += reply.finish == "length"  # of an expert: it had more to say
        self.counters["cost"] += reply.cost
        self.counters["latency_s"] += self._config.latency.of_reply(reply)
        return reply.text

    async def _search(self, reply: str) -> str:
        """Searches for the expert's query; for the problem itself where it wrote none, as published."""
        assert self._retriever is not None
        query = experts.query_of(reply)
        self.counters["no_query"] += query is None
        documents = await passages_of(self._retriever, query or self._task.prompt, self._config.retriever.topk)
        self._documents = experts.newest(self._documents, documents, self._config.max_documents)
        return experts.documents_text(documents) or "Nothing was found."

    async def _run(self, reply: str) -> str:
        """Runs the expert's program."""
        assert self._programs is not None
        code = experts.program_of(reply)
        if code is None:
            self.counters["no_program"] += 1
            return "The expert wrote no program."
        ran = await self._programs.run(code)
        seconds = self._config.latency.of_program(ran.seconds)
        self.counters["failed_programs"] += ran.exit_code != 0 or ran.timed_out
        self.counters["latency_s"] += seconds
        self.counters["cost"] += self._config.code_interpreter_per_second * seconds
        output = "(out of memory)" if ran.out_of_memory else ran.output.rstrip("\n")
        output = f"{output}\n(timed out)".lstrip("\n") if ran.timed_out else output
        self._program_outputs.append((code, output))
        return output or "The program printed nothing."


async def judged_right(talk: Talk, task: Task, answer: str) -> bool:
    """Whether the judge takes an answer for right. Raises as `ask_judge`."""
    material = {"question": task.prompt, "references": "\n".join(task.answers), "answer": answer}
    return (await ask_judge(talk, RUBRIC, material, JUDGED_CHARS, task.id))["correct"] == 1


def right(answer: str, golds: Sequence[str]) -> bool:
    """Whether an answer equals a gold one: as numbers where the gold one is a number, else as text."""
    for gold in golds:
        numbers = maths.parse_number(maths.tidy(gold)) is not None
        words = not numbers and normalize_answer(gold)  # of "A" normalising leaves nothing, as it does of "the"
        if maths.equal(answer, gold) or (words and exact_match(answer, [gold])):
            return True
    return False

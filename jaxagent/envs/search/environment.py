"""The search environment: the policy writes <search> query </search>, reads <information>, ends with <answer>.

Task (a question with gold answers) + `Retriever` in -> observations and a verdict out. Texts are Search-R1's, letter
for letter (Jin et al., https://arxiv.org/abs/2503.09516); `env.protocol` "research" has ReSearch's (research.py).
Deliberate differences from the published code:

- A generation that ends with the turn or token budget is not cut and re-tokenised; sampled ids stay as they are.
- The search of the last turn is not executed: nobody would read its result. This changes no score.
- An answer is looked for in the policy's own text when `reward.min_answers` is 1; with 2, in prompt + response, as
  published.
- A failing search engine is an error of the episode, not an empty <information> block.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from jaxagent import contract
from jaxagent.config import ConfigError
from jaxagent.config.choice import Choice
from jaxagent.envs import tags
from jaxagent.envs.base import Attempt, Environment, Message, Observation, Opening, Step, Transcript, Verdict
from jaxagent.envs.search import research
from jaxagent.envs.search.retriever.backends import Bm25Config, RetrieverConfig
from jaxagent.envs.search.retriever.base import (
    CLOSE_TIMEOUT_S,
    Retriever,
    corpus_identity,
    opened_by,
    passages_of,
)
from jaxagent.envs.search.rewards import ExactMatch, ExactMatchAndFormat, Judged, Shaping, shaped
from jaxagent.rewards.view import Reward, ToolCall, View
from jaxagent.types import StopReason, Task, TokenKind

if TYPE_CHECKING:
    from jaxagent.rewards.judge_client import HttpJudge

STOP_STRINGS = ("</search>", "</answer>")
TOOL_PREFIXES = ("<search>", "<answer>")  # how each of its actions begins
TAGS = ("<search>", "</search>", "<information>", "</information>", "<answer>", "</answer>")
# Names of `config.env.reward`. Any frozen dataclass that is a `rewards.view.Reward` can stand there by its path.
REWARDS: dict[str, type] = {
    "em": ExactMatch,
    "em_format": ExactMatchAndFormat,
    "judge": Judged,
    "research": research.ReSearch,
}
_ACTIONS = {name: tags.pair(name) for name in ("search", "answer")}

PROMPTS = {
    "search_r1": (  # "as your want" is the published spelling
        "Answer the given question. You must conduct reasoning inside <think> and </think> first every time you get "
        "new information. After reasoning, if you find you lack some knowledge, you can call a search engine by "
        "<search> query </search> and it will return the top searched results between <information> and "
        "</information>. You can search as many times as your want. If you find no further external knowledge needed, "
        "you can directly provide the answer inside <answer> and </answer>, without detailed illustrations. For "
        "example, <answer> Beijing </answer>. Question: {question}\n"
    ),
    "plain": "Question: {question}\n",  # for a policy that learns the protocol from demonstrations
    "chat": "{question}",  # for a small chat model, which is shown what it finds in user messages
    "research": research.BASE,  # for a base model
    "research_chat": "{question}",  # for a chat model, behind ReSearch's system message
}
SYSTEM = (
    "Search with <search> query</search>, again if needed, then give a short <answer> answer</answer>."  # of "chat"
)
INVALID_ACTION = (
    "\nMy previous action is invalid. If I want to search, I should put the query between <search> and </search>. If "
    "I want to give the final answer, I should put the answer between <answer> and </answer>. Let me try again.\n"
)


def render_prompt(style: str, question: str) -> str:
    """The user message of a question; `style` is env.prompt. A question always ends with a question mark."""
    question = question.strip()
    return PROMPTS[style].replace("{question}", question if question.endswith("?") else question + "?")


def render_observation(documents: Iterable[tuple[str, str]]) -> str:
    """The <information> block of (title, text) documents, best first."""
    lines = (f"Doc {i}(Title: {title}) {text}\n" for i, (title, text) in enumerate(documents, 1))
    return f"\n\n<information>{''.join(lines).strip()}</information>\n\n"


def parse_action(text: str) -> tuple[str, str] | None:
    """The first complete action: ("search" | "answer", stripped content), or None."""
    text = text[: tags.MAX_CHARS]
    first = [(*pair, name) for name, marks in _ACTIONS.items() if (pair := next(tags.spans(*marks, text), None))]
    if not first:
        return None
    start_mark, end_mark, name = min(first, key=lambda action: action[0].start())
    return name, text[start_mark.end() : end_mark.start()].strip()


PROTOCOLS = {
    "search_r1": research.SearchProtocol(
        STOP_STRINGS,
        TOOL_PREFIXES,
        TAGS,
        parse_action,
        render_observation,
        write_search=lambda query: f"<search> {query}</search>",
        write_answer=lambda answer: f"<answer> {answer}</answer>",
    ),
    "research": research.PROTOCOL,
}
_ONLY_OF = {"search_r1": "search_r1", "chat": "search_r1", "research": "research", "research_chat": "research"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Search(Environment):
    """Questions, a search engine for all attempts, and a protocol."""

    # Search-R1's text, "Question: ...\n" for either protocol, a short one for chat models; ReSearch's two texts
    prompt: Literal["search_r1", "plain", "chat", "research", "research_chat"] = "search_r1"
    protocol: Literal["search_r1", "research"] = "search_r1"  # tags, results, and how an attempt ends
    final_turn: bool = False  # one more generation with search disabled after max_turns (N+1 variant)
    reward: Annotated[Reward, Choice("jaxagent.envs.search.environment:REWARDS")] = dataclasses.field(
        default_factory=ExactMatch
    )
    shaping: Shaping | None = None  # of the reward
    retriever: Annotated[RetrieverConfig, Choice("jaxagent.envs.search.retriever.backends:RETRIEVERS")] = (
        dataclasses.field(default_factory=Bm25Config)
    )

    score = "em"
    calls = "searches"
    needs_answers = True
    takes_messages = True

    def __post_init__(self) -> None:
        """Refuses settings that would silently make every reward 0, or none."""
        if (of := _ONLY_OF.get(self.prompt, self.protocol)) != self.protocol:
            raise ConfigError(
                f"env.prompt='{self.prompt}' tells the policy of the protocol '{of}', and env.protocol is "
                f"'{self.protocol}': set env.protocol={of}, or env.prompt=plain."
            )
        other = research.ReSearch if self.protocol == "search_r1" else ExactMatch
        if isinstance(self.reward, other):
            raise ConfigError(
                f"env.reward={type(self.reward).__name__} cannot read answers of env.protocol='{self.protocol}': the "
                "reward 'research' goes with the protocol 'research', the others with 'search_r1'."
            )
        if not callable(self.reward):
            raise ConfigError(f"env.reward: {type(self.reward).__qualname__} needs a method __call__(view).")
        min_answers = getattr(self.reward, "min_answers", 1)
        if self.prompt != "search_r1" and min_answers > 1:
            raise ConfigError(
                f"env.reward.min_answers={min_answers} counts the example answer of the search_r1 prompt; "
                f"with env.prompt='{self.prompt}' set it to 1."
            )
        shaped(self.reward, self.shaping, self.most_turns * self.turn_tokens)

    @property
    def speech(self) -> research.SearchProtocol:
        """The protocol."""
        return PROTOCOLS[self.protocol]

    @property
    def stop_strings(self) -> Sequence[str]:  # type: ignore[override]
        """What ends a turn; under "research" an answer ends with the policy's message."""
        return self.speech.stop_strings

    @property
    def tokens(self) -> Sequence[str]:  # type: ignore[override]
        """The protocol's tags."""
        return self.speech.tags

    @property
    def most_turns(self) -> int:
        """Generations of one attempt, at most."""
        return self.max_turns + int(self.final_turn)

    def oracle(self, task: Task) -> Sequence[str] | None:
        """The gold answer, without a search."""
        return (self.speech.write_answer(task.answers[0]),)

    def messages(self, text: str) -> tuple[Message, ...]:
        """The question as one user message, after what the prompt's style needs to say."""
        user = Message("user", render_prompt(self.prompt, text))
        system = {"chat": SYSTEM, "research_chat": research.SYSTEM}.get(self.prompt)
        return (Message("system", system), user) if system else (user,)

    def observation(self, action: str, text: str) -> Observation:
        """A result of a search, or the text that says that the action was invalid."""
        return self.observed(self.speech.parse(action) is not None and text != self.speech.invalid_query, text)

    def observed(self, valid: bool, text: str) -> Observation:
        """A text that the policy is shown, as `prompt` has it: more of its own text, or a user message.

        Args:
          valid: whether the text is what a search has found; else it says that the action was invalid.
          text: as `render_observation` makes it, or `INVALID_ACTION`.
        """
        kind = TokenKind.OBSERVATION if valid else TokenKind.WARNING
        chat = self.prompt == "chat"
        return Observation(((text.strip(), kind),), "user") if chat else Observation(((text, kind),))

    @contextlib.contextmanager
    def open(self, opening: Opening) -> Iterator[Callable[[Task], SearchAttempt]]:
        """Opens the retriever over the configured corpus, or the dataset's own, and asks it one question."""
        with contextlib.ExitStack() as stack:
            judge = None
            if isinstance(self.reward, Judged):
                judge = self.reward.open()
                stack.callback(lambda: opening.run(judge.close(), CLOSE_TIMEOUT_S))
            own = self.corpus(opening.dataset) if opening.dataset else None
            retriever = stack.enter_context(opened_by(self.retriever, opening, own))
            yield lambda task: SearchAttempt(task, self, retriever, judge)

    def corpus(self, dataset: Path) -> Path | None:
        """The passages that are searched, as far as they lie here."""
        return self.retriever.passages(super().corpus(dataset))

    def identity(self, dataset: Path) -> dict[str, str]:
        """The passages' digest."""
        return corpus_identity(self.retriever, self.corpus(dataset))


class SearchAttempt(Attempt):
    """One attempt at one question.

    The policy gets `max_turns` generations, and one more when `final_turn` is set (the published N+1 variant). An
    action that is no search and no answer costs a turn and is answered by `INVALID_ACTION`.
    """

    def __init__(self, task: Task, config: Search, retriever: Retriever, judge: HttpJudge | None = None):
        self._task = task
        self._judge = judge
        self._config = config
        self._protocol = config.speech
        self.stop_strings: Sequence[str] = self._protocol.stop_strings
        self.tool_prefixes: Sequence[str] = self._protocol.tool_prefixes
        self._retriever = retriever
        self._turns_left = config.most_turns
        self._queries: list[str] = []
        self.counters: dict[str, float] = {"searches": 0.0, "invalid_actions": 0.0, "empty_searches": 0.0}

    async def start(self) -> Sequence[Message]:
        """The question as one user message, after what the prompt's style needs to say."""
        return self._config.prompt_messages(self._task)

    async def step(self, action: str) -> Step:
        """Searches, ends, or says that the action is invalid."""
        self._turns_left -= 1
        parsed = self._protocol.parse(action)
        invalid_query = self._protocol.invalid_query if parsed == ("search", "") else ""
        if parsed is None or invalid_query:
            self.counters["invalid_actions"] += 1
        if parsed is not None and parsed[0] == "answer":
            return Step(stop_reason=StopReason.ANSWER)
        if self._turns_left <= 0:
            return Step(stop_reason=StopReason.TURN_LIMIT)
        if parsed is None or invalid_query:
            return Step(self._config.observed(False, invalid_query or INVALID_ACTION))
        self.counters["searches"] += 1
        self._queries.append(parsed[1])
        passages = await passages_of(self._retriever, parsed[1], self._config.retriever.topk)
        self.counters["empty_searches"] += not passages
        text = self._protocol.render((p.title, p.text) for p in passages)
        return Step(self._config.observed(True, text))

    async def verify(self, transcript: Transcript) -> Verdict:
        """Search-R1's reward of the configured profile, and what the config adds to it."""
        config = self._config
        reward = shaped(config.reward, config.shaping, config.most_turns * config.turn_tokens)
        view = View(
            self._task,
            transcript.turns,
            prompt=transcript.prompt,
            tool_calls=tuple(ToolCall("search", {"query": query}) for query in self._queries),
            action_tokens=transcript.action_tokens,
            ended=transcript.ended,
        )
        if self._judge is not None and isinstance(config.reward, Judged):
            view, counts = await config.reward.ask(self._judge, view)
            self.counters |= counts
        scores = contract.scores(reward, view, config.score)
        scores = {name.removeprefix("outcome/"): value for name, value in scores.items()}
        return Verdict(scores.pop("reward"), scores)

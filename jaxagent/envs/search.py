"""The Search-R1 environment: the policy writes <search> query </search>, reads <information>, ends with <answer>.

Task (a question with gold answers) + `Retriever` in -> observations and a verdict out. Texts are the published ones,
letter for letter (Jin et al., https://arxiv.org/abs/2503.09516). Deliberate differences from the published code:

- A generation that ends with the turn or token budget is not cut and re-tokenised; sampled ids stay as they are.
- The search of the last turn is not executed: nobody would read its result. This changes no score.
- An answer is looked for in the policy's own text when `reward.min_answers` is 1; with 2, in prompt + response, as
  published.
- A failing search engine is an error of the episode, not an empty <information> block.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence

from jaxagent.config import ConfigError, EnvConfig, RewardConfig
from jaxagent.envs import tags
from jaxagent.envs.base import Message, Observation, Step, Transcript, Verdict, most_turns
from jaxagent.envs.retriever.base import Retriever
from jaxagent.envs.search_rewards import score
from jaxagent.rewards import length, tool_efficiency
from jaxagent.rewards.composite import Composite, Part
from jaxagent.rewards.view import ToolCall, View
from jaxagent.types import StopReason, Task, TokenKind

STOP_STRINGS = ("</search>", "</answer>")
TOOL_PREFIXES = ("<search>", "<answer>")  # how each of its actions begins
TAGS = ("<search>", "</search>", "<information>", "</information>", "<answer>", "</answer>")
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
    return PROMPTS[style].format(question=question if question.endswith("?") else question + "?")


def messages(style: str, question: str) -> tuple[Message, ...]:
    """The prompt of a question; `style` is env.prompt."""
    user = Message("user", render_prompt(style, question))
    return (Message("system", SYSTEM), user) if style == "chat" else (user,)


def render_observation(documents: Iterable[tuple[str, str]]) -> str:
    """The <information> block of (title, text) documents, best first."""
    lines = (f"Doc {i}(Title: {title}) {text}\n" for i, (title, text) in enumerate(documents, 1))
    return f"\n\n<information>{''.join(lines).strip()}</information>\n\n"


def observed(style: str, found: bool, text: str) -> Observation:
    """A text that the policy is shown, as env.prompt has it: more of its own text, or a user message.

    Args:
      style: env.prompt.
      found: whether the text is what a search has found; else it says that the action was invalid.
      text: as `render_observation` makes it, or `INVALID_ACTION`.
    """
    kind = TokenKind.OBSERVATION if found else TokenKind.WARNING
    return Observation(((text.strip(), kind),), "user") if style == "chat" else Observation(((text, kind),))


def parse_action(text: str) -> tuple[str, str] | None:
    """The first complete action: ("search" | "answer", stripped content), or None."""
    text = text[: tags.MAX_CHARS]
    first = [(*pair, name) for name, marks in _ACTIONS.items() if (pair := next(tags.spans(*marks, text), None))]
    if not first:
        return None
    begun, ended, name = min(first, key=lambda found: found[0].start())
    return name, text[begun.end() : ended.start()].strip()


def check(config: EnvConfig) -> None:
    """Raises ConfigError for settings that would silently make every reward 0."""
    if config.prompt != "search_r1" and config.reward.min_answers > 1:
        raise ConfigError(
            f"env.reward.min_answers={config.reward.min_answers} counts the example answer of the search_r1 prompt; "
            f"with env.prompt='{config.prompt}' set it to 1."
        )
    shaped_reward(config)


@functools.lru_cache(maxsize=8)
def shaped_reward(config: EnvConfig) -> Composite | None:
    """The published score with the configured shaping around it; None when nothing is added.

    Raises:
      ConfigError: shaping that cannot mean anything.
    """
    shaping = config.reward.shaping
    if shaping.overlong_weight == shaping.efficiency_weight == 0:
        return None
    most = most_turns(config) * config.turn_tokens
    if shaping.overlong_weight and not 0 < shaping.overlong_buffer_tokens <= most:
        raise ConfigError(
            f"env.reward.shaping.overlong_buffer_tokens must be 1 to {most} (all an episode can sample), "
            f"got {shaping.overlong_buffer_tokens}."
        )
    long = functools.partial(length.soft_overlong, max_tokens=most, buffer_tokens=shaping.overlong_buffer_tokens)
    calls = functools.partial(
        tool_efficiency.tool_efficiency,
        tools=("search",),
        budget=shaping.efficiency_budget,
        penalty=shaping.efficiency_penalty,
    )
    parts = [Part("outcome", functools.partial(_outcome, config.reward), weight=1.0, low=0.0, high=1.0)]
    for name, reward, weight in (
        ("overlong", long, shaping.overlong_weight),
        ("efficiency", calls, shaping.efficiency_weight),
    ):
        if weight:
            parts.append(Part(name, reward, weight=weight, low=-1.0, high=0.0, shaping=True))
    return Composite(tuple(parts), shaping.cap)


def _outcome(config: RewardConfig, view: View) -> dict[str, float]:
    return score(config, view.answer or "", view.response, view.task.answers)


class SearchEnvironment:
    """One attempt at one question. See `envs.base.Environment`.

    The policy gets `max_turns` generations, and one more when `final_turn` is set (the published N+1 variant). An
    action that is no search and no answer costs a turn and is answered by `INVALID_ACTION`.
    """

    stop_strings: Sequence[str] = STOP_STRINGS
    tool_prefixes: Sequence[str] = TOOL_PREFIXES

    def __init__(self, task: Task, config: EnvConfig, retriever: Retriever):
        self._task = task
        self._config = config
        self._retriever = retriever
        self._turns_left = most_turns(config)
        self._queries: list[str] = []
        self.counters: dict[str, float] = {"searches": 0.0, "invalid_actions": 0.0, "empty_searches": 0.0}

    async def start(self) -> Sequence[Message]:
        """The question as one user message, after what the prompt's style needs to say."""
        return messages(self._config.prompt, self._task.prompt)

    async def step(self, action: str) -> Step:
        """Searches, ends, or says that the action is invalid."""
        self._turns_left -= 1
        parsed = parse_action(action)
        if parsed is None:
            self.counters["invalid_actions"] += 1
        if parsed is not None and parsed[0] == "answer":
            return Step(stop_reason=StopReason.ANSWER)
        if self._turns_left <= 0:
            return Step(stop_reason=StopReason.TURN_LIMIT)
        if parsed is None:
            return Step(observed(self._config.prompt, False, INVALID_ACTION))
        self.counters["searches"] += 1
        self._queries.append(parsed[1])
        (passages,) = await self._retriever.search([parsed[1]], self._config.retriever.topk)
        self.counters["empty_searches"] += not passages
        text = render_observation((p.title, p.text) for p in passages)
        return Step(observed(self._config.prompt, True, text))

    async def verify(self, transcript: Transcript) -> Verdict:
        """Search-R1's reward of the configured profile, and what the config adds to it."""
        published = self._config.reward.min_answers > 1
        answer_text = transcript.prompt + transcript.response if published else transcript.actions
        reward = shaped_reward(self._config)
        if reward is None:
            scores = score(self._config.reward, answer_text, transcript.response, self._task.answers)
        else:
            view = View(
                self._task,
                transcript.turns,
                answer=answer_text,
                tool_calls=tuple(ToolCall("search", {"query": query}) for query in self._queries),
                action_tokens=transcript.action_tokens,
            )
            scores = {name.removeprefix("outcome/"): value for name, value in reward(view).items()}
        return Verdict(scores.pop("reward"), scores)

    async def close(self) -> None:
        """The retriever is shared and stays open."""

"""The tau2 environment: the policy is the agent of a service, another role the customer, who may have tools as well.

    --config.env=tau2 --config.env.domain=mock --config.data.source=tau2-bench/data/tau2/domains/mock
    --config.env=tau2 --config.env.domain=retail --config.data.source=tau2-bench/data/tau2/domains/retail
    --config.roles.user=http --config.roles.user.url=http://127.0.0.1:8000/v1 --config.roles.user.model=NAME

The folder of tasks is the published one: tasks.json, split_tasks.json, policy.md, db.json and user_db.json. Without a
db.json, `store` names a folder that has one, or tau-bench's orders.json, products.json and users.json, which are the
same shop. The agent's tools are described in its system message and called as <tool_call>{...}</tool_call>.

Differences from the published code, each of which says where: only the user ends an episode, as with the published
agent of this mode (`attempt`); an assertion about something that is not there does not hold (`world`); ACTION asks who
called (`rewards`); initial data for one side leaves the other side's store alone, where the published code gives both
sides one store; the words of the prompts are ours (`words`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from jaxagent.config import ConfigError
from jaxagent.config.ranges import PositiveInt
from jaxagent.data.fields import RowError
from jaxagent.envs.base import Environment, Observation, Opening, folder_of
from jaxagent.envs.cast import Cast
from jaxagent.envs.tau2.attempt import SOLVED, Tau2Attempt
from jaxagent.envs.tau2.rows import AGENT, KEY, USER, Tau2Task, parse
from jaxagent.envs.tau2.stock import read_policy, read_stock
from jaxagent.envs.tau2.world import DOMAINS, Differences, Stock, World, check_task, gold
from jaxagent.tools.hermes import CLOSE, OPEN
from jaxagent.types import Task, TokenKind


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tau2(Environment):
    """Customers with a request, an agent with tools, and a reward of what became of both their stores."""

    domain: Literal["mock", "retail"] = "mock"
    store: str = ""  # folder of both stores; "" = where the tasks are
    max_steps: PositiveInt = 200  # messages and batches of results, of both sides
    max_errors: PositiveInt = 10  # failed calls, of both sides
    nl_assertions: Literal["refuse", "judge", "skip"] = (
        "refuse"  # "skip" leaves them out of the reward, and counts them
    )

    solves = True
    score = SOLVED
    calls = "calls"
    stop_strings = (CLOSE,)
    tokens = (OPEN, CLOSE)

    @property
    def roles(self) -> Sequence[str]:  # type: ignore[override]
        """The user, and the judge if one is asked."""
        return ("user", "judge") if self.nl_assertions == "judge" else ("user",)

    def observation(self, action: str, text: str) -> Observation:
        """The answer of the user, or results after a call."""
        return Observation(((text, TokenKind.OBSERVATION),), "tool" if action.rstrip().endswith(CLOSE) else "user")

    @contextlib.contextmanager
    def open(self, opening: Opening) -> Iterator[Callable[[Task, Cast], Tau2Attempt]]:  # type: ignore[override]
        """Reads the policy and the stores, and checks all tasks."""
        folder = _folder(opening.dataset)
        domain = DOMAINS[self.domain]
        policy = read_policy(folder)
        stock = self._stock(folder)
        tasks: dict[str, tuple[Any, Tau2Task, Differences]] = {}  # with the row that it was read from

        def read(task: Task) -> tuple[Tau2Task, Differences]:
            row = task.metadata.get(KEY)
            if task.id not in tasks or tasks[task.id][0] != row:
                try:
                    about = parse(row, f"metadata.{KEY}.")
                    check_task(domain, about)
                    self._check_judged(about)
                    tasks[task.id] = (row, about, gold(domain, stock, about))
                except RowError as error:
                    raise ConfigError(f"task '{task.id}': {error}.") from None
            return tasks[task.id][1:]

        opening.check(read)

        def attempt_at(task: Task, cast: Cast) -> Tau2Attempt:
            about, gold_differences = read(task)
            world = World(domain, stock)
            world.prepare(about)
            own = domain[USER].described
            tools = own if about.user_tools is None else tuple(tool for tool in own if tool.name in about.user_tools)
            return Tau2Attempt(about, world, gold_differences, (policy, domain[AGENT].described, tools), self, cast)

        yield attempt_at

    def identity(self, dataset: Path) -> Mapping[str, str]:
        """Digests of the policy and of both stores."""
        folder = _folder(dataset)
        world = World(DOMAINS[self.domain], self._stock(folder))
        policy = hashlib.sha256(read_policy(folder).encode()).hexdigest()
        return {"policy": policy, "store": world.digest(AGENT), "user_store": world.digest(USER)}

    def _stock(self, folder: Path) -> Stock:
        return read_stock(DOMAINS[self.domain], Path(self.store) if self.store else folder)

    def _check_judged(self, task: Tau2Task) -> None:
        criteria = task.criteria
        if self.nl_assertions != "refuse" or criteria is None or "NL_ASSERTION" not in criteria.reward_basis:
            return
        if criteria.nl_assertions:
            raise RowError(
                "evaluation_criteria.nl_assertions",
                "only a judge can tell whether they are true: config.env.nl_assertions=judge asks the role 'judge', "
                "and =skip leaves them out of the reward",
            )


def _folder(dataset: Path | None) -> Path:
    """Where policy.md is."""
    if dataset is None:
        raise ConfigError("config.env=tau2 needs config.data.source to be a folder with tasks.json and policy.md.")
    return folder_of(dataset)

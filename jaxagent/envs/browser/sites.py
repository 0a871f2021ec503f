"""The interface of a site: who answers the browser's requests, and who judges what the policy did there.

    visit = site.visit(task)                          # one per attempt; its state is the attempt's own
    visit.respond("POST", "/basket", {"item": "3"})   # each request of the page, in this process: no server, no port
    visit.judge(page, "blue")                         # once, at the end

`config.env.site` is one of `SITES`, or a class of yours: a frozen dataclass whose fields are its settings.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from jaxagent.envs.base import Verdict
from jaxagent.types import Task

if TYPE_CHECKING:
    from jaxagent.envs.browser.page import BrowserPage as Page  # a visit may `evaluate` an expression in it

# Name -> "module:Class"
SITES: dict[str, str] = {
    "miniwob": "jaxagent.envs.browser.miniwob:MiniWob",
    "shop": "jaxagent.envs.browser.shop.site:WebShop",
}


@dataclasses.dataclass(frozen=True)
class Response:
    """What a site answers."""

    body: str | bytes = ""
    status: int = 200
    content_type: str = "text/html; charset=utf-8"
    location: str = ""  # where to look instead, with a status from 301 to 308


class Visit(Protocol):
    """One attempt's site. Single use.

    Attributes:
      url: the first page; all pages of the site have its scheme and host. Others are refused.
    """

    url: str

    def respond(self, method: str, path: str, form: Mapping[str, str]) -> Response | None:
        """Answers a request; None = there is nothing of this name, and the request is refused. May be `async`.

        A form that changes something is best answered by status 303 and the `location` of what is then shown: a page
        that was the answer itself would be asked for, and the change made, again when the policy goes back to it.

        Args:
          method: "GET", "POST", ...
          path: decoded, without the query.
          form: fields of the query and of a form; of several of one name the last. Another body is the field "".
        """
        ...

    async def goal(self, page: Page) -> str:
        """What the policy is asked to do, when the first page is there: `task.prompt`, or what the page says."""
        ...

    async def over(self, page: Page) -> bool:
        """Whether the attempt is over without an answer; asked after each action."""
        ...

    async def judge(self, page: Page, answer: str | None) -> Verdict:
        """The reward and the component "solved", from 0 to 1; `answer` is None where the policy gave none."""
        ...

    async def solve(self, page: Page, shown: str) -> str | None:
        """What somebody who knows the solution does, for `envs.check`; None = nobody knows. `shown` is the prompt, or
        the observation that followed the last action; `tree.find` finds numbers in it."""
        ...


class Site(Protocol):
    """Settings of a site, shared by all attempts.

    It may have `new_task(failed, rng)`, as `Environment.new_task`.
    """

    def visit(self, task: Task) -> Visit:
        """A fresh site for an attempt at a task. Raises ConfigError: the task is none of this site's."""
        ...

    def tasks(self, seed: int, num_train: int, num_heldout: int) -> Mapping[str, Sequence[Mapping[str, Any]]]:
        """Rows "train" and "heldout" of the site's own, for `data.source=site`. May be missing: it has none."""
        ...

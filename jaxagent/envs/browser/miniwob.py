"""MiniWoB++ (Liu et al., arXiv 1802.08802): the pages of the package miniwob, in our own browser.

    pip install miniwob --no-deps          # its pages are all that is used
    --config.env=browser --config.env.site=miniwob --config.data.source=site

A task is a page and a seed; the page makes the problem of it and says what is to be done. The reward is what the page
pays, from -1 to 1, without its discount by time; a page's clock goes only when the policy acts, and no problem is over
because time is.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import itertools
import json
import mimetypes
import random
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxagent.config import ConfigError
from jaxagent.envs.base import Verdict
from jaxagent.envs.browser import sites
from jaxagent.envs.browser.tree import find
from jaxagent.envs.seeds import seed_of
from jaxagent.types import Task

HOST = "http://miniwob.test"
# "left_out": why -> pages. "solutions": page -> what its goal says, and its steps, kind|role#number|name|text, in which
# {0} is the goal's first group.
_PAGES = json.loads(Path(__file__).with_suffix(".json").read_text("utf-8"))
LEFT_OUT = {name: why for why, names in _PAGES["left_out"].items() for name in names.split()}
SOLUTIONS = _PAGES["solutions"]
BEGIN = Path(__file__).with_suffix(".js").read_text("utf-8")


@dataclasses.dataclass(frozen=True)
class MiniWob:
    """All pages that can be played through a tree of elements, or those that `pages` names."""

    pages: tuple[str, ...] = ()  # ("click-test", "enter-text"); () = all but those in `LEFT_OUT`
    folder: str = ""  # of the package's html; "" = of the package that is installed

    @property
    def root(self) -> Path:
        """The folder of the pages. Raises ConfigError: there is none."""
        spec = importlib.util.find_spec("miniwob")  # imports nothing of it
        root = Path(self.folder or (Path(spec.origin).parent / "html" if spec and spec.origin else ""))
        if not (root / "miniwob").is_dir():
            raise ConfigError(
                "config.env.site=miniwob finds no pages: pip install miniwob --no-deps, or set its folder."
            )
        return root.resolve()

    def names(self) -> list[str]:
        """The pages that are played. Raises ConfigError: one is none."""
        there = {path.stem for path in (self.root / "miniwob").glob("*.html")}
        if wrong := sorted(set(self.pages) - there):
            raise ConfigError(f"config.env.site.pages: the package has no page '{wrong[0]}'.")
        return sorted(self.pages or there - set(LEFT_OUT))

    def tasks(self, seed: int, num_train: int, num_heldout: int) -> dict[str, list[dict[str, Any]]]:
        """Pages one after the other, each time with a seed of its own; no seed is both training and held out."""
        drawn = iter(random.Random(f"miniwob/{seed}").sample(range(2**31), num_train + num_heldout))
        names = itertools.cycle(self.names())
        return {
            split: [
                {"id": f"{name}-{s}", "prompt": name, "answers": [], "kind": name, "metadata": {"seed": s}}
                for name, s in zip(itertools.islice(names, count), drawn, strict=False)
            ]
            for split, count in (("heldout", num_heldout), ("train", num_train))
        }

    def visit(self, task: Task) -> Problem:
        """A page with a problem. Raises ConfigError: there is no page of this name."""
        root = self.root
        if not task.prompt.replace("-", "").isalnum() or not (root / "miniwob" / f"{task.prompt}.html").is_file():
            raise ConfigError(f"a task of MiniWoB++ has a page as its prompt, such as click-test, not {task.prompt!r}.")
        return Problem(root, task.prompt, seed_of(task))


class Problem:
    """A page of the package, and its problem of a seed."""

    def __init__(self, root: Path, name: str, seed: int) -> None:
        self.url = f"{HOST}/miniwob/{name}.html"
        self._root, self._name, self._seed = root, name, seed
        self._goal, self._steps = "", 0

    def respond(self, method: str, path: str, form: Mapping[str, str]) -> sites.Response | None:
        """A file of the package."""
        file = (self._root / path.lstrip("/")).resolve()
        if method != "GET" or not file.is_relative_to(self._root) or not file.is_file():
            return None
        return sites.Response(file.read_bytes(), content_type=mimetypes.guess_type(file.name)[0] or "text/plain")

    async def goal(self, page: sites.Page) -> str:
        """Has the page make its problem, and says what it asks."""
        self._goal = await page.evaluate(BEGIN.replace("(SEED)\n", f"('{self._seed}')\n"))
        return self._goal

    async def over(self, page: sites.Page) -> bool:
        """Whether the page has paid."""
        return bool(await page.evaluate("WOB_DONE_GLOBAL"))

    async def judge(self, page: sites.Page, answer: str | None) -> Verdict:
        """What the page has paid; an answer says nothing to it."""
        done, raw = await page.evaluate("[WOB_DONE_GLOBAL, WOB_RAW_REWARD_GLOBAL]")
        reward = float(raw) if done else 0.0
        return Verdict(reward, {"solved": max(0.0, reward), "finished": float(done)})

    async def solve(self, page: sites.Page, shown: str) -> str | None:
        """For the pages that `SOLUTIONS` has."""
        pattern, *steps = SOLUTIONS.get(self._name, [""])
        match, self._steps = re.search(pattern, self._goal), self._steps + 1
        if self._steps > len(steps) or match is None:
            return None
        kind, role, name, *text = (part.format(*match.groups()) for part in steps[self._steps - 1].split("|"))
        role, _, nth = role.partition("#")
        return " ".join([kind, str(find(shown, role, name, int(nth or 0))), *text])

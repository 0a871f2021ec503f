"""The shop in a real Chromium shows what `web_shop_reader` says without one: demonstrations show what a policy sees."""

import asyncio
import itertools
import json
import random
import re

import pytest

from data_pipelines import web_shop
from data_pipelines.web_shop_reader import Reader
from jaxagent.envs import check
from jaxagent.envs.browser.environment import Browser, BrowserAttempt
from jaxagent.envs.browser.shop import site, wares
from jaxagent.envs.browser.shop.shopping import Shopping
from jaxagent.types import StopReason, Task

AT_ONCE = 8
ENVIRONMENT = Browser(site=site.WebShop(), instructions="", max_turns=30)


def some_tasks(scale, number):
    rows = itertools.islice(web_shop.rows("chromium", scale, web_shop.TRAIN), number)
    return [Task(row["id"], row["prompt"], (), metadata=row["metadata"]) for row in rows]


def played(browsers, tasks, play):
    """What `play(attempt_at, task)` gives back for each of these tasks, several at once, and their environment."""
    opened, workers = browsers
    free = asyncio.Semaphore(AT_ONCE)

    async def one(task):
        async with free:
            return await play(lambda task: BrowserAttempt(task, ENVIRONMENT, opened), task)

    async def everything():
        return await asyncio.gather(*map(one, tasks))

    return workers.run(everything(), 300.0)


def chance(reader, random_):
    """Some action on the page, mostly one that can be done."""
    numbered = re.findall(r"^\[(\d+)\] (\w+)(?: .* of (.*))?", reader.shown(), re.MULTILINE)
    if not numbered or random_.random() < 0.2:
        return "back"
    number, role, options = random_.choice(numbered)
    if role == "combobox":
        return f"select {number} {random_.choice(json.loads(f'[{options}]'))}"
    return f"type {number} {random_.choice(wares.KINDS[:12])}" if role == "textbox" else f"click {number}"


@pytest.mark.slow
@pytest.mark.parametrize(("scale", "number"), [("compact", 24), ("full", 8)])
def test_the_browser_shows_what_the_reader_says(browsers, scale, number):

    async def play(attempt_at, task):
        """Half by chance; the pages that were compared."""
        random_, goal = random.Random(task.id), wares.goal_of(task.metadata["goal"])
        reader = Reader(Shopping(wares.draw(task.metadata["shop"], scale)))
        attempt, pages = attempt_at(task), 0
        try:
            [message] = await attempt.start()
            assert message == ENVIRONMENT.messages(f"{task.prompt}\n\n{reader.shown()}")[0]
            for _ in range(14):
                action = site.next_action(goal, reader.shown())
                if action is None or random_.random() < 0.5:
                    action = chance(reader, random_)
                done = True
                try:
                    reader.act(action)
                except ValueError:
                    done = False
                step = await attempt.step(f"<action>{action}</action>")
                if step.observation is None:
                    return pages
                expected = ENVIRONMENT.observation("", reader.shown()).text
                assert step.observation.text == expected if done else "No action" in step.observation.text, action
                pages += done
            return pages
        finally:
            await attempt.close()

    assert sum(played(browsers, some_tasks(scale, number), play)) > 5 * number


@pytest.mark.slow
def test_the_oracle_earns_1_and_idle_and_an_answer_without_an_order_earn_0(browsers):
    tasks = some_tasks("compact", 4) + some_tasks("full", 2)

    async def proof(attempt_at, task):
        return await check.check(ENVIRONMENT, attempt_at, task)

    async def answered(attempt_at, task):
        attempt = attempt_at(task)
        try:
            await attempt.start()
            step = await attempt.step("<action>answer I have bought it.</action>")
            return step.stop_reason, (await attempt.verify(None)).reward
        finally:
            await attempt.close()

    proofs = played(browsers, tasks, proof)
    assert [(row["oracle"], row["idle"], row["error"]) for row in proofs] == [(1.0, 0.0, "")] * 6
    assert played(browsers, tasks, answered) == [(StopReason.ANSWER, 0.0)] * 6

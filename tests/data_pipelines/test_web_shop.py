"""Goals of generated web shops: what is wanted is in one split only, and each mistake of a demonstration costs."""

import itertools
import json

import pytest

from data_pipelines import web_shop
from jaxagent.data import sources
from jaxagent.envs.browser.shop import site, wares
from jaxagent.types import Task


def some(scale="compact", split=web_shop.TRAIN, number=20):
    return list(itertools.islice(web_shop.rows("test", scale, split), number))


def wanted(row):
    goal = row["metadata"]["goal"]
    return goal["kind"], goal["maker"], goal["most"]


@pytest.mark.parametrize("scale", wares.SCALES)
def test_exactly_one_product_fits_and_the_site_takes_the_task(scale):
    for row in some(scale):
        shop = wares.draw(row["metadata"]["shop"], scale)
        goal = wares.goal_of(json.loads(json.dumps(row["metadata"]["goal"])))
        assert sum(map(goal.fits, shop.products)) == 1 and row["prompt"] == goal.text()
        site.WebShop().visit(Task(row["id"], row["prompt"], (), metadata=row["metadata"]))


def test_what_is_wanted_is_in_one_split_only():
    train, held_out = some(number=600), some(split=web_shop.HELDOUT, number=300)
    assert not {wanted(row) for row in train} & {wanted(row) for row in held_out}
    assert len({row["id"] for row in train + held_out}) == 900
    kinds = {"maker/one", "maker/more", "price/one", "price/more"}
    assert {row["kind"] for row in train} == {row["kind"] for row in held_out} == kinds


@pytest.mark.parametrize("scale", wares.SCALES)
def test_right_demonstrations_solve_their_tasks_and_flawed_ones_by_chance_alone(scale):
    solved = {
        (looks, chooses): [web_shop.demonstration(row, looks, chooses)["solved"] for row in some(scale)]
        for looks, chooses in itertools.product((True, False), repeat=2)
    }
    assert all(solved.pop((True, True)))
    assert all(sum(flawed) < 0.5 * len(flawed) for flawed in solved.values())


def test_an_excerpt_is_one_turn_of_a_right_episode():
    for number, row in enumerate(some()):
        [turn] = web_shop.excerpt(row, number)["turns"]
        assert turn in web_shop.demonstration(row, True, True)["turns"]


def test_a_dataset_is_written_twice_alike_and_read_back(tmp_path):
    flawed = {"looks": 0.6, "chooses": 0.45}
    for name in ("a", "b"):
        web_shop.write(tmp_path / name, 40, 7, "compact", 30, 12, flawed)
    for file in ("full.jsonl", "curriculum.jsonl", "texts.jsonl"):
        assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes()
    train, held_out = (
        list(sources.load_tasks(tmp_path / "a", split, need_answers=False)) for split in ("train", "heldout")
    )
    assert (len(train), len(held_out)) == (30, 10)
    shown = [json.loads(line) for line in (tmp_path / "a" / "full.jsonl").open()]
    held = {(goal["kind"], goal["maker"], goal["most"]) for task in held_out for goal in [task.metadata["goal"]]}
    prompts = {row["prompt"].splitlines()[0] for row in shown}
    assert len(shown) == 30 and not prompts & {task.prompt for task in held_out} and held

"""Writes a generated store with its tasks and demonstrations; `__main__` says what for."""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import random
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxagent.config import ConfigError
from jaxagent.data_pipelines import generated
from jaxagent.data_pipelines.tau_store import demonstrations, store, tasks
from jaxagent.data_pipelines.tau_store.store import Store
from jaxagent.envs.tau import toolbox
from jaxagent.envs.tau.store import ShopStore

TRAIN, HELDOUT = "train", "heldout"
HELDOUT_FRAC = 0.25  # of the users
NUM_PRODUCTS = 16
TRIES = 60  # users that are asked whether they have a task of a kind
SHOWN_USERS = 24  # of each of the further stores that demonstrations are about
SHOWN_TASKS = 20 * len(tasks.KINDS)  # demonstrations of one such store


def splits_of(drawn: Store) -> dict[str, list[str]]:
    """The users of each split: the last quarter of the store's is held out."""
    users = list(drawn.users)
    held_out = max(1, round(HELDOUT_FRAC * len(users)))
    return {TRAIN: users[:-held_out], HELDOUT: users[-held_out:]}


def rows(
    drawn: Store, users: Sequence[str], seed: str, compact: bool, kinds: Sequence[str] = tasks.KINDS
) -> Iterator[dict[str, Any]]:
    """Endless stream of task rows about these users, no two equal, the kinds in turn.

    It ends after a round in which no kind gave anything new: then the store has no more tasks.
    """
    seen: set[str] = set()
    for number in itertools.count():
        before = len(seen)
        for kind in kinds:
            row = _row(kind, drawn, users, random.Random(f"{seed}/{number}/{kind}"), compact)
            if row is not None and row["id"] not in seen:
                seen.add(row["id"])
                yield row
        if len(seen) == before:
            return


def _row(kind: str, drawn: Store, users: Sequence[str], random_: random.Random, compact: bool) -> dict[str, Any] | None:
    for _ in range(TRIES):
        metadata = tasks.draw(kind, random_.choice(users), drawn, users, random_, compact)
        if metadata is not None:
            text = json.dumps(metadata, sort_keys=True)
            return {
                "id": f"tau_store/{hashlib.blake2b(text.encode(), digest_size=6).hexdigest()}",
                "prompt": metadata["instruction"],  # of the customer; an agent is never shown it
                "answers": [],
                "kind": kind,
                "metadata": metadata,
            }
    return None


def checked(drawn: Store, split_rows: Mapping[str, Sequence[Mapping[str, Any]]]) -> None:
    """Replays every task's actions and looks at the splits.

    Raises:
      ConfigError: an action is refused, a task that must change the store does not (or the other way round), a user
        is in two splits, or a split lacks a kind. Names the task.
    """
    shops = ShopStore(drawn.data())
    users: dict[str, str] = {}
    for split, its in split_rows.items():
        missing = set(tasks.KINDS) - {row["kind"] for row in its}
        if missing:
            raise ConfigError(f"There are too few tasks or users: split '{split}' has none of {sorted(missing)[0]}.")
        for row in its:
            about = row["metadata"]
            for user in (about["user_id"], *_owners(drawn, about)):
                if users.setdefault(user, split) != split:
                    raise ConfigError(f"task {row['id']}: user {user} is in the splits '{split}' and '{users[user]}'.")
            shop = shops.open()
            said = [toolbox.call(shop, action["name"], action["kwargs"]) for action in about["actions"]]
            if refused := [text for text in said if text.startswith("Error")]:
                raise ConfigError(f"task {row['id']}, {row['kind']}: the store refuses its actions: {refused[0]}")
            if (shop.digest() != shops.digest) != bool(about["actions"]):
                raise ConfigError(f"task {row['id']}, {row['kind']}: its actions do not do what its kind says.")


def _owners(drawn: Store, about: Mapping[str, Any]) -> list[str]:
    """The owners of the orders that a task is about."""
    named = [wish["order"] for wish in about["customer"]["wishes"] if "order" in wish]
    return [drawn.orders[order_id]["user_id"] for order_id in named]


def further(seed: int, kinds: Sequence[str]) -> Iterator[tuple[dict[str, Any], ShopStore]]:
    """Endless stream of tasks with their stores, compact ones, none of which is the store of the dataset's tasks."""
    for count in itertools.count():
        name = f"{seed}/further/{count}"
        drawn = store.draw(random.Random(name), SHOWN_USERS, NUM_PRODUCTS, compact=True)
        shops = ShopStore(drawn.data())
        its = rows(drawn, list(drawn.users), name, compact=True, kinds=kinds)
        yield from ((row, shops) for row in itertools.islice(its, SHOWN_TASKS))


def shown(seed: int, number: int, flawed_frac: float) -> Iterator[dict[str, Any]]:
    """`number` whole demonstrations, the kinds in turn."""
    for row, shops in itertools.islice(further(seed, tasks.KINDS), number):
        yield demonstrations.demonstration(row, shops, **demonstrations.mistakes(row, flawed_frac))


def practised(seed: int, number: int, flawed_frac: float) -> Iterator[dict[str, Any]]:
    """`number` rows in which only what follows the look at an order is learnt."""
    for row, shops in itertools.islice(further(seed, demonstrations.PRACTISED), number):
        asks_more = demonstrations.mistakes(row, flawed_frac)["asks_more"]
        yield demonstrations.practice(row, shops, asks_more)


def mixed(seed: int, number: int, flawed_frac: float) -> Iterator[dict[str, Any]]:
    """Two whole demonstrations, then one of practice, and so on."""
    whole, practice = shown(seed, number, flawed_frac), practised(seed, number // 2, flawed_frac)
    for count, row in enumerate(whole, 1):
        yield row
        if count % 2 == 0:
            yield next(practice)


def excerpts(seed: int, number: int) -> Iterator[dict[str, Any]]:
    """`number` excerpts, for a curriculum."""
    for row, shops in itertools.islice(further(seed, demonstrations.EXCERPTED), number):
        yield demonstrations.excerpt(row, shops)


def write(
    folder: Path,
    num: int,
    seed: int,
    num_users: int,
    compact: bool,
    num_demonstrations: int,
    num_curriculum: int,
    flawed_frac: float = 0.0,
) -> None:
    """Writes the dataset that `__main__` describes into `folder`, which must not exist yet.

    Args:
      folder: where it will stand.
      num: tasks, both splits together; fewer where the store has no more.
      seed: of the draws; the same seed gives the same bytes.
      num_users: of the store.
      compact: a store with short ids and few items, for a small policy; see `store.draw`.
      num_demonstrations: whole ones in full.jsonl, the kinds in turn; half as many rows of practice are among them.
      num_curriculum: rows of curriculum.jsonl.
      flawed_frac: how likely each of the two mistakes of a demonstration is; see `demonstrations`.

    Raises:
      ConfigError: too few tasks or users for two splits with all kinds, or a task that is wrong.
    """
    drawn = store.draw(random.Random(f"{seed}/store"), num_users, NUM_PRODUCTS, compact)
    split_rows = {}
    for split, users in splits_of(drawn).items():
        share = round(num * len(users) / num_users)
        split_rows[split] = list(itertools.islice(rows(drawn, users, f"{seed}/{split}", compact), share))
    checked(drawn, split_rows)
    episodes = list(mixed(seed, num_demonstrations, flawed_frac))
    texts = generated.as_rows(demonstrations.tokenizer_texts(episodes[:2000]))
    beside = {"full.jsonl": episodes, "curriculum.jsonl": excerpts(seed, num_curriculum), "texts.jsonl": texts}
    partial = folder.with_name(f"{folder.name}.store-{os.getpid()}")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        generated.write_dataset(partial, split_rows, beside, need_answers=False)
        for name, records in drawn.data().items():
            (partial / f"{name}.json").write_text(json.dumps(records, indent=1) + "\n", "utf-8")
        partial.rename(folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)

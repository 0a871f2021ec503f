"""Stored episodes that can no longer be read: played again where that gives what they were, and told where not."""

import asyncio
import contextlib
import json
import pathlib
import types

import numpy as np
import pytest

from jaxagent.config import ConfigError
from jaxagent.fleet import episodes, manifest, server, status, weights
from jaxagent.fleet.admission import Answer, Coordinator, Outcome
from jaxagent.fleet.book import Book
from jaxagent.fleet.client import CallError
from jaxagent.fleet.core import Core
from jaxagent.fleet.episodes import FOLDER
from jaxagent.fleet.members import Members
from jaxagent.fleet.plan import EpisodeId, GroupId, Plan
from jaxagent.fleet.playing import Playing
from jaxagent.fleet.record import LostEpisodeError
from jaxagent.fleet.vitals import WEIGHTS, Vitals
from jaxagent.fleet.wire import Sources
from jaxagent.runs.fleet import source
from jaxagent.runs.fleet.sink import lacking
from tests.fleet.served import FACTS, Served, Trainer, engines, oracle, packed, tasks_of, usable
from tests.fleet.test_trainer_seams import CFG
from tests.fleet.world import snapshot

PLAN = Plan(steps=3, groups_per_step=2, attempts=2, staleness=1)
WHICH = EpisodeId(GroupId(0, 0, 1), 1)


def of(which: EpisodeId, play: str = "") -> str:
    return f"{tuple(which.group)}/{which.sample}{play}"


def formed(exact: bool = True, trained: bool = False, **settings) -> Coordinator:
    """The batch of step 0 is there."""
    plan = Plan(**{"steps": 3, "groups_per_step": 2, "attempts": 2, "staleness": 1} | settings)
    coordinator = Coordinator(plan, "v0", 1, exact=exact)
    for number in range(2):
        group = GroupId(0, 0, number)
        for sample in range(2):
            coordinator.put(EpisodeId(group, sample), "1-9", 0, of(EpisodeId(group, sample)))
        coordinator.close(group, usable=True)
    assert coordinator.batch(0) is not None
    if trained:
        coordinator.publish(1, "v1")
    return coordinator


def play_again(coordinator: Coordinator, play: str = ""):
    """Whoever takes next gets the damaged one, and hands it in."""
    name, _ = coordinator.join(0.0)
    (work,) = coordinator.take(0.0, name, 1, [])
    assert work.episode == WHICH and work.version == 0
    return coordinator.put(WHICH, work.lease, 0, of(WHICH, play))


# -------------------------------------------------------------------- the rules


@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize("exact", [False, True])
def test_a_pinned_episode_is_played_again_and_the_batch_is_what_it_was(exact, trained):
    coordinator = formed(exact, trained)
    before = coordinator.batch(0)
    assert coordinator.damaged(WHICH, of(WHICH)).outcome is Outcome.STORED
    assert coordinator.damaged(WHICH, of(WHICH)).outcome is Outcome.DUPLICATE
    assert coordinator.damaged(WHICH, "another").outcome is Outcome.LATE
    assert coordinator.damaged(EpisodeId(GroupId(2, 0, 0), 0), "x").outcome is Outcome.LATE
    assert coordinator.batch(0) is None
    assert play_again(coordinator).outcome is Outcome.STORED
    assert coordinator.batch(0) == before and not coordinator.conflicts
    assert coordinator.record.damaged() == [] and coordinator.record.found_damaged == 1


@pytest.mark.parametrize(("exact", "trained"), [(True, False), (True, True), (False, True)])
def test_another_result_is_a_conflict_and_the_step_says_what_to_do(exact, trained):
    """Nobody plays it a third time; who puts the first result back mends it."""
    coordinator = formed(exact, trained)
    coordinator.damaged(WHICH, of(WHICH))
    answer = play_again(coordinator, "other")
    assert answer.outcome is Outcome.CONFLICT and coordinator.conflicts == [answer.reason]
    with pytest.raises(LostEpisodeError, match=r"was .*, is damaged on disk, and was .*other.* Put the file back"):
        coordinator.batch(0)
    assert coordinator.damaged(WHICH, of(WHICH)).outcome is Outcome.REFUSED
    name, _ = coordinator.join(0.0)
    assert WHICH not in [work.episode for work in coordinator.take(0.0, name, 9, [])]
    coordinator.found_again(WHICH)
    assert coordinator.batch(0) is not None and not coordinator.repairs.lost


@pytest.mark.parametrize("settings", [{"rule": "in_flight"}, {"exact": False}])
def test_where_plays_differ_another_sample_serves_a_step_that_nobody_has_trained(settings):
    coordinator = formed(**settings)
    coordinator.damaged(WHICH, of(WHICH))
    assert play_again(coordinator, "other").outcome is Outcome.STORED
    batch = coordinator.batch(0)
    assert batch is not None and batch.results[WHICH].digest == of(WHICH, "other") and not coordinator.conflicts


def test_in_flight_a_step_that_is_trained_is_refused_with_what_to_do():
    coordinator = formed(rule="in_flight", trained=True)
    answer = coordinator.damaged(WHICH, of(WHICH))
    assert answer.outcome is Outcome.REFUSED and "another sample" in answer.reason and "copy" in answer.reason
    assert coordinator.batch(0) is not None  # for who can read it


def test_a_new_coordinator_knows_what_is_to_be_played_again():
    coordinator = formed()
    coordinator.damaged(WHICH, of(WHICH))
    again = Coordinator(coordinator.plan, "v0", 2, coordinator.take_events())
    assert snapshot(again.record) == snapshot(coordinator.record) and again.record.found_damaged == 1
    assert again.batch(0) is None and play_again(again).outcome is Outcome.STORED and again.batch(0) is not None


# -------------------------------------------------------------------- files and HTTP


def file_of(served: Served, which: EpisodeId) -> pathlib.Path:
    (step, round_, number), sample = which
    folder = served.folder / server.LEDGER / FOLDER
    (path,) = folder.glob(f"{step:08d}/{round_}-{number}-{sample}-*")
    return path


def flip(path: pathlib.Path) -> bytes:
    """One byte. Returns what was there."""
    body = path.read_bytes()
    at = len(body) // 2
    path.write_bytes(body[:at] + bytes([body[at] ^ 255]) + body[at + 1 :])
    return body


def batches(tmp_path, client, said, seen=True, **settings):
    folder = tmp_path / server.LEDGER if seen else tmp_path / "elsewhere"
    return source.Batches(CFG.rl, CFG.fleet, client, folder, Vitals(), said.append, **settings)


def tokens(found) -> list[list[int]]:
    return [list(map(int, e.trajectories[0].tokens)) for group in found.chosen.sampled for e in group.episodes]


@pytest.mark.parametrize("seen", [True, False])
@pytest.mark.parametrize("harm", [flip, pathlib.Path.unlink])
def test_what_is_damaged_on_disk_is_played_again_and_the_trainer_gets_what_it_was(tmp_path, harm, seen):
    with Served(tmp_path, PLAN) as served, engines(served.url, 2) as workers:
        trainer = Trainer(served.client(), PLAN)
        trainer.run(to=1)
        said = []
        before = tokens(batches(tmp_path, trainer.client, said).batch(1))
        harm(file_of(served, EpisodeId(GroupId(1, 0, 0), 1)))
        found = batches(tmp_path, trainer.client, said, seen).batch(1)
        assert tokens(found) == before and found.metrics["fleet/damaged_episodes"] == 1.0
        (line,) = said
        assert line.startswith("step 1: episode 1 of group 0 (round 0) for step 1 is damaged on disk (")
        assert line.endswith("it is played again, and the step waits for that.")
        told = served.client().status()
        assert told["episodes"]["damaged"] == 0 and told["episodes"]["found_damaged"] == 1 and not told["conflicts"]
        trainer.run()
        assert trainer.versions == oracle(PLAN).versions and len(workers) == 2
    (row,) = map(json.loads, (tmp_path / status.DAMAGED_FILE).read_text().splitlines())
    assert row["episode"] == [1, 0, 0, 1] and "1-" in row["why"] and row["then"] == "it is played again"


def test_what_the_coordinator_cannot_read_is_told_at_once_and_played_again(tmp_path):
    """A file system that fails, a file that is none: it is not asked for again and again."""
    book_of(tmp_path / server.LEDGER, PLAN, steps=1, trained=0)
    with Served(tmp_path, PLAN, exact=True) as served:
        path = file_of(served, WHICH)
        path.unlink()
        path.mkdir()
        client = served.trainer()
        with pytest.raises(CallError, match=r"answered 404: .* it cannot be read: Is a directory"):
            client.episode(WHICH)
        assert client.damaged(WHICH, packed(WHICH, "w").digest).outcome is Outcome.STORED


def test_a_file_that_is_gone_or_back_is_found_when_the_coordinator_starts(tmp_path):
    with Served(tmp_path, PLAN, exact=True) as served:
        with engines(served.url, 1) as workers:
            trainer = Trainer(served.client(), PLAN)
            trainer.run(to=1)
            while trainer.client.batch(1, wait_s=5.0) is None:
                pass
            workers[0].kill()
        one, other = (file_of(served, EpisodeId(GroupId(1, 0, 0), sample)) for sample in (0, 1))
        body = one.read_bytes()
        served.stop()
        one.unlink()
        other.unlink()
        served.start()
        told = served.client().status()["episodes"]
        assert told["damaged"] == told["found_damaged"] == 2 and served.trainer().batch(1) is None
        served.stop()
        one.write_bytes(body)  # from a copy
        served.start()
        assert served.client().status()["episodes"]["damaged"] == 1
        rows = list(map(json.loads, (tmp_path / status.DAMAGED_FILE).read_text().splitlines()))
        assert [row["episode"] for row in rows] == [[1, 0, 0, 0], [1, 0, 0, 1]] and "is gone" in rows[0]["why"]
        with engines(served.url, 1):
            trainer.run()
        assert trainer.versions == oracle(PLAN).versions


def book_of(folder: pathlib.Path, plan: Plan, steps: int, trained: int, exact: bool = True) -> None:
    """Leaves a ledger in which batches of so many steps are formed, and so many versions trained."""
    book = Book(folder, plan, exact)
    book.publish(0, "w0", "lineage", tasks_of(plan, 0))
    for step in range(steps):
        for which in [EpisodeId(GroupId(step, 0, number), sample) for number in range(2) for sample in range(2)]:
            result = packed(which, "w")
            book.files.put(which, result)
            complete = book.rules.put(which, "1-9", max(0, step - plan.staleness), result.digest).complete
            if complete:
                book.rules.close(which.group, usable=True)
        assert book.batch(step) is not None
        if step < trained:
            book.publish(step + 1, f"w{step + 1}", "lineage", tasks_of(plan, step + 1))
    book.flush().result(60)
    book.close()


@pytest.mark.parametrize("settings", [{}, {"exact": False}, {"rule": "in_flight"}])
def test_a_coordinator_that_starts_gives_out_no_gone_episode_of_a_step_that_is_trained(tmp_path, settings):
    """Its version may be deleted by now, and engines would ask for it for ever."""
    exact = settings.pop("exact", True)
    plan = Plan(steps=5, groups_per_step=2, attempts=2, staleness=1, **settings)
    book_of(tmp_path, plan, steps=2, trained=2, exact=exact)
    for path in (tmp_path / FOLDER / "00000000").glob("*.z"):
        path.unlink()
    with contextlib.closing(Book(tmp_path, plan, exact)) as book:
        assert not book.rules.record.damaged() and sum("if the trainer asks" in note for note in book.notes) == 4
        name, _ = book.rules.join(0.0)
        jobs = book.take(0.0, name, 2, [])
        assert [(job.work.episode.group.step, job.work.version) for job in jobs] == [(2, 1)] * 2
        # A trainer that replays the step tells of it; then it is played again where that gives what it was.
        answer = book.rules.damaged(WHICH, packed(WHICH, "w").digest)
        assert answer.outcome is (Outcome.REFUSED if plan.rule == "in_flight" else Outcome.STORED)


@pytest.mark.parametrize(("exact", "rule"), [(True, "pinned"), (False, "pinned"), (True, "in_flight")])
def test_a_coordinator_that_starts_changes_no_batch_that_a_trainer_may_have_read(tmp_path, exact, rule):
    plan = Plan(steps=5, groups_per_step=2, attempts=2, staleness=1, rule=rule)
    book_of(tmp_path, plan, steps=1, trained=0, exact=exact)
    for path in (tmp_path / FOLDER / "00000000").glob("*.z"):
        path.unlink()
    with contextlib.closing(Book(tmp_path, plan, exact)) as book:
        equal = exact and rule == "pinned"
        assert len(book.rules.record.damaged()) == (4 if equal else 0)
        assert (book.batch(0) is None) is equal
        answer = book.rules.damaged(WHICH, packed(WHICH, "w").digest)
        assert answer.outcome is (Outcome.DUPLICATE if equal else Outcome.STORED)


def test_the_summary_counts_each_episode_that_is_played_again_once(tmp_path):
    assert status.played_again(tmp_path) is None
    for which, answer in [
        (WHICH, Answer(Outcome.STORED)),
        (WHICH, Answer(Outcome.STORED)),
        (EpisodeId(GroupId(0, 0, 0), 0), Answer(Outcome.STORED)),
        (EpisodeId(GroupId(2, 0, 0), 0), Answer(Outcome.REFUSED, "why")),
        (EpisodeId(GroupId(3, 0, 0), 0), Answer(Outcome.LATE)),
    ]:
        status.note_damaged(tmp_path, which, "is gone.", answer)
    with (tmp_path / status.DAMAGED_FILE).open("a") as file:
        file.write('{"time": "cut off')
    assert status.played_again(tmp_path) == 2


@pytest.mark.parametrize(("call", "outcome"), [("keep", Outcome.LATE), ("publish", Outcome.CONFLICT)])
def test_a_file_that_is_no_longer_wanted_when_it_is_written_goes_again(tmp_path, call, outcome):
    """The trainer saves or publishes the step meanwhile."""
    plan = Plan(steps=5, groups_per_step=2, attempts=2, staleness=1, rule="pinned")
    book_of(tmp_path, plan, steps=1, trained=call == "keep", exact=False)

    async def store(book):
        core = Core(book, tmp_path, Members(book.run, "", strict=False))
        playing = Playing(core, None)
        write = playing._write

        def meanwhile(which, body):
            write(which, body)
            assert len(list((tmp_path / FOLDER).rglob("*.z"))) == 4 + (play != "w")
            if call == "keep":
                book.keep(1)
            else:
                book.publish(1, "w1", "lineage", tasks_of(plan, 1))

        playing._write, playing._storing[WHICH] = meanwhile, None
        book.rules.damaged(WHICH, packed(WHICH, "w").digest)
        answer = await playing.store(WHICH, "2-9", 0, packed(WHICH, play))
        await core.close(5.0)
        return answer

    play = "w" if call == "keep" else "other"
    with contextlib.closing(Book(tmp_path, plan, exact=False)) as book:
        assert asyncio.run(store(book)).outcome is outcome
        assert book.digest(WHICH) != packed(WHICH, play).digest
        left = list((tmp_path / FOLDER).rglob(f"*-{packed(WHICH, play).digest[:32]}*"))
        assert not left


@pytest.mark.parametrize("harms", [True, False])
def test_a_group_that_cannot_be_read_when_it_is_judged_is_played_again_or_read_again(tmp_path, harms):
    plan = Plan(steps=2, groups_per_step=2, attempts=2, staleness=0, rounds=2)
    judged = []

    def judge(found):
        judged.append(found)
        if len(judged) > 1:
            return usable(found)
        if harms:
            number = int(found[0].task.id.removeprefix("task-"))  # as in served.task_of
            flip(file_of(served, EpisodeId(GroupId(0, 0, number), 0)))
        raise episodes.DamagedEpisodeError("as it was read")

    served = Served(tmp_path, plan, judge=judge)
    with served, engines(served.url, 2):
        trainer = Trainer(served.client(), plan)
        trainer.run()
        assert served.client().status()["episodes"]["found_damaged"] == harms
    assert trainer.versions == oracle(plan).versions and served.failure is None


def test_a_step_whose_weights_nobody_has_ends_with_what_to_do(tmp_path, monkeypatch):
    """When an engine has waited for them for a while; before that somebody may come who has them."""
    monkeypatch.setattr(source, "TELL_EVERY_S", 0.1)
    monkeypatch.setattr(source, "LONGEST_POLL_S", 0.1)
    with Served(tmp_path, PLAN) as served:
        client = served.both()
        client.publish(0, "w0", "lineage", tasks_of(PLAN, 0))
        client.beat(client.join("engine", FACTS).name, [], WEIGHTS)
        asked = []

        def lacks(step, tick):
            tick()
            asked.append(step)
            return "weights/00000000/1.bin has 100 bytes, and not 4096."

        with pytest.raises(ConfigError, match=r"step 0 waits .* nobody can play .* has 100 bytes.* Put the file back"):
            batches(tmp_path, client, [], lacks=lacks).batch(0)
        assert asked == [0, 0]


def test_weights_are_lacking_when_neither_the_folder_nor_an_engine_has_them_whole(tmp_path):
    made = weights.publish(tmp_path, manifest.shares({("w",): np.arange(9, dtype=np.float32)}), "run", 2)
    engine = {"phase": WEIGHTS, "numbers": {"versions": [2]}}  # of which it has come so far what is whole
    link = types.SimpleNamespace(
        weights=lambda version: Sources(version, made.digest, "run", ()),
        status=lambda: {"members": {"engine": {"1-1": engine}}},
    )
    assert lacking(link, tmp_path, 2) == ""
    assert "00000001" in lacking(link, tmp_path, 1)  # deleted
    ticks = []
    engine["numbers"]["versions"] = []
    assert lacking(link, tmp_path, 2, lambda: ticks.append(1)) == "" and ticks == [1]
    engine["numbers"]["versions"] = [2]
    (path,) = weights.path_of(tmp_path, 2).glob("*.bin")
    path.write_bytes(b"cut off")
    assert "has 7 bytes, and not 36" in lacking(link, tmp_path, 2)
    engine["phase"] = "playing"
    assert lacking(link, tmp_path, 2) == ""


def test_the_weights_of_a_step_are_looked_for_once_for_all_its_damaged_episodes(tmp_path):
    asked = []
    link = types.SimpleNamespace(damaged=lambda which, digest: Answer(Outcome.STORED))
    found = formed().batch(0)
    assert found is not None
    of_step = batches(tmp_path, link, [], lacks=lambda step, tick: asked.append(step) or "")
    assert of_step._played_again(0, found, dict.fromkeys(found.results, "damaged")) and asked == [0]


def test_what_cannot_be_had_again_names_file_and_episode_and_what_to_do(tmp_path):
    with Served(tmp_path, PLAN) as served, engines(served.url, 1) as workers:
        Trainer(served.client(), PLAN).run(to=1)
        path = file_of(served, EpisodeId(GroupId(0, 0, 1), 0))
        flip(path)
        told = f"step 0: episode 0 of group 1 .*{path}.*under its version: version 0 is gone. Put the"
        with pytest.raises(ConfigError, match=told):
            batches(tmp_path, served.trainer(), [], lacks=lambda step, tick: "version 0 is gone.").batch(0)
        workers[0].kill()


def test_a_replay_that_comes_out_otherwise_ends_the_trainer_with_both_digests(tmp_path):
    """And not in a loop of restarts: it is a ConfigError, which is exit code 2."""
    with Served(tmp_path, PLAN, exact=True) as served:
        with engines(served.url, 1) as workers:
            Trainer(served.client(), PLAN).run(to=1)
            workers[0].kill()
        path = file_of(served, WHICH)
        flip(path)
        with engines(served.url, 1, same=False) as workers:  # its plays differ
            with pytest.raises(
                ConfigError, match=r"needs a stored episode that is lost: episode \(0, 0, 1\)/1 was .* when it was"
            ):
                batches(tmp_path, served.trainer(), []).batch(0)
            workers[0].failure = None
            workers[0].kill()
        assert len(served.client().status()["conflicts"]) == 1

"""What the trainer of a fleet reads and publishes, with a coordinator that is a few lines."""

import concurrent.futures
import dataclasses
import json
import threading
import time
import types

import jax.numpy as jnp
import numpy as np
import pytest

from configs.search_r1 import get_config
from jaxagent import join
from jaxagent.config import ConfigError, ResumeConfig, parse
from jaxagent.config.errors import WAITED
from jaxagent.config.fleet import FleetConfig
from jaxagent.data import codec
from jaxagent.fleet import local, manifest, server, settings, vitals, weight_reader, weights
from jaxagent.fleet.admission import Answer, Batch, Outcome
from jaxagent.fleet.client import CallError, CoordinatorGoneError
from jaxagent.fleet.episodes import EpisodeFiles
from jaxagent.fleet.manifest import MismatchError
from jaxagent.fleet.plan import EpisodeId, GroupId, Plan
from jaxagent.fleet.record import StoredResult
from jaxagent.fleet.vitals import Vitals
from jaxagent.fleet.wire import TaskRef
from jaxagent.models.params import ArraySpec
from jaxagent.runs.fleet import sink, source, trainer, trees
from jaxagent.types import Episode, StopReason, Task, TokenKind, Trajectory
from tests import tiny_run


def config(**changes):
    cfg = parse(get_config().to_dict())
    rl = dataclasses.replace(cfg.rl, tasks_per_step=2, group_size=2, staleness=1)
    return dataclasses.replace(cfg, rl=rl, fleet=FleetConfig(**changes))


CFG = config()
STATUS = {
    "members": {"engine": {"1-1": {"phase": "playing", "playing": 2, "numbers": {"idle_s": 4.0}}}},
    "oldest_unfinished_group": [3, 0, 1],
    "episodes": {"playing": 2, "damaged": 0, "found_damaged": 0},
}


def episode(group: GroupId, sample: int, reward: float, stop=StopReason.ANSWER) -> Episode:
    played = Trajectory(
        tokens=np.array([5, 6], np.int32),
        kinds=np.array([TokenKind.PROMPT, TokenKind.ACTION], np.uint8),
        logprobs=np.array([0, -0.5], np.float32),
        policy_versions=np.array([-1, 2], np.int32),
        turns=np.array([0, 0], np.int32),
    )
    task = Task(f"task {group.round}-{group.number}", "?", ("a",), "k", {})
    return Episode(task, sample, (played,), reward, {"em": reward}, stop, 1)


class Coordinator:
    """Has a batch of two rounds, of which the first group is without signal."""

    def __init__(self, tmp_path, stop=StopReason.ANSWER, waits=0):
        self.waits, self.asked = waits, []
        chosen, left = (GroupId(3, 0, 1), GroupId(3, 1, 0)), (GroupId(3, 0, 0),)
        played = {
            EpisodeId(group, sample): episode(group, sample, float(group not in left and sample), stop)
            for group in (*chosen, *left)
            for sample in (1, 0)
        }
        self.packed = {which: codec.pack(found) for which, found in played.items()}
        self.files = EpisodeFiles(tmp_path / "ledger", {})
        results = {which: StoredResult(found.digest, 2, "1-1") for which, found in self.packed.items()}
        self.found = Batch(3, chosen, left, results, {1: 4})

    def store(self):
        for which, packed in self.packed.items():
            self.files.put((which.group, which.sample), packed)

    def batch(self, step, wait_s):
        self.asked.append(step)
        return self.found if len(self.asked) > self.waits else None

    def episode(self, which):
        return self.packed[which]

    def damaged(self, which, digest):
        """By default it is whole where the coordinator reads it."""
        return Answer(Outcome.LATE)

    def status(self):
        return STATUS


def batches(tmp_path, link, said, look=lambda step: None, folder="ledger"):
    signs = Vitals(tmp_path / "signs.json")
    return source.Batches(CFG.rl, CFG.fleet, link, tmp_path / folder, signs, said.append, look)


@pytest.mark.parametrize(
    "wrong",
    [
        lambda batch: {"step": 4},
        lambda batch: {"groups": (batch.groups[0],) * 2},
        lambda batch: {"groups": batch.groups[:1]},
        lambda batch: {"groups": (*batch.groups, GroupId(3, 1, 1))},
        lambda batch: {"groups": (batch.groups[0], GroupId(2, 1, 0))},
        lambda batch: {"left_out": batch.groups[:1]},
        lambda batch: {"results": dict(list(batch.results.items())[1:])},
        lambda batch: {"results": batch.results | {EpisodeId(GroupId(3, 0, 0), 2): StoredResult("d", 2, "1-1")}},
    ],
)
def test_a_batch_that_is_none_of_this_runs_is_not_trained(tmp_path, wrong):
    link = Coordinator(tmp_path)
    link.store()
    assert batches(tmp_path, link, []).batch(3)
    link.found = dataclasses.replace(link.found, **wrong(link.found))
    with pytest.raises(CallError, match=r"step 3: the coordinator has sent a batch of step \d with \d of 2 groups and"):
        batches(tmp_path, link, []).batch(3)


def test_groups_come_in_the_order_of_rounds_and_tasks(tmp_path):
    said, looked = [], []
    link = Coordinator(tmp_path, waits=2)
    link.store()
    found = batches(tmp_path, link, said, looked.append).batch(3)
    assert [group.task.id for group in found.chosen.groups] == ["task 0-1", "task 1-0"]
    assert [group.task.id for group in found.chosen.sampled] == ["task 0-0", "task 0-1", "task 1-0"]
    assert found.chosen.groups[0] is found.chosen.sampled[1]
    assert [e.sample for e in found.chosen.groups[0].episodes] == [0, 1]
    assert found.chosen.rounds == 2 and found.failures.attempts == 6
    assert found.metrics["reward/mean"] == pytest.approx(1 / 3)
    assert found.metrics["rollout/action_tokens"] == 6.0 and found.metrics["fleet/engines"] == 1.0
    assert looked == [3, 3] and not said
    sign = vitals.read(tmp_path / "signs.json")
    assert (sign.phase, sign.done, sign.budget_s) == ("trains step 3", 3, CFG.fleet.start_s)


class Together(threading.local):
    """Stands for `learner.peers` and the network of three processes, which are threads."""

    count_, rank, said, barrier = 3, 0, {}, threading.Barrier(3)

    def index(self):
        return self.rank

    def count(self):
        return self.count_

    def meet(self, what, own):
        self.said[what, self.rank] = json.loads(json.dumps(own))
        self.barrier.wait(10)
        return [self.said[what, other] for other in range(3)]

    def everyones(self, own, sizes):
        self.said["bytes", self.rank] = own
        self.barrier.wait(10)
        assert not own or [len(self.said["bytes", other]) for other in range(3)] == sizes
        found = [self.said["bytes", other] for other in range(3)]
        self.barrier.wait(10)
        return found


@pytest.mark.parametrize("damaged", [None, 2])
def test_each_process_of_a_trainer_reads_a_part_and_all_train_what_one_would(tmp_path, monkeypatch, damaged):
    """A damaged file, which one of them finds, is read by the coordinator for all."""
    link = Coordinator(tmp_path)
    link.store()
    expected = batches(tmp_path, link, []).batch(3)
    paths = sorted((tmp_path / "ledger").rglob("*.z"))
    if damaged is not None:
        paths[damaged].write_bytes(b"no episode")
    together = Together()
    monkeypatch.setattr(source, "peers", together)
    monkeypatch.setattr(source, "global_arrays", together)

    def one(rank):
        together.rank = rank
        return batches(tmp_path, link, []).batch(3)

    with concurrent.futures.ThreadPoolExecutor(3) as threads:
        found = list(threads.map(one, range(3)))
    rows = [[codec.pack(e).body for group in each.chosen.sampled for e in group.episodes] for each in found]
    assert rows == [[codec.pack(e).body for group in expected.chosen.sampled for e in group.episodes]] * 3
    assert all(each.metrics["reward/mean"] == expected.metrics["reward/mean"] for each in found)
    if damaged is None:
        assert [len(codec.of_columns(together.said["bytes", rank])) for rank in range(3)] == [2, 2, 2]


def test_episodes_come_over_http_where_the_folder_is_not_seen(tmp_path):
    link = Coordinator(tmp_path)
    here = batches(tmp_path, link, [], folder="elsewhere").batch(3)
    link.store()
    there = batches(tmp_path, link, []).batch(3)
    assert [codec.pack(e) for g in here.chosen.sampled for e in g.episodes] == [
        codec.pack(e) for g in there.chosen.sampled for e in g.episodes
    ]
    link.packed[EpisodeId(GroupId(3, 0, 0), 1)] = codec.pack(episode(GroupId(3, 0, 0), 1, 9.0))
    with pytest.raises(ConfigError, match=r"step 3: the coordinator reads what this process cannot: .* digest is"):
        batches(tmp_path, link, [], folder="elsewhere").batch(3)


def test_a_limit_in_seconds_is_told_once(tmp_path):
    said = []
    link = Coordinator(tmp_path, stop=StopReason.TIMEOUT)
    link.store()
    of = batches(tmp_path, link, said)
    assert of.batch(3).metrics["stop/timeout"] == 1.0 and of.batch(3)
    (line,) = said
    assert line.startswith("step 3: 6 episodes ended by a limit in seconds")


def test_an_episode_that_is_another_one_ends_the_run_and_is_named(tmp_path):
    """Its file is what its digest says: only the file's place says whose it must be."""
    link, place = Coordinator(tmp_path), EpisodeId(GroupId(3, 0, 1), 0)
    right = link.packed[place]

    def batch(packed, task_of=lambda group: None):
        link.packed[place] = packed
        link.found.results[place] = StoredResult(packed.digest, 2, "1-1")
        of = source.Batches(CFG.rl, CFG.fleet, link, tmp_path / "elsewhere", Vitals(), print, task_of=task_of)
        return of.batch(3)

    assert batch(right) and batch(right, lambda group: f"task {group.round}-{group.number}")
    in_the_run = dataclasses.replace(episode(place.group, 0, 0.0), sample=2 * (5 + 3))  # after five steps of "opd"
    assert batch(codec.pack(in_the_run))
    told = r"stored as episode 0 of group 1 .* step 3, of task .*, is attempt {} of the run, at task 'task 0-{}'"
    with pytest.raises(ConfigError, match=told.format(1, 1)):
        batch(codec.pack(episode(place.group, 1, 0.0)))
    link.packed[EpisodeId(place.group, 1)] = codec.pack(episode(GroupId(3, 0, 0), 1, 0.0))
    link.found.results[EpisodeId(place.group, 1)] = StoredResult(
        link.packed[EpisodeId(place.group, 1)].digest, 2, "1-1"
    )
    with pytest.raises(
        ConfigError, match=r"stored as episode 1 of group 1 .*, is attempt 1 of the run, at task 'task 0-0'"
    ):
        batch(right)
    with pytest.raises(ConfigError, match=told.format(0, 0)):  # both attempts of the group
        batch(codec.pack(episode(GroupId(3, 0, 0), 0, 0.0)), lambda group: f"task {group.round}-{group.number}")


# ---------------------------------------------------------------- publishing


class Publications:
    """Compares, as the coordinator does."""

    def __init__(self):
        self.digests: dict[int, str] = {}
        self.tasks, self.kept = {}, []

    def publish(self, version, digest, lineage, tasks):
        self.tasks[version] = tasks
        if self.digests.get(version) == digest:
            return Answer(Outcome.DUPLICATE)
        if self.digests.setdefault(version, digest) == digest:
            return Answer(Outcome.STORED)
        return Answer(Outcome.CONFLICT, f"version {version} was another")

    def weights(self, version):
        return self.digests.get(version)

    def keep(self, step):
        self.kept.append(step)
        return Answer(Outcome.REFUSED if step > max(self.digests, default=9) else Outcome.STORED)


def published(tmp_path, link, said, cfg=CFG, bundled=(100,), signs=None, stats=dict):
    driver = types.SimpleNamespace(update_params=lambda params, version: None, stats=stats)
    tasks, signs, gone = (lambda version: {version: []}), signs or Vitals(), (lambda version: None)
    at = tmp_path / "w", "run", tasks, signs, said.append, (lambda: None), gone, (lambda: bundled)
    return sink.VersionPublisher(cfg, driver, link, *at)


def state(value: float):
    return types.SimpleNamespace(policy={"w": np.full(4, value, np.float32)})


def test_versions_are_on_disk_before_they_are_told_and_deleted_when_nobody_asks(tmp_path):
    link, said = Publications(), []
    (tmp_path / "w").mkdir()
    of = published(tmp_path, link, said)
    tell = link.publish

    def publish(version, *rest):
        assert version in weights.versions(tmp_path / "w")
        return tell(version, *rest)

    link.publish = publish
    for version in range(6):
        of.publish(version, state(version))
    of.finish()
    assert weights.versions(tmp_path / "w") == [0, 3, 4, 5]  # S + 2 back; the first one stays for the probe
    assert link.tasks[4] == {4: []}
    link.publish = tell
    again = published(tmp_path, link, said)  # a trainer that trains steps again
    again.publish(4, state(4))
    assert not said
    with pytest.raises(ConfigError, match=r"Version 5 was published before, .* numerics='exact'"):
        again.publish(5, state(55))
    with pytest.raises(ConfigError, match="Version 1 was published before"):
        published(tmp_path, link, said).publish(1, state(11))  # its folder is gone; the coordinator remembers


def test_other_processes_do_not_wait_while_process_0_compiles_its_probe(tmp_path):
    """Their meetings have the time of a step, and the probe that of a start."""
    done = []
    (tmp_path / "w").mkdir()
    of = published(tmp_path, Publications(), [])
    of.probe = lambda: done.append("probe")
    of._meet = lambda what, said: done.append(what) or [said]
    of.publish(0, state(0))
    assert done == ["to write version 0", "version 0 is written", "probe"]


def test_a_new_version_goes_out_beside_the_next_step_and_the_one_after_waits_for_it(tmp_path, monkeypatch):
    link, go_on, told = Publications(), threading.Event(), []
    (tmp_path / "w").mkdir()
    of, tell = published(tmp_path, link, []), link.publish
    of.publish(0, state(0))
    assert link.digests, "the first one at once"

    def publish(version, *rest):
        assert go_on.wait(20)
        told.append(version)
        return tell(version, *rest)

    link.publish = publish
    of.publish(1, state(1))
    waits = threading.Thread(target=of.publish, args=(2, state(2)))
    waits.start()
    waits.join(0.3)
    assert waits.is_alive() and not told
    go_on.set()
    waits.join(20)
    of.finish()
    assert told == [1, 2] and link.tasks[2] == {2: []} and weights.versions(tmp_path / "w") == [0, 1, 2]
    full = OSError(28, "No space left on device")
    monkeypatch.setattr(weights, "_write", lambda *of: (_ for _ in ()).throw(full))
    of.publish(3, state(3))
    with pytest.raises(OSError, match="No space left"):  # whoever waits for a batch looks, and else the next version
        for _ in range(2000):
            of.check()
            time.sleep(0.01)
    assert 3 not in link.digests and weights.versions(tmp_path / "w") == [0, 1, 2]


def test_a_hang_after_a_publication_has_a_steps_budget_and_an_evaluation_its_own(tmp_path, monkeypatch):
    monkeypatch.setattr(sink, "LOOK_S", 0.02)
    monkeypatch.setattr(vitals, "LEAST_BETWEEN_S", 0.0)
    cfg = config(start_s=100.0, hang_s=25.0, patience_s=20.0)
    cfg = dataclasses.replace(cfg, env=dataclasses.replace(cfg.env, episode_timeout_s=50.0))
    (tmp_path / "w").mkdir()
    tokens, signs = [0.0], Vitals(tmp_path / "sign.json")
    of = published(tmp_path, Publications(), [], cfg, signs=signs, stats=lambda: {"sampled_tokens": tokens[0]})

    def sign():
        found = vitals.read(tmp_path / "sign.json")
        return found.phase, found.budget_s

    of.publish(0, state(0))
    assert sign() == ("goes on after version 0", 100.0)  # evaluates for the first time, and compiles
    of.publish(1, state(1))
    assert sign() == ("goes on after version 1", 25.0)
    with of.newest():
        assert sign() == ("evaluates version 1", 110.0)  # the longest episode, and its end
        time.sleep(0.3)  # one look to know where its engine stands
        stood = vitals.read(tmp_path / "sign.json").at
        time.sleep(0.3)
        assert stood == vitals.read(tmp_path / "sign.json").at, "nothing goes on"
        tokens[0] = 1.0
        time.sleep(0.3)
        assert vitals.read(tmp_path / "sign.json").at > stood
    assert sign() == ("goes on after version 1", 25.0)
    of.publish(cfg.rl.steps, state(2))
    assert sign()[1] == 100.0  # the export


@pytest.mark.parametrize(("compute", "before", "dtype"), [
    ("float32", None, "float32"), ("bfloat16", None, "bfloat16"), ("bfloat16", "bfloat16", "bfloat16"),
    ("bfloat16", "float32", "float32"),  # a run of an earlier version of this code goes on as it began
])  # fmt: skip
def test_versions_have_the_dtype_of_engines_with_the_bits_that_an_engine_would_make(tmp_path, compute, before, dtype):
    model = dataclasses.replace(CFG.model, compute_dtype=compute)
    cfg, folder, link = dataclasses.replace(CFG, model=model), tmp_path / "w", Publications()
    first = np.random.default_rng(0).standard_normal(1000, np.float32)
    if before:
        link.digests[0] = weights.publish(
            folder, manifest.shares({("w",): np.asarray(jnp.asarray(first).astype(before))}), "run", 0
        ).digest
    folder.mkdir(exist_ok=True)
    of = published(tmp_path, link, [], cfg)
    of.publish(0, types.SimpleNamespace(policy={"w": jnp.asarray(first)}))
    like = trees.of_floats({"w": ArraySpec((1000,), "float32", ("embed",), 0.0, 0.0, "", ((0,),), (1000,))})
    with weight_reader.hold(folder, 0, "run", like=like) as held:
        found = held.read()["w",]
    assert found.dtype == dtype
    engines = [np.asarray(jnp.asarray(each).astype(compute)).tobytes() for each in (first, found)]
    assert engines[0] == engines[1]
    with pytest.raises(MismatchError, match=rf"the model has {dtype}\[7\]"):
        weight_reader.hold(
            folder, 0, "run", like={path: dataclasses.replace(one, shape=(7,)) for path, one in like.items()}
        )


@pytest.mark.parametrize(
    ("staleness", "bundled", "kept"),
    [
        (1, {2}, {1}),
        (1, {0}, set()),
        (1, set(), set()),
        (2, {3}, {1, 2}),
        (2, {1}, set()),
        (1, {2, 4}, {1, 3}),  # the newest may turn out damaged
        (2, {0, 2, 4}, {1, 2, 3}),
    ],
)
def test_versions_whose_tokens_a_killed_trainer_scores_again_stay(tmp_path, staleness, bundled, kept):
    """It goes on from a bundle; without them its metrics would say less than those of a run without kills."""
    (tmp_path / "w").mkdir()
    cfg = dataclasses.replace(CFG, rl=dataclasses.replace(CFG.rl, staleness=staleness))
    of = published(tmp_path, Publications(), [], cfg, bundled)
    for version in range(8):
        of.publish(version, state(version))
    of.finish()
    assert set(weights.versions(tmp_path / "w")) == {0, *range(6 - staleness, 8)} | kept


def test_steps_that_the_ledger_does_not_know_are_told_in_one_line(tmp_path):
    """A run of one process that is continued with a fleet, or a ledger that somebody removed."""
    link = Publications()
    link.publish = lambda *of: Answer(Outcome.REFUSED, "version 3 comes after -1 without its batch.")
    (tmp_path / "w").mkdir()
    with pytest.raises(ConfigError, match=r"has done 3 steps that .* without config.fleet"):
        published(tmp_path, link, []).publish(3, state(3))


@pytest.mark.parametrize("numerics", ["exact", "fast"])
def test_versions_of_another_run_are_told_as_such_and_stay(tmp_path, numerics):
    """Somebody removed the ledger: a new one has another run's id, and the weights are equal."""
    folder = tmp_path / "w"
    folder.mkdir()
    weights.publish(folder, manifest.shares({("w",): np.full(4, 3, np.float32)}), "run before", 3)
    of = published(tmp_path, Publications(), [], dataclasses.replace(CFG, numerics=numerics))
    with pytest.raises(ConfigError, match=r"another run than the ledger .* 'run before'.* The ledger was removed"):
        of.publish(3, state(3))
    assert weights.versions(folder) == [3]


def test_with_fast_numerics_what_was_published_stays(tmp_path):
    link, said = Publications(), []
    (tmp_path / "w").mkdir()
    fast = dataclasses.replace(CFG, numerics="fast")
    published(tmp_path, link, said, fast).publish(0, state(0))
    before = dict(link.digests)
    of = published(tmp_path, link, said, fast)
    of.publish(0, state(1))
    assert link.digests == before and len(said) == 1 and "version 0 came out differently" in said[0]
    weights.publish(tmp_path / "w", manifest.shares({("w",): np.full(4, 7, np.float32)}), "run", 1)  # never told
    of.publish(1, state(1))
    assert 1 in link.digests and len(said) == 1
    accepting = dataclasses.replace(CFG, resume=ResumeConfig(numerics="accept"))  # on another machine: likewise
    published(tmp_path, link, said, accepting).publish(0, state(2))
    assert link.digests[0] == before[0] and len(said) == 2


def test_what_no_bundle_needs_is_forgotten_once():
    link = Publications()
    of = sink.FleetRetention(link)
    for step in (0, 2, 2, 4):
        of.commit(step)
    assert link.kept == [2, 4]
    link.digests = {4: ""}
    for step in (5, 5):  # its version is still on its way
        of.commit(step)
    link.digests[5] = ""
    for step in (5, 5):
        of.commit(step)
    assert link.kept == [2, 4, 5, 5, 5]


def test_a_version_brings_the_tasks_of_the_steps_that_it_admits():
    experience = types.SimpleNamespace(
        assign=lambda step: [[step, step + 1]], tasks=lambda places: [Task(f"t{i}", "?", ()) for i in places]
    )
    known = {}
    tasks = trainer.tasks_of(experience, Plan(steps=5, groups_per_step=2, attempts=2, staleness=2), known)
    assert sorted(tasks(0)) == [0, 1, 2] and sorted(tasks(1)) == [3]
    assert tasks(2) == {4: ((TaskRef(4, "t4"), TaskRef(5, "t5")),)} and tasks(3) == {}
    assert sorted(known) == [1, 2, 3, 4], "as long as a batch may still have groups of a step"
    # A process that goes on says all that may be unknown: rl.steps may have been raised since.
    longer = trainer.tasks_of(experience, Plan(steps=9, groups_per_step=2, attempts=2, staleness=2), {})
    assert sorted(longer(5)) == [5, 6, 7]


def test_a_trainer_that_would_go_on_from_what_is_forgotten_says_so_before_anything_else(tmp_path):
    """Its newest bundle was damaged and removed, and the older one is a pinned one."""
    cfg = dataclasses.replace(CFG, workdir=str(tmp_path))
    link = types.SimpleNamespace(status=lambda: {"steps": {"kept_from": 4}})  # whatever else it asked would fail
    saved = types.SimpleNamespace(step_of=lambda stage: 0)
    with pytest.raises(ConfigError, match=r"go on from step 0, .* before 4 .* from a copy, .* are as they were"):
        trainer.Trainer(cfg, link, "token", "trainer", "here", Vitals()).connect(None, saved, None, None, 0)
    assert not list(tmp_path.iterdir())
    trainer.check_known("run", 4, 4)


# ---------------------------------------------------------------- settings


def test_processes_may_differ_in_what_is_their_own():
    digest = settings.digest_of(CFG)
    own = dataclasses.replace(CFG, workdir="/elsewhere", fleet=dataclasses.replace(CFG.fleet, engines=7, lease_s=3.0))
    assert settings.digest_of(own) == digest
    assert settings.digest_of(dataclasses.replace(CFG, seed=5)) != digest
    assert settings.digest_of(config(rule="in_flight")) != digest


def test_what_the_command_says_of_its_settings():
    few = settings.notes(config(engines=1))
    assert [line.partition(" ")[0] for line in few] == ["fleet.engines", "rl.staleness"]
    assert not list(settings.notes(dataclasses.replace(CFG, rl=dataclasses.replace(CFG.rl, staleness=0))))


def test_processes_of_one_machine_have_gpus_of_their_own_where_there_are_enough(monkeypatch):
    monkeypatch.delenv("XLA_PYTHON_CLIENT_MEM_FRACTION", raising=False)
    cfg = config(engines=2)
    assert local.devices_of(cfg, []) == {}
    assert local.devices_of(cfg, ["4", "5", "6", "7"]) == {
        "trainer": {"CUDA_VISIBLE_DEVICES": "4"},
        "engine-0": {"CUDA_VISIBLE_DEVICES": "5"},
        "engine-1": {"CUDA_VISIBLE_DEVICES": "6"},
    }
    shared = {"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.300"}
    assert local.devices_of(cfg, ["0"]) == dict.fromkeys(("trainer", "engine-0", "engine-1"), shared)
    assert len(list(local.sharing(cfg, ["0"]))) == 1 and not list(local.sharing(cfg, ["0", "1", "2"]))
    wide = dataclasses.replace(
        config(engines=1, trainers=2), mesh=dataclasses.replace(cfg.mesh, data=2, fsdp=2, tensor=1)
    )
    assert [own["CUDA_VISIBLE_DEVICES"] for own in local.devices_of(wide, list("01234567")).values()] == [
        "0,1", "2,3", "4,5,6,7",
    ]  # fmt: skip
    long = dataclasses.replace(wide, mesh=dataclasses.replace(cfg.mesh, data=1, fsdp=1, tensor=2, context=2))
    assert local.devices_of(long, list("01234567")) == local.devices_of(wide, list("01234567"))


def test_the_commands_small_files_may_be_lost(tmp_path, monkeypatch):
    monkeypatch.delenv(settings.TOKEN_VARIABLE, raising=False)
    here = local._LocalPrograms(CFG, ["main"], tmp_path, "jaxagent.join")
    assert here.url() == ""
    (tmp_path / local.ADDRESS_FILE).write_text('{"url": "http://127.0.0.1:5000"}')
    assert here.url() == "http://127.0.0.1:5000"
    for lost in ("", "[]", "{}"):
        (tmp_path / local.ADDRESS_FILE).write_text(lost)
        assert here.url() == "http://127.0.0.1:5000"
    (tmp_path / local.ADDRESS_FILE).unlink()
    assert "--listen=127.0.0.1:5000" in here.coordinator(1)[0].command  # the next one listens where others ask
    (tmp_path / settings.TOKEN_FILE).write_text("")
    with pytest.raises(ConfigError, match="token' is empty: remove it"):
        local.token_of(tmp_path)


@pytest.mark.parametrize("role", ["trainer", "engine"])
def test_a_coordinator_that_stays_away_is_one_line(tmp_path, monkeypatch, capsys, role):
    def away(*of):
        raise CoordinatorGoneError("http://127.0.0.1:9 has failed for 600 s: Connection refused.")

    monkeypatch.setattr(join, {"trainer": "_train", "engine": "_play"}[role], away)
    monkeypatch.setenv(settings.TOKEN_VARIABLE, "a secret of the tests")
    own = [f"--role={role}", "--coordinator=http://127.0.0.1:9", "--config.fleet=on"]
    assert join.main(["join", *own, *tiny_run.argv(tmp_path)[1:]]) == WAITED  # which launchers start again
    said = capsys.readouterr().err.splitlines()
    away_for = "error: http://127.0.0.1:9 has failed for 600 s: Connection refused."
    assert said == [f"{away_for} The same command goes on."]


def test_a_ledger_that_cannot_be_opened_for_a_moment_is_a_failure_for_now(tmp_path, monkeypatch, capsys):
    """A file system that is not there, as NFS does it: three crashes in a row within seconds were the run's end."""
    monkeypatch.setenv(settings.TOKEN_VARIABLE, "a secret of the tests")
    (tmp_path / settings.FOLDER).mkdir()
    (tmp_path / settings.FOLDER / server.LEDGER).symlink_to(server.LEDGER)
    words = ["join", "--role=coordinator", "--config.fleet=on", *tiny_run.argv(tmp_path)[1:]]
    assert join.main(words) == WAITED
    assert "cannot be opened" in capsys.readouterr().err

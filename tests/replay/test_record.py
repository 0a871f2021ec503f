"""The record of steps: what is written is read back, what was changed is seen, and what goes on goes on."""

import dataclasses
import json

import numpy as np
import pytest

from jaxagent.config import ConfigError
from jaxagent.data import codec
from jaxagent.runs import record
from jaxagent.runs.record import Recorder
from jaxagent.types import Episode, Group, StopReason, Task, Trajectory


def trajectory(seed: int) -> Trajectory:
    rng = np.random.default_rng(seed)
    kinds = np.array([0, 0, 1, 1, 2, 1], np.uint8)
    sampled = kinds == 1
    return Trajectory(
        tokens=rng.integers(0, 100, 6).astype(np.int32),
        kinds=kinds,
        logprobs=np.where(sampled, -rng.exponential(size=6), 0).astype(np.float32),
        policy_versions=np.where(sampled, 3, -1).astype(np.int32),
        turns=np.array([0, 0, 0, 0, 1, 1], np.int32),
    )


def episode(task: Task, sample: int) -> Episode:
    return Episode(task, sample, (trajectory(sample),), 1.0, {"em": 1.0}, StopReason.ANSWER, 2, {"env_s": 0.5})


def rounds(step: int):
    """Two rounds, of two groups and of one."""
    tasks, attempts = [Task(f"t{g}", "p", ("a",)) for g in range(3)], (step * 4, step * 4 + 1)
    groups = [Group(task, tuple(episode(task, sample) for sample in attempts)) for task in tasks]
    return [groups[:2], groups[2:]]


@pytest.fixture
def written(tmp_path, monkeypatch):
    """A record of three steps, whose weights are texts."""
    monkeypatch.setattr(record.digests, "digest", str)
    return write(tmp_path / "rl", range(3))


def write(folder, steps, keep="all", commit=0, config="c"):
    recorder = Recorder(folder, steps[0], keep, config)
    recorder.published(steps[0], f"w{steps[0]}")
    for step in steps:
        recorder.add_groups(rounds(step))
        recorder.published(step + 1, f"w{step + 1}")
        recorder.commit(min(commit, step))
    recorder.close()
    return folder


def as_rows(rounds_):
    return [[[codec.encode_episode(e) for e in group.episodes] for group in round_] for round_ in rounds_]


def test_a_step_is_read_back(written):
    step = record.read(written, 1)
    assert (step.number, step.before, step.after, step.config, step.damage) == (1, "w1", "w2", "c", ())
    assert as_rows(step.rounds) == as_rows(rounds(1))
    headers = record.headers(written)
    assert list(headers) == [0, 1, 2] and headers[0]["previous"] == "" and headers[2]["previous"] == step.seal


def test_what_goes_on_gives_the_same_seals(written, tmp_path):
    seals = [header["seal"] for header in record.headers(written).values()]
    assert len(set(seals)) == 3
    write(written, range(1, 3))  # as a run that was resumed at step 1
    assert [header["seal"] for header in record.headers(written).values()] == seals
    write(written, range(1, 2))
    assert record.steps(written) == [0, 1]  # what was after it is of another history
    other = [h["seal"] for h in record.headers(write(tmp_path / "other", range(3), config="d")).values()]
    assert not set(other) & set(seals)


def test_times_and_texts_are_not_sealed(written, tmp_path, monkeypatch):
    seal = record.headers(written)[2]["seal"]
    plain = rounds
    monkeypatch.setitem(globals(), "rounds", lambda step: [
        [Group(g.task, tuple(dataclasses.replace(e, metrics={"env_s": 9.0}, text="x") for e in g.episodes)) for g in r]
        for r in plain(step)
    ])  # fmt: skip
    assert record.headers(write(tmp_path / "slow", range(3)))[2]["seal"] == seal


def test_no_record_and_only_what_bundles_reach(tmp_path, monkeypatch):
    monkeypatch.setattr(record.digests, "digest", lambda params: pytest.fail("computed for nothing"))
    assert not write(tmp_path / "none", range(2), keep="none").exists()
    monkeypatch.setattr(record.digests, "digest", str)
    assert record.steps(write(tmp_path / "newest", range(4), keep="newest", commit=2)) == [2, 3]
    assert record.steps(write(tmp_path / "all", range(4), commit=2)) == [0, 1, 2, 3]


def changed_file(path, number, **changes):
    """A step's file in which the body of one episode is another's, and the header as it was."""
    head, _, bodies = path.read_bytes().partition(b"\n")
    header = json.loads(head)
    sizes = [size for round_ in header["rounds"] for group in round_ for _, size in group]
    parts, at = [], 0
    for size in sizes:
        parts.append(bodies[at : at + size])
        at += size
    original = codec.unpack(codec.Packed(codec.digest_of(parts[number], ""), parts[number]), "")
    parts[number] = codec.pack(dataclasses.replace(original, **changes)).body
    flat = iter(parts)
    header["rounds"] = [[[(d, len(next(flat))) for d, _ in g] for g in r] for r in header["rounds"]]
    path.write_bytes(json.dumps(header).encode() + b"\n" + b"".join(parts))


def test_a_changed_episode_is_named_and_read(written):
    path = record.path_of(written, 1)
    changed_file(path, 3, reward=0.0)
    step = record.read(written, 1)
    assert step.damage == (f"{path}, round 0, group 1, attempt 1: the episode does not fit its digest",)
    assert step.rounds[0][1].episodes[1].reward == 0.0


@pytest.mark.parametrize(("field", "value"), [("after", "w9"), ("config", "d"), ("previous", ""), ("tasks", [])])
def test_a_changed_header_does_not_fit_its_seal(written, field, value):
    path = record.path_of(written, 1)
    head, _, bodies = path.read_bytes().partition(b"\n")
    path.write_bytes(json.dumps(json.loads(head) | {field: value}).encode() + b"\n" + bodies)
    assert record.read(written, 1).damage == (f"{path}: its seal does not fit what it says",)


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (None, "is not there: the step was not recorded"),
        (b"", "is damaged"),
        (b"[]\n", "is damaged"),
        (b'{"record": 9}\n', "format 9, and 1 is read"),
        (b'{"record": 1, "step": 1}\n', "it lacks after, before"),
    ],
)
def test_what_cannot_be_read_is_one_line(written, content, why):
    path = record.path_of(written, 1)
    path.unlink() if content is None else path.write_bytes(content)
    with pytest.raises(ConfigError, match=why) as told:
        record.read(written, 1)
    assert str(path) in str(told.value)


def test_a_full_disk_is_told_by_the_next_step(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(record.digests, "digest", str)
    monkeypatch.setattr(record.files, "replace", full)
    with pytest.raises(OSError, match="No space"):
        write(tmp_path / "rl", range(2))


def test_what_cannot_be_written_says_what_to_do(tmp_path, monkeypatch):
    monkeypatch.setattr(record.digests, "digest", str)
    odd = Task("t", "p", (), metadata={"x": float("nan")})
    monkeypatch.setitem(globals(), "rounds", lambda step: [[Group(odd, (episode(odd, 0),))]])
    with pytest.raises(ConfigError, match=r"cannot be recorded .*checkpoint\.replay=none"):
        write(tmp_path / "rl", range(1))


def test_a_process_that_does_not_write_takes_part_in_the_digests_alone(tmp_path, monkeypatch):
    """Of a trainer of several processes; else each would delete what the first one has written."""
    asked = []
    monkeypatch.setattr(record.digests, "digest", lambda params: asked.append(params) or str(params))
    folder = write(tmp_path / "rl", range(3))
    before = {path: path.read_bytes() for path in folder.iterdir()}
    of_first = list(asked)
    asked.clear()
    other = Recorder(folder, 0, "newest", "c", writes=False)
    other.published(0, "w0")
    for step in range(3):
        other.add_groups(rounds(step))
        other.published(step + 1, f"w{step + 1}")
        other.commit(step)
    other.close()
    assert asked == of_first and {path: path.read_bytes() for path in folder.iterdir()} == before

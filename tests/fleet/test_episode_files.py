"""Episodes as files: packed without loss, stored once, compared by what another play must give again."""

import dataclasses
import errno
import hashlib
import json
import zlib

import numpy as np
import pytest

from jaxagent.config import ConfigError
from jaxagent.data import codec
from jaxagent.data.codec import Packed
from jaxagent.fleet import episodes
from jaxagent.fleet.episodes import DamagedEpisodeError, EpisodeFiles
from jaxagent.fleet.ledger import Ledger
from jaxagent.types import Episode, StopReason, Task, TokenKind, Trajectory, UntrainedConversation

KEY = ((12, 0, 3), 1)


def trajectory(logprob=-0.1):
    return Trajectory(
        tokens=np.array([5, 6, 7], np.int32),
        kinds=np.array([TokenKind.PROMPT, TokenKind.ACTION, TokenKind.OBSERVATION], np.uint8),
        logprobs=np.array([0, logprob, 0], np.float32),
        policy_versions=np.array([-1, 4, -1], np.int32),
        turns=np.array([0, 0, 0], np.int32),
    )


EPISODE = Episode(
    task=Task("t1", "What?\n", ("a", "b"), "k", {"x": [1, None]}),
    sample=1,
    trajectories=(trajectory(),),
    reward=0.1 + 0.2,
    rewards={"em": 1.0},
    stop_reason=StopReason.ANSWER,
    turns=1,
    metrics={"total_s": 1.25, "cached_tokens": 3.0},
    text="What?\nlone: \ud800",
    turn_rewards=(0.5,),
    heard=(UntrainedConversation("customer", (("hi", "ho"),), trajectory()),),
    fork_of=3,
    forked_at=1,
)


def same(one, other):
    """Equal in every field: bits of log-probs too, since a float32's shortest text is its own."""
    return codec.encode_episode(one) == codec.encode_episode(other)


def test_an_episode_comes_back_with_every_field():
    packed = codec.pack(EPISODE)
    assert same(codec.unpack(packed, "here"), EPISODE)
    assert not same(codec.unpack(packed, "here"), dataclasses.replace(EPISODE, trajectories=(trajectory(-0.2),)))


def test_whose_a_result_is_does_not_hang_on_how_its_json_is_written():
    packed = codec.pack(EPISODE)
    assert codec.task_and_sample(packed, "here") == (EPISODE.task.id, EPISODE.sample)
    first, second = zlib.decompress(packed.body).split(b"\n")
    row = json.loads(first)
    for written in (json.dumps(row).encode(), json.dumps(dict(reversed(row.items()))).encode()):
        other = Packed(hashlib.sha256(written).hexdigest(), zlib.compress(written + b"\n" + second))
        assert codec.task_and_sample(other, "here") == (EPISODE.task.id, EPISODE.sample)


@pytest.mark.parametrize("field", [field.name for field in dataclasses.fields(Episode)])
def test_the_digest_is_that_of_what_is_learnt_from(field):
    """Times, counters and texts for people may differ between two plays of one episode; nothing else may."""
    others = {
        "task": Task("t2", "What?\n", ("a", "b"), "k", {"x": [1, None]}),
        "sample": 2,
        "trajectories": (trajectory(np.nextafter(np.float32(-0.1), np.float32(0))),),  # one bit of a log-prob
        "reward": 0.3,
        "rewards": {"em": 0.0},
        "stop_reason": StopReason.TURN_LIMIT,
        "turns": 2,
        "turn_rewards": (0.25,),
        "metrics": {"total_s": 2.0},
        "text": "else",
        "error": "e",
        "heard": (),
        "fork_of": 0,
        "forked_at": 2,
    }
    other = codec.pack(dataclasses.replace(EPISODE, **{field: others[field]}))
    assert (other.digest == codec.pack(EPISODE).digest) == (field in ("metrics", "text", "error", "heard"))


def test_a_damaged_body_is_refused_wherever_it_is_damaged():
    good = codec.pack(EPISODE)
    unharmed = 0
    for at in range(len(good.body)):
        for bit in range(8):
            body = good.body[:at] + bytes([good.body[at] ^ 1 << bit]) + good.body[at + 1 :]
            try:
                unharmed += same(codec.unpack(Packed(good.digest, body), "here"), EPISODE)
            except ConfigError as failure:
                assert str(failure).startswith("here: ")
    assert unharmed < 16  # bits of zlib's that mean nothing
    for body in (b"", good.body[:-1], good.body + b"x", b"no"):
        with pytest.raises(ConfigError, match="here: damaged"):
            codec.check(Packed(good.digest, body), "here")
    with pytest.raises(ConfigError, match="digest is"):
        codec.check(Packed("0" * 64, good.body), "here")


def test_what_unpacks_to_too_much_is_refused(monkeypatch):
    monkeypatch.setattr(codec, "MOST_BYTES", 1_000)
    with pytest.raises(ConfigError, match="too long"):
        codec.check(Packed("0" * 64, zlib.compress(bytes(100_000))), "here")


def test_a_number_that_is_not_finite_is_refused():
    with pytest.raises(ValueError):
        codec.pack(dataclasses.replace(EPISODE, reward=float("nan")))


def test_a_stored_episode_is_read_by_its_digest_and_may_be_written_again(tmp_path):
    store, packed = EpisodeFiles(tmp_path, {}), codec.pack(EPISODE)
    store.put(KEY, packed)
    store.put(KEY, codec.pack(dataclasses.replace(EPISODE, metrics={"total_s": 9.0})))
    other = codec.pack(dataclasses.replace(EPISODE, reward=0.0))
    with pytest.raises(DamagedEpisodeError, match="is not there"):
        episodes.read(tmp_path, KEY, other.digest)
    assert len(list(tmp_path.rglob("*.z"))) == 1
    assert episodes.read(tmp_path, KEY, packed.digest).metrics == {"total_s": 9.0}


def test_what_the_ledger_does_not_know_is_removed_and_what_it_knows_must_be_there(tmp_path):
    packed = codec.pack(EPISODE)
    store = EpisodeFiles(tmp_path, {})
    for key in (KEY, (KEY[0], 2), ((13, 0, 0), 0)):
        store.put(key, packed)
    (tmp_path / "episodes/00000012/.x.json.z.1.2").write_bytes(b"of a process that was killed")
    again = EpisodeFiles(tmp_path, {KEY: packed.digest})
    assert len(again.removed) == 3 and len([path for path in tmp_path.rglob("*") if path.is_file()]) == 1
    assert not (tmp_path / "episodes/00000013").exists()
    again.forget([(KEY, packed.digest), (((99, 0, 0), 0), packed.digest)])
    with pytest.raises(DamagedEpisodeError, match=r"12/0-3-1-\w+\.json\.z is not there"):
        episodes.read(tmp_path, KEY, packed.digest)
    again = EpisodeFiles(tmp_path, {KEY: packed.digest})
    assert again.missing == [KEY]


def test_forgetting_what_is_trained_can_be_interrupted(tmp_path):
    """First the ledger forgets, then the files go: what a death leaves in between is removed at the next opening."""
    packed = codec.pack(EPISODE)

    def line(step):
        return {"kind": "stored", "group": [step, 0, 0], "sample": 0, "digest": packed.digest}

    with Ledger(tmp_path) as log:
        store = EpisodeFiles(tmp_path, {})
        for step in range(4):
            store.put(((step, 0, 0), 0), packed)
            log.append([line(step)]).result(20)
        assert log.compact(lambda record: record["group"][0] >= 2).result(20) == 2
        store.forget([(((0, 0, 0), 0), packed.digest)])
    with Ledger(tmp_path) as log:
        records = log.recovered()
        assert records == [line(2), line(3)]
        known = {(tuple(record["group"]), record["sample"]): record["digest"] for record in records}
        store = EpisodeFiles(tmp_path, known)
    assert [path.parent.name for path in store.removed] == ["00000001"]
    assert sorted(path.name for path in (tmp_path / "episodes").iterdir()) == ["00000002", "00000003"]


def test_an_episode_is_acknowledged_when_the_names_on_its_path_are_on_disk(tmp_path, monkeypatch):
    store, synced = EpisodeFiles(tmp_path, {}), []
    sync = episodes.files.sync_folder
    monkeypatch.setattr(episodes.files, "sync_folder", lambda folder: (sync(folder), synced.append(folder.name)))
    store.put(KEY, codec.pack(EPISODE))
    store.put((KEY[0], 2), codec.pack(EPISODE))
    assert synced == ["episodes", "00000012", "00000012"]


def test_a_damaged_file_is_named(tmp_path):
    store, packed = EpisodeFiles(tmp_path, {}), codec.pack(EPISODE)
    store.put(KEY, packed)
    (path,) = tmp_path.rglob("*.z")
    path.write_bytes(packed.body[:-2])
    with pytest.raises(ConfigError, match=f"^{path}: damaged"):
        episodes.read(tmp_path, KEY, packed.digest)


def test_a_real_full_disk(small_disk):
    store, stored = EpisodeFiles(small_disk, {}), {}
    big = dataclasses.replace(EPISODE, text=np.random.default_rng(0).bytes(60_000).hex())
    with pytest.raises(OSError) as raised:
        for sample in range(100):
            packed = codec.pack(dataclasses.replace(big, sample=sample))
            store.put((KEY[0], sample), packed)
            stored[(KEY[0], sample)] = packed.digest
    assert raised.value.errno == errno.ENOSPC and 3 < len(stored) < 40
    again = EpisodeFiles(small_disk, stored)
    read = [episodes.read(small_disk, key, digest).sample for key, digest in stored.items()]
    assert read == list(range(len(stored))) and not again.removed

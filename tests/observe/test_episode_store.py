"""Every episode is kept: nothing is lost, a torn tail goes, a bound gives up blocks and no row, reading is quick."""

import dataclasses
import json
import time

import numpy as np
import pytest

from jaxagent.config import ConfigError, EpisodesConfig
from jaxagent.data import codec
from jaxagent.observe import episode_store
from jaxagent.observe.episode_store import EpisodeStore, Learnt, StoredEpisodes
from jaxagent.types import Episode, StopReason, Task, Trajectory, UntrainedConversation


def episode(task: str = "t", sample: int = 0, reward: float = 1.0, tokens: int = 40, text: str = "") -> Episode:
    rng = np.random.default_rng([sample, tokens])
    kinds = np.where(np.arange(tokens) % 4 < 2, 1, np.arange(tokens) % 4).astype(np.uint8)
    kinds[: tokens // 4] = 0
    actions = kinds == 1
    trajectory = Trajectory(
        rng.integers(0, 300, tokens).astype(np.int32),
        kinds,
        np.where(actions, rng.normal(-1, 1, tokens), 0).astype(np.float32),
        np.where(actions, 7, -1).astype(np.int32),
        (np.arange(tokens) // 16).astype(np.int32),
    )
    about = Task(task, f"Who is {task}?", ("me", "Ö"), "one_hop/x", {"n": [1, {"a": None}]})
    heard = (UntrainedConversation("guide", (("shown", "said \x1b[31m"),), None, 1),)
    text = text or f"text of {task} {sample}"
    return Episode(
        about, sample, (trajectory, trajectory), reward, {"em": reward}, StopReason.ANSWER, 2, {"total_s": 0.25}, text,
        "", (0.0, 0.5), heard,
    )  # fmt: skip


def failed(task: str, sample: int = 0) -> Episode:
    return dataclasses.replace(episode(task, sample), stop_reason=StopReason.TIMEOUT, error="it died \ud800")


def store(folder, position=0, keep=None, learns=False, name="rl") -> EpisodeStore:
    return EpisodeStore(folder, name, position, keep or EpisodesConfig(), learns)


def fill(folder, steps, size=8, **more) -> EpisodeStore:
    log = store(folder, **more)
    for step in steps:
        log.append(step, [episode(f"{step}/{i // 4}", i % 4) for i in range(size)], {})
    log.wait()
    return log


def test_what_is_read_is_what_was_played_and_learnt(tmp_path):
    odd = dataclasses.replace(episode("b", 0, 0.0), text="\udcff <b> \x00", trajectories=())
    played = [episode("a", 0), odd, episode("a", 1, 0.3), failed("c")]
    trained, length = played[0].trajectories[0], 40
    said = np.where(trained.action_mask, trained.logprobs + 0.125, np.nan).astype(np.float32)
    learnt = Learnt(np.where(trained.action_mask, 0.5, 0.0).astype(np.float32), said, trained.action_mask)
    log = store(tmp_path)
    log.append(3, played, {id(trained): learnt})
    log.wait()
    stored = StoredEpisodes(tmp_path, "rl")
    (block,) = stored.blocks
    read = stored.with_learnt(block)
    for (got, _), want in zip(read, played, strict=True):
        assert codec.encode_episode(got) == codec.encode_episode(want)
    assert [[each is not None for each in own] for _, own in read] == [[True, True], [], [False] * 2, [False] * 2]
    for name in ("advantages", "logprobs", "mask"):
        np.testing.assert_array_equal(getattr(read[0][1][0], name), getattr(learnt, name))
        assert len(getattr(read[0][1][1], name)) == length
    assert block["step"] == 3 and block["reward"] == [1.5, 0.5, 0.8, None] and block["error"][3] == "it died \ud800"
    assert block["advantage"] == [0.5, None, None, None] and block["tasks"] == ["a", "b", "c"]
    assert block["task"] == [0, 1, 0, 2] and block["tokens"] == [80, 0, 80, 80]
    assert [text for text, *_ in stored.texts(block)] == [e.text for e in played]
    assert stored.texts(block)[0][1] == "Who is a?" and "said \x1b[31m" in stored.texts(block)[0][2]
    log.close()


@pytest.mark.parametrize("cut", [1, 30])
def test_a_killed_process_leaves_whole_blocks(tmp_path, cut):
    fill(tmp_path, range(3)).close()
    whole = [codec.encode_episode(e) for e in episode_store.read(tmp_path / "rl.index")[0]]
    index, blocks = tmp_path / "rl.index", tmp_path / "rl.00000.blocks"
    content, size = index.read_bytes(), blocks.stat().st_size
    index.write_bytes(content[:-cut])
    with blocks.open("ab") as file:
        file.write(b"half a block")
    read, torn = episode_store.read(index)
    assert torn == 1 and [codec.encode_episode(e) for e in read] == whole[:16]
    log = fill(tmp_path, [2], position=2)  # goes on
    log.close()
    assert index.read_bytes() == content and blocks.stat().st_size == size
    with pytest.raises(ConfigError, match="has 3 records, the checkpoint was taken after 4"):
        store(tmp_path, position=4)


def test_a_reader_follows_a_writer_that_goes_back(tmp_path):
    fill(tmp_path, range(4)).close()
    reader = StoredEpisodes(tmp_path, "rl")
    assert reader.rows == 32 and reader.block_of(9)["step"] == 1 and reader.block_of(31)["first"] == 24
    log = store(tmp_path, position=2)
    for step in (7, 8, 9):  # longer than it was
        log.append(step, [episode("z", i) for i in range(8)], {})
    log.close()
    reader.refresh()
    assert [block["step"] for block in reader.blocks] == [0, 1, 7, 8, 9] and reader.rows == 40
    assert reader.of(reader.blocks[2])[0].task.id == "z"
    with pytest.raises(ConfigError, match="rl has no episode 40"):
        reader.block_of(40)


def test_the_newest_are_kept(tmp_path, monkeypatch):
    monkeypatch.setattr(episode_store, "FILES", 4)
    log = store(tmp_path, keep=EpisodesConfig(keep="newest", megabytes=1))
    for step in range(40):
        log.append(step, [episode(f"{step}", i, tokens=4000) for i in range(2)], {})
    log.wait()
    assert sum(path.stat().st_size for path in tmp_path.glob("*.blocks")) <= 1_000_000
    reader = StoredEpisodes(tmp_path, "rl")
    kept = [bool(reader.of(block)) for block in reader.blocks]
    assert reader.rows == 80 and kept == sorted(kept) and 3 < sum(kept) < 40
    log.close()
    log = store(tmp_path, position=30, keep=EpisodesConfig(keep="newest", megabytes=1))
    log.append(30, [episode("new")], {})
    log.close()
    assert StoredEpisodes(tmp_path, "rl").of(StoredEpisodes(tmp_path, "rl").blocks[-1])[0].task.id == "new"


def test_a_run_that_goes_back_to_what_was_given_up_writes_no_block_where_older_lines_point(tmp_path):
    keep = EpisodesConfig(keep="newest", megabytes=1)
    fill(tmp_path, [0], name="rl.eval").close()
    log = store(tmp_path, keep=keep)
    for step in range(60):
        log.append(step, [episode(f"{step}", i, tokens=4000) for i in range(2)], {})
    log.close()
    log = store(tmp_path, position=20, keep=keep)
    reader = StoredEpisodes(tmp_path, "rl")
    assert not any(reader.of(block) for block in reader.blocks)
    log.append(20, [episode("new")], {})
    log.close()
    reader.refresh()
    assert [e.task.id for block in reader.blocks for e in reader.of(block)] == ["new"] and len(reader.blocks) == 21
    assert StoredEpisodes(tmp_path, "rl.eval").rows == 8 and list(episode_store.files_of(tmp_path, "rl.eval")) == [0]


def test_a_bound_holds_for_large_blocks_and_for_what_was_kept_without_one(tmp_path):
    log = fill(tmp_path, [0])
    for step in range(3):
        log.append(step, [episode("large", i, tokens=40_000) for i in range(6)], {})
    log.close()
    assert sum(path.stat().st_size for path in tmp_path.glob("*.blocks")) > 1_000_000
    log = store(tmp_path, position=4, keep=EpisodesConfig(keep="newest", megabytes=1))
    for step in range(3):
        log.append(step, [episode("large", i, tokens=40_000) for i in range(6)], {})
        log.wait()
        assert 0 < sum(path.stat().st_size for path in tmp_path.glob("*.blocks")) <= 1_000_000
    log.close()


def test_what_stages_learn_from_and_was_given_up_is_told(tmp_path):
    log = fill(tmp_path, [0], learns=True)
    log.close()
    log = store(tmp_path, position=1, keep=EpisodesConfig(keep="newest", megabytes=1))
    for step in range(1, 4):
        log.append(step, [episode("large", i, tokens=60_000) for i in range(6)], {})
    log.close()
    with pytest.raises(ConfigError, match=r"episodes of step 0, to be learnt from, were given up"):
        episode_store.read(tmp_path)


def test_a_disk_that_was_full_leaves_no_hole(tmp_path, monkeypatch):
    log = fill(tmp_path, [0])
    content = (tmp_path / "rl.index").read_bytes()

    def full(*_):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(episode_store.os, "fsync", full)
        log.append(1, [episode("lost")], {})
        with pytest.raises(OSError, match=r"No space .*rl\.00000\.blocks"):
            log.wait()
    with pytest.raises(OSError, match="No space"):
        log.append(2, [episode("after")], {})
    with pytest.raises(OSError, match="No space"):
        log.wait()
    log.close()
    assert (tmp_path / "rl.index").read_bytes() == content


def test_a_sample_has_whole_groups_and_all_failures(tmp_path):
    log = store(tmp_path, keep=EpisodesConfig(keep="sampled", fraction=0.3))
    for step in range(20):
        group = [episode(f"q{i}", s) for i in range(4) for s in range(4)]
        log.append(step, [*group, *(episode("bad", s) for s in range(3)), failed("bad", 3)], {})
    log.wait()
    reader = StoredEpisodes(tmp_path, "rl")
    kept = [e for block in reader.blocks for e in reader.of(block)]
    assert reader.rows == 400 and log.dropped == 400 - len(kept)
    assert sum(e.task.id == "bad" for e in kept) == 80 and 4 * 8 < len(kept) - 80 < 4 * 45
    assert (len(kept) % 4) == 0
    log.close()
    for_learning = store(tmp_path, keep=EpisodesConfig(keep="sampled", fraction=0.0), learns=True, name="sample")
    for_learning.append(0, [episode("all")], {})
    for_learning.close()
    assert [e.task.id for e in episode_store.read(tmp_path)[0]] == ["all"], "a folder's logs of which stages learn"


def test_held_out_episodes_of_a_folder_are_not_read_and_lines_of_earlier_versions_are(tmp_path):
    fill(tmp_path, [0], name="sample", learns=True).close()
    fill(tmp_path, [0], name="rl.eval").close()
    row = codec.encode_episode(episode("earlier"))
    (tmp_path / "rl.jsonl").write_text(json.dumps(row) + "\n")
    (tmp_path / "rl.eval.jsonl").write_text(json.dumps(row) + "\n")
    assert [e.task.id for e in episode_store.read(tmp_path)[0]] == ["earlier", *["0/0"] * 4, *["0/1"] * 4]
    with pytest.raises(ConfigError, match="holds no complete episode"):
        (tmp_path / "empty").mkdir()
        fill(tmp_path / "empty", [0]).close()
        episode_store.read(tmp_path / "empty")


def test_numbers_of_numpy_are_kept_and_what_is_no_json_is_refused(tmp_path):
    about = Task("t", "Who?", ("me",), "", {"n": np.int64(3), "list": [np.float32(0.5)]})
    log = store(tmp_path)
    log.append(0, [dataclasses.replace(episode("t"), task=about, metrics={"total_s": np.float32(0.25)})], {})
    log.wait()
    reader = StoredEpisodes(tmp_path, "rl")
    (read,) = reader.of(reader.blocks[0])
    assert read.task.metadata == {"n": 3, "list": [0.5]} and read.metrics == {"total_s": 0.25}
    log.append(1, [dataclasses.replace(episode("t"), task=dataclasses.replace(about, metadata={"s": {1}}))], {})
    with pytest.raises(ConfigError, match=r"'t' cannot be kept, it is not JSON: .*set"):
        log.wait()
    log.close()


def test_damage_is_named(tmp_path):
    fill(tmp_path, [0]).close()
    path = tmp_path / "rl.00000.blocks"
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 255
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=r"rl\.00000\.blocks, byte 0: damaged"):
        episode_store.read(tmp_path / "rl.index")
    index = (tmp_path / "rl.index").read_bytes()
    for place in range(0, len(index) - 1, 7):
        changed = index[:place] + bytes([index[place] ^ 1]) + index[place + 1 :]
        (tmp_path / "rl.index").write_bytes(changed)
        for opens in (lambda: StoredEpisodes(tmp_path, "rl"), lambda: store(tmp_path, position=1)):
            with pytest.raises(ConfigError, match=r"damaged|records"):
                opens()
        assert path.read_bytes() == content
    (tmp_path / "rl.index").write_bytes(index)
    path.unlink()
    with pytest.raises(ConfigError, match=r"rl\.00000\.blocks is gone"):
        episode_store.read(tmp_path / "rl.index")
    (tmp_path / "rl.index").write_text('{"step": 1}\n')
    with pytest.raises(ConfigError, match=r"rl\.index, byte 0: damaged \(it lacks columns\)"):
        StoredEpisodes(tmp_path, "rl")


def test_a_page_is_read_quickly_whatever_the_log_holds(tmp_path):
    fill(tmp_path, [0], size=64).close()
    line = (tmp_path / "rl.index").read_bytes()
    (tmp_path / "rl.index").write_bytes(line * 1600)  # 102,400 episodes
    reader = StoredEpisodes(tmp_path, "rl")
    started = time.perf_counter()
    rows = range(0, reader.rows, reader.rows // 50)
    for row in rows:
        block = reader.block_of(row)
        assert reader.texts(block)[row - block["first"]][0]
    assert time.perf_counter() - started < 1.0  # 0.03 s alone; the machine may be busy

"""The episode log: nothing is lost, what is wrong is named, a torn last line is dropped and counted."""

import json

import numpy as np
import pytest

from jaxagent.config import ConfigError
from jaxagent.data import codec, episode_log
from jaxagent.types import Episode, StopReason, Task, TokenKind, Trajectory


def episode(task: str = "t", sample: int = 0, reward: float = 1.0, seed: int = 0) -> Episode:
    rng = np.random.default_rng(seed)
    kinds = np.array([0, 0, 1, 1, 2, 3, 1], np.uint8)
    actions = kinds == TokenKind.ACTION
    trajectory = Trajectory(
        tokens=rng.integers(0, 99, len(kinds)).astype(np.int32),
        kinds=kinds,
        logprobs=np.where(actions, rng.normal(-3, 1, len(kinds)), 0).astype(np.float32),
        policy_versions=np.where(actions, 7, -1).astype(np.int32),
        turns=np.array([0, 0, 0, 0, 0, 0, 1], np.int32),
    )
    about = Task(task, "Who?", ("me", "Ö"), "one_hop/x", {"domain": "d", "n": [1, 2]})
    return Episode(about, sample, (trajectory, trajectory), reward, {"em": reward}, StopReason.ANSWER, 2, {"s": 0.25})


def write(path, episodes) -> list[str]:
    lines = [json.dumps(episode_log.record(e, "sample", 3)) for e in episodes]
    path.write_text("".join(line + "\n" for line in lines))
    return lines


def test_what_is_read_is_what_was_played(tmp_path):
    played = [episode("a", 0, 1.0, 1), episode("b", 0, 0.0, 2), episode("a", 1, 0.3, 3)]
    write(tmp_path / "sample.jsonl", played)
    episodes, dropped = episode_log.read(tmp_path)
    assert dropped == 0 and len(episodes) == 3
    for got, want in zip(episodes, played, strict=True):
        assert codec.encode_episode(got) == codec.encode_episode(want)
    groups = episode_log.by_task(episodes)
    assert [(g.task.id, [e.sample for e in g.episodes]) for g in groups] == [("a", [0, 1]), ("b", [0])]


def test_held_out_episodes_of_a_folder_are_not_read(tmp_path):
    write(tmp_path / "rl.jsonl", [episode("a")])
    write(tmp_path / "rl.eval.jsonl", [episode("secret")])
    assert [e.task.id for e in episode_log.read(tmp_path)[0]] == ["a"]


@pytest.mark.parametrize("cut", [1, 40, 300])
def test_a_torn_last_line_is_dropped_and_counted(tmp_path, cut):
    (first, second) = write(tmp_path / "x.jsonl", [episode("a"), episode("b")])
    (tmp_path / "x.jsonl").write_text(first + "\n" + second[:-cut])
    episodes, dropped = episode_log.read(tmp_path / "x.jsonl")
    assert [e.task.id for e in episodes] == ["a"] and dropped == 1
    (tmp_path / "x.jsonl").write_text(first[:-cut] + "\n" + second + "\n")  # torn, but not the last line
    with pytest.raises(ConfigError, match=r"x\.jsonl, row 1: not JSON"):
        episode_log.read(tmp_path / "x.jsonl")


def test_a_last_line_that_is_whole_but_for_its_end_counts(tmp_path):
    (line,) = write(tmp_path / "x.jsonl", [episode("a")])
    (tmp_path / "x.jsonl").write_text(line)
    assert len(episode_log.read(tmp_path / "x.jsonl")[0]) == 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda r: r.pop("reward"), "row 2: column 'reward' must be a finite number, got None"),
        (lambda r: r["trajectories"].__setitem__(1, "x"), "trajectories[1]: not a packed trajectory"),
        (lambda r: r["trajectories"][1]["kinds"].pop(), "trajectories[1]: column 'kinds' has 6 entries for 7 tokens"),
    ],
)
def test_what_is_wrong_is_named_by_file_row_and_column(tmp_path, change, message):
    rows = [json.loads(line) for line in write(tmp_path / "x.jsonl", [episode("a"), episode("b")])]
    change(rows[1])
    (tmp_path / "x.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(ConfigError) as error:
        episode_log.read(tmp_path / "x.jsonl")
    assert message in str(error.value) and "x.jsonl, row 2" in str(error.value)


def test_nothing_to_read_is_said(tmp_path):
    for path in (tmp_path, tmp_path / "none.jsonl"):
        with pytest.raises(ConfigError, match="No logged episodes"):
            episode_log.read(path)

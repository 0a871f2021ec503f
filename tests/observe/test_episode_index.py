"""An index of episodes that is damaged or gone is made anew from the blocks, byte for byte, or a way out is named."""

import json
import zlib

import numpy as np
import pytest

from jaxagent.config import ConfigError, EpisodesConfig
from jaxagent.observe import episode_index, episode_store
from jaxagent.observe.episode_store import StoredEpisodes
from tests.observe.test_episode_store import episode, failed, fill, store


@pytest.fixture
def written(tmp_path, monkeypatch):
    """(folder, the index's bytes): 12 blocks in three files, with failures, learnt tokens and empty texts."""
    monkeypatch.setattr(episode_store, "BLOCK_EPISODES", 3)
    log = store(tmp_path)
    for step in range(6):
        played = [episode(f"{step}/{i}", i) for i in range(5)] + [failed(f"{step}/x")]
        trained = played[0].trajectories[0]
        learnt = episode_store.Learnt(np.full(len(trained), step, np.float32), trained.logprobs, trained.action_mask)
        log.append(step, played, {id(trained): learnt})
        log.wait()
        log._file += step % 2
    log.close()
    return tmp_path, (tmp_path / "rl.index").read_bytes()


def test_an_intact_index_stays(written):
    folder, _ = written
    assert all(episode_index.mended(folder, "rl", position, False) is None for position in (0, 1, 12))


@pytest.mark.parametrize("position", [1, 7, 12])
def test_a_deleted_index_comes_again(written, position):
    folder, content = written
    (folder / "rl.index").unlink()
    assert episode_index.mended(folder, "rl", position, False) == content


def test_any_line_may_be_damaged_or_lost(written):
    folder, content = written
    lines = content.splitlines(keepends=True)
    for place in range(12):
        for bad in (b"\n", b"[]\n", lines[place][:40] + b"\x00" + lines[place][41:]):
            (folder / "rl.index").write_bytes(b"".join([*lines[:place], bad, *lines[place + 1 :]]))
            with pytest.raises(ConfigError, match="damaged"):
                StoredEpisodes(folder, "rl")
            assert episode_index.mended(folder, "rl", 12, False) == content
            assert episode_index.mended(folder, "rl", place, False) is None, "what follows goes anyway"
        (folder / "rl.index").write_bytes(b"".join(lines[:place]) + lines[place][:9])
        assert episode_index.mended(folder, "rl", 12, False) == content
    (folder / "rl.index").write_bytes(b"\n" * 12)
    assert episode_index.mended(folder, "rl", 12, False) == content


def test_a_block_that_is_torn_ends_what_can_be_had(written):
    folder, content = written
    last = max(folder.glob("*.blocks"))
    last.write_bytes(last.read_bytes()[:-1])
    (folder / "rl.index").unlink()
    assert episode_index.mended(folder, "rl", 11, False) == b"".join(content.splitlines(keepends=True)[:11])
    with pytest.raises(ConfigError, match=r"of the 12 lines that the checkpoint knows 0 are intact"):
        episode_index.mended(folder, "rl", 12, False)


def test_what_the_message_says_to_do_can_be_done(tmp_path):
    keep = EpisodesConfig(keep="sampled", fraction=0.5)
    fill(tmp_path, range(10), keep=keep).close()
    content = (tmp_path / "rl.index").read_bytes()
    assert b'"body":0' in content
    lines = content.splitlines(keepends=True)
    whole = [number for number, line in enumerate(lines) if json.loads(line)["body"]]
    given_up = [number for number in range(len(lines)) if number not in whole]
    (tmp_path / "rl.index").write_bytes(b"".join(b"?\n" if n == whole[1] else line for n, line in enumerate(lines)))
    assert episode_index.mended(tmp_path, "rl", len(lines), False) == content, "rows of what was given up stay"
    (tmp_path / "rl.index").write_bytes(b"".join(b"?\n" if n == given_up[1] else line for n, line in enumerate(lines)))
    with pytest.raises(ConfigError, match=r"or go on without the episodes so far: delete all files .*rl\.\*$"):
        episode_index.mended(tmp_path, "rl", len(lines), False)
    with pytest.raises(ConfigError, match="or use another workdir: stages learn"):
        episode_index.mended(tmp_path, "rl", len(lines), True)
    for path in tmp_path.glob("rl.*"):
        path.unlink()
    assert episode_index.mended(tmp_path, "rl", len(lines), False) == b""
    with pytest.raises(ConfigError, match="or use another workdir: stages learn"):
        episode_index.mended(tmp_path, "rl", len(lines), True)


def test_blocks_of_the_first_version_have_the_step_of_their_newest_tokens(tmp_path):
    fill(tmp_path, [7], size=4).close()
    log = StoredEpisodes(tmp_path, "rl")
    texts, body = log.part(log.blocks[0], body=False), log.part(log.blocks[0], body=True)
    raw = episode_store.inflate(body)
    about = b'{"step": 7, "has": '
    assert raw.count(about) == 1
    start = raw.index(about)
    end = raw.index(b"}\n", start)
    old = zlib.compress(raw[:start] + raw[start + len(about) : end] + raw[end + 1 :])
    (tmp_path / "rl.00000.blocks").write_bytes(texts + old)
    (tmp_path / "rl.index").unlink()
    (line,) = episode_index.mended(tmp_path, "rl", 1, True).splitlines()
    assert json.loads(line)["step"] == 7 and json.loads(line)["learns"] is True
    (tmp_path / "rl.index").write_bytes(line + b"\n")
    assert [e.sample for e in StoredEpisodes(tmp_path, "rl").of(log.blocks[0] | json.loads(line))] == [0, 1, 2, 3]

"""Bundles: what was saved comes back bit for bit, on any mesh, after any kill; another shape is one clear line."""

import errno
import json
import pathlib
import signal
import subprocess
import sys
import time

import absl.logging
import jax
import numpy as np
import optax
import pytest

from jaxagent.config import ConfigError
from jaxagent.learner import digests
from jaxagent.learner.checkpoint import Checkpointer, bundles, check, has_past, read_host
from jaxagent.learner.state import TrainState, init_state
from jaxagent.models import params as model_params
from jaxagent.models import sharding
from tests.models import tiny

ROOT = pathlib.Path(__file__).resolve().parents[2]
OPTIMIZER = optax.adamw(1e-2)


@pytest.fixture
def make_state(make_params):
    def make(mesh, critic=False):
        params = make_params(mesh)
        with jax.set_mesh(mesh):
            return init_state(params, OPTIMIZER, params if critic else None, OPTIMIZER if critic else None, True)

    return make


@pytest.mark.slow
def test_round_trip_onto_another_mesh(tmp_path, make_state, make_mesh):
    state, host = make_state(make_mesh(2, 2, 2), critic=True), {"stage": "rl", "tasks": {"next_index": 7}, "loss": 0.25}
    with Checkpointer(tmp_path, keep=2) as checkpointer:
        assert checkpointer.latest is None
        checkpointer.save(5, state, host)
    one = make_mesh()
    target = make_state(one, critic=True)
    with Checkpointer(tmp_path, keep=2) as checkpointer:
        restored = checkpointer.restore(target)
    assert read_host(tmp_path, 5) == host and type(restored) is type(state)
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(restored), jax.device_get(state))
    assert jax.tree.map(lambda x: x.sharding, restored.params) == jax.tree.map(lambda x: x.sharding, target.params)


def test_earlier_versions_lie_beside_the_state(tmp_path, make_state, make_mesh):
    state = make_state(make_mesh())
    add = jax.jit(lambda tree, by: jax.tree.map(lambda x: x + by, tree))
    older = {version: add(state.params, version) for version in (9, 10)}
    with Checkpointer(tmp_path, keep=2) as checkpointer:
        checkpointer.save(0, state, {})
        checkpointer.save(1, state, {}, older)
        checkpointer.wait()
        assert not (tmp_path / "0/past").exists()
        found = checkpointer.past(state.params)
        jax.tree.map(np.testing.assert_array_equal, checkpointer.restore(state).params, state.params)
    assert list(found) == [9, 10] and [has_past(tmp_path, step) for step in (0, 1)] == [False, True]
    jax.tree.map(np.testing.assert_array_equal, found, older)
    with Checkpointer(tmp_path, keep=2) as checkpointer, pytest.raises(ConfigError, match="does not fit this config"):
        checkpointer.past({"embed": jax.numpy.zeros(3)})


def test_buffers_may_be_donated_right_after_save(tmp_path, make_state, make_mesh):
    state = make_state(make_mesh())
    before = jax.device_get(state.opt_state)
    overwrite = jax.jit(lambda tree: jax.tree.map(lambda x: x + 1, tree), donate_argnums=0)
    with Checkpointer(tmp_path, keep=1) as checkpointer:
        for step in range(3):
            checkpointer.save(step, state, {})
            state = state.replace(opt_state=overwrite(state.opt_state))
        checkpointer.wait()
        restored = checkpointer.restore(state)
    jax.tree.map(lambda got, x: np.testing.assert_array_equal(got, x + 2), jax.device_get(restored.opt_state), before)


def test_old_bundles_go_and_the_same_step_is_kept_once(tmp_path, make_state, make_mesh):
    state = make_state(make_mesh())
    with Checkpointer(tmp_path, keep=2) as checkpointer:
        for step in (1, 2, 3, 3):
            checkpointer.save(step, state, {"step": step})
            checkpointer.wait()
        assert checkpointer.latest == 3
    assert sorted(int(p.name) for p in tmp_path.iterdir() if p.name.isdigit()) == [2, 3]


def test_a_checkpoint_of_another_shape_names_the_array(tmp_path, spec, make_state, make_mesh):
    import dataclasses

    mesh = make_mesh()
    with Checkpointer(tmp_path, keep=1) as checkpointer:
        with pytest.raises(ConfigError, match="No checkpoint in"):
            checkpointer.restore(make_state(mesh))
        checkpointer.save(1, make_state(mesh), {})
        checkpointer.wait()
        other = dataclasses.replace(spec, mlp_dim=48)
        params = tiny.init(other, 0, model_params.shardings(other, mesh, sharding.TRAIN))
        with jax.set_mesh(mesh):
            wrong = init_state(params, OPTIMIZER, keep_reference=True)
        with pytest.raises(ConfigError, match=r"array 'params\.layers\.w_\w+' is float32\[2, \d+, \d+\] there"):
            checkpointer.restore(wrong)
        with pytest.raises(ConfigError, match=r"array 'critic\..*' is none there"):
            checkpointer.restore(make_state(mesh, critic=True))


def test_a_full_disk_is_told_when_the_bundle_was_written(tmp_path, make_state, make_mesh, monkeypatch):
    """What orbax raises of it (tensorstore's own error) is no OSError. Its text here is a real one."""
    text = (
        'RESOURCE_EXHAUSTED: Failed writing: "/x/0.orbax-checkpoint-tmp/d/01": Failed to write 147259 bytes to file 7: '
        "No space left on device [source locations='tensorstore/internal/os/file_util_posix.cc:359']"
    )

    class Failed:
        def result(self, timeout=None):
            raise ValueError(text)

    with pytest.raises(OSError) as raised, Checkpointer(tmp_path, keep=1) as checkpointer:
        monkeypatch.setattr(checkpointer._checkpointer, "save_checkpointables_async", lambda *_: Failed())
        checkpointer.save(0, make_state(make_mesh()), {})
        checkpointer.look()
    assert raised.value.errno == errno.ENOSPC and raised.value.filename == str(tmp_path)


def test_a_real_full_disk(small_disk, capfd, make_mesh):
    """Whether an array, its metadata or the digests find no room: one error, and no log of it."""
    absl.logging.set_verbosity(absl.logging.ERROR)
    mesh = make_mesh()
    with jax.set_mesh(mesh):
        state = TrainState(step=jax.numpy.int32(0), params={"a": jax.random.normal(jax.random.key(0), (800, 64))},
                           opt_state=())  # fmt: skip
    with pytest.raises(OSError) as raised, Checkpointer(small_disk / "run", keep=9) as checkpointer:
        for step in range(20):
            checkpointer.save(step, state, {"step": step})
            while not checkpointer.look():
                time.sleep(0.01)
    assert raised.value.errno == errno.ENOSPC
    assert "Traceback" not in capfd.readouterr().err
    for step in bundles(small_disk / "run"):
        assert check(small_disk / "run", step)


def test_a_bundle_without_digests_is_read(tmp_path, make_state, make_mesh):
    """It is from before there were any; one whose list leaves a file out is not."""
    state = make_state(make_mesh())
    with Checkpointer(tmp_path, keep=1) as checkpointer:
        checkpointer.save(1, state, {"a": 1})
    assert check(tmp_path, 1)
    listed = json.loads((tmp_path / "1" / digests.FILE).read_text())
    for left in ({}, dict(list(listed.items())[1:])):
        (tmp_path / "1" / digests.FILE).write_text(json.dumps(left))
        with pytest.raises(ConfigError, match=r"/1 cannot be read .* has no digest in digests.json"):
            check(tmp_path, 1)
    (tmp_path / "1" / digests.FILE).unlink()
    assert not check(tmp_path, 1)
    with Checkpointer(tmp_path, keep=1) as checkpointer:
        checkpointer.restore(state)
    assert read_host(tmp_path, 1) == {"a": 1}
    (tmp_path / "1" / "state" / "manifest.ocdbt").write_bytes(b"")
    unreadable = pytest.raises(ConfigError, match=r"/1 cannot be read .* there is no older one")
    with Checkpointer(tmp_path, keep=1) as checkpointer, unreadable:
        checkpointer.restore(state)


def test_a_fleet_is_told_of_no_bundle_that_its_coordinator_has_forgotten(tmp_path, make_state, make_mesh):
    """A pinned one stays whatever its age, and the ledger does not reach as far back."""
    state, folder = make_state(make_mesh()), tmp_path / "checkpoints"
    with Checkpointer(folder, keep=1) as checkpointer:
        checkpointer.pinned.add(0)
        for step in (0, 2):
            checkpointer.save(step, state, {"pinned": [0]})
    (folder / "9").write_text("a file of somebody's")
    assert bundles(folder) == [0, 2]
    (folder / "2" / "state" / "_METADATA").unlink()
    with pytest.raises(ConfigError, match=r"Delete that folder to go on from 0\.$"):
        check(folder, 2)
    (tmp_path / "fleet").mkdir()
    with pytest.raises(ConfigError, match=r"Put it back .* forgotten the steps since .*, 0: .* config\.fleet"):
        check(folder, 2)
    with Checkpointer(folder, keep=9) as checkpointer:
        checkpointer.save(3, state, {"pinned": [0]})
        checkpointer.save(4, state, {"pinned": [0]})
    (folder / "4" / "state" / "_METADATA").unlink()
    with pytest.raises(ConfigError, match=r"Delete that folder to go on from 3\.$"):
        check(folder, 4)
    (folder / "0" / "state" / "_METADATA").unlink()
    with pytest.raises(ConfigError, match=r"Put it back from a copy, or use another workdir: there is no older one"):
        check(folder, 0)


KILLED = """
import sys, jax, jax.numpy as jnp
from jaxagent.learner.checkpoint import Checkpointer
from jaxagent.learner.state import TrainState
mesh = jax.make_mesh((1, 1, 1), ("data", "fsdp", "tensor"))
with jax.set_mesh(mesh), Checkpointer(sys.argv[1], keep=2) as checkpointer:
    make = jax.jit(lambda step: TrainState(step, {"a": jnp.full((64, 64), step, jnp.float32)}, ()))
    for step in range(10_000):
        checkpointer.save(step, make(jnp.int32(step)), {"step": step})
        print(step, flush=True)
"""


def test_a_kill_at_any_moment_leaves_a_whole_bundle(tmp_path):
    child = subprocess.Popen(
        [sys.executable, "-c", KILLED, str(tmp_path)], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
        text=True,
    )  # fmt: skip
    try:
        deadline = time.monotonic() + 120
        for line in child.stdout:
            assert time.monotonic() < deadline, "the child saved too slowly"
            if int(line) == 5:
                break
    finally:
        child.send_signal(signal.SIGKILL)
        child.wait(timeout=30)
    assert bundles(tmp_path) and all(check(tmp_path, step) for step in bundles(tmp_path))  # digests before the name
    mesh = jax.make_mesh((1, 1, 1), ("data", "fsdp", "tensor"))
    with jax.set_mesh(mesh), Checkpointer(tmp_path, keep=2) as checkpointer:
        from jaxagent.learner.state import TrainState

        target = jax.jit(lambda: TrainState(jax.numpy.int32(0), {"a": jax.numpy.zeros((64, 64))}, ()))()
        restored = checkpointer.restore(target)
    host = read_host(tmp_path, bundles(tmp_path)[-1])
    assert host["step"] >= 4 and int(restored.step) == host["step"]
    np.testing.assert_array_equal(restored.params["a"], np.full((64, 64), host["step"], np.float32))
    assert all(p.name.isdigit() for p in tmp_path.iterdir()), "leftovers of the killed save"

"""One process of a trainer, for test_trainer_processes.py: `learn` on made-up groups, with bundles.

    python -m tests.learner.trainer_process PROCESS PROCESSES HOST:PORT JOB [JOB ...]

A JOB is OUT:LAST or OUT:LAST:FROM:STEP: trains steps up to LAST, of a new state or of FROM's bundle of STEP, with a
bundle in OUT after every step; OUT/steps.jsonl says what each step gave. FROM may be the job of another trainer, which
is waited for. Both kinds of run have 8 virtual devices.
"""

import dataclasses
import json
import os
import pathlib
import shutil
import sys
import time
import types

DEVICES = 8
VOCAB = 61
WAIT_S = 600
LAST_FILE = "params.npz"  # what a job writes at its end


def main(process: int, processes: int, address: str, jobs: list[str]) -> None:
    """Does the jobs one after another, on a mesh of 2 x 2 x 2."""
    os.environ["JAX_PLATFORMS"] = "cpu"
    from jaxagent.config import MeshConfig
    from jaxagent.runs import devices

    mesh_config = MeshConfig(data=2, fsdp=2, tensor=2, context=1)
    with devices.distributed(process, processes, address):
        devices.provide(mesh_config)
        world = World(mesh_config)
        for job in jobs:
            out, last, *origin = job.split(":")
            world.train(pathlib.Path(out), int(last), *origin)


class World:
    """A tiny model, its programs, and groups that are a function of the step."""

    def __init__(self, mesh_config):
        """Compiles."""
        import jax

        from configs.search_r1 import get_config
        from jaxagent import config
        from jaxagent.learner.programs import make_programs
        from jaxagent.models import params, sharding
        from jaxagent.models.spec import ModelSpec

        cfg = config.parse(get_config("laptop+grpo"))
        model = dataclasses.replace(
            cfg.model, num_layers=1, embed_dim=16, num_heads=4, num_kv_heads=2, head_dim=8, mlp_dim=32,
            vocab_multiple=8, logprob_chunk_tokens=24,
        )  # fmt: skip
        batch = dataclasses.replace(cfg.rl.batch, row_tokens=32, micro_rows=4, targets_multiple=4)
        self.cfg = dataclasses.replace(
            cfg, model=model, mesh=mesh_config, numerics="fast", rl=dataclasses.replace(cfg.rl, batch=batch, steps=8),
            env=dataclasses.replace(cfg.env, context_tokens=32, turn_tokens=8, max_turns=2),
        )  # fmt: skip
        self.mesh = sharding.make_mesh(mesh_config)
        spec = ModelSpec.from_config(model, VOCAB)
        where = params.shardings(spec, self.mesh, sharding.TRAIN)
        self.programs, self.first = make_programs(
            self.cfg, spec, self.mesh, params.init(spec, jax.random.key(3), where)
        )

    def train(self, out: pathlib.Path, last: int, origin: str = "", begin: str = "0") -> None:
        """One job."""
        import jax

        from jaxagent import loop
        from jaxagent.learner import peers
        from jaxagent.learner.checkpoint import Checkpointer, read_host
        from jaxagent.models import global_arrays

        state = jax.tree.map(lambda x: x.copy(), self.first)  # its optimiser states are donated
        if origin:
            until = time.monotonic() + WAIT_S
            while not pathlib.Path(origin, LAST_FILE).exists() and time.monotonic() < until:
                time.sleep(0.1)
            one_bundle = out.with_name(f"{out.name}_begins")  # a trainer goes on behind the newest: here it is this one
            if peers.is_first():
                shutil.copytree(pathlib.Path(origin, begin), one_bundle / begin)
            peers.meet("a copy")
            with Checkpointer(one_bundle, keep=99) as checkpointer:
                state = checkpointer.restore(state)
            assert read_host(one_bundle, int(begin)) == {"step": int(begin)}
        parts = types.SimpleNamespace(cfg=self.cfg)
        experience = types.SimpleNamespace(replay=None)
        with Checkpointer(out, keep=99) as checkpointer:
            for step in range(int(begin), last):
                state, metrics, _ = loop.learn(parts, self.programs, state, groups(step), experience, step, self.cfg.rl)
                checkpointer.save(step + 1, state, {"step": step + 1})
                size = float(_size(state.params))
                if peers.is_first():
                    with (out / "steps.jsonl").open("a") as file:
                        file.write(json.dumps(metrics | {"size": size, "step": step + 1}) + "\n")
        whole = global_arrays.get(state.params)
        if peers.is_first():
            import numpy as np

            leaves = jax.tree_util.tree_flatten_with_path(whole)[0]
            np.savez(out / LAST_FILE, **{jax.tree_util.keystr(path): leaf for path, leaf in leaves})


def _size(tree):
    import jax
    import jax.numpy as jnp

    return jax.jit(lambda tree: sum(jnp.sum(jnp.abs(x)) for x in jax.tree.leaves(tree)))(tree)


def groups(step: int) -> list:
    """Four groups of three attempts; lengths and rewards differ."""
    import numpy as np

    from jaxagent.types import Episode, Group, StopReason, Task, TokenKind, Trajectory

    rng = np.random.default_rng(step)

    def episode(task, number):
        length = int(rng.integers(8, 30))
        kinds = rng.choice([TokenKind.ACTION, TokenKind.ACTION, TokenKind.OBSERVATION], length).astype(np.uint8)
        kinds[:3] = TokenKind.PROMPT
        kinds[-1] = TokenKind.ACTION
        sampled = kinds == TokenKind.ACTION
        trajectory = Trajectory(
            tokens=rng.integers(0, VOCAB, length).astype(np.int32),
            kinds=kinds,
            logprobs=np.where(sampled, rng.normal(-4.1, 0.1, length), 0).astype(np.float32),
            policy_versions=np.where(sampled, step, -1).astype(np.int32),
            turns=np.zeros(length, np.int32),
        )
        reward = float(rng.random())
        return Episode(task, number, (trajectory,), reward, {"em": reward}, StopReason.ANSWER, 1)

    tasks = [Task(f"t{step}-{i}", "q", ()) for i in range(4)]
    return [Group(task, [episode(task, i) for i in range(3)]) for task in tasks]


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4:])

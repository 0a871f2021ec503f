"""Reinforcement learning on one page: play groups of attempts, judge them, update the policy, hand its weights over.

    python examples/rl_loop.py --config.rl.steps=2                                  # search_r1, from random weights
    python examples/rl_loop.py --config.model.path=runs/search_r1/policy            # from a policy that has learnt
    python examples/rl_loop.py --config=configs/ragen.py:laptop-bandit --config.workdir=runs/loop

It does what `python -m jaxagent.main` does for the stage "rl" in one process, without evaluations, checkpoints, logs
and other models that play along. Its numbers are those of `jaxagent.main`, bit for bit: tests/test_rl_loop.py.
docs/primer.md explains the words. One step of search_r1 takes some 4 s on two CPU cores.
"""

import json
import sys

from jaxagent.algorithms import compose
from jaxagent.algorithms.streams import sampled_trajectories, shaped
from jaxagent.config import flags
from jaxagent.learner.loss import over_updates
from jaxagent.learner.programs import make_programs
from jaxagent.rollout.experience import Experience
from jaxagent.rollout.groups import episode_metrics
from jaxagent.rollout.workers import group_deadline_s
from jaxagent.runs.attempts import numbered
from jaxagent.runs.parts import open_parts


def main(arguments: list[str]) -> None:
    """Trains `config.rl.steps` steps and prints one line of metrics for each."""
    if {"-h", "--help"} & set(arguments):
        return print(__doc__)
    recipe = [] if any(argument.startswith("--config=") for argument in arguments) else ["--config=search_r1"]
    cfg = flags.parse_argv(["", *recipe, *arguments]).config
    rl, temperature = cfg.rl, cfg.rl.sampling.temperature
    deadline_s = group_deadline_s(rl.group_size, cfg.concurrent_episodes, cfg.env.episode_timeout_s)

    # The tasks, the tokenizer, the environment and the model, and an engine that samples from the model.
    with open_parts(cfg, print) as parts:
        params = parts.init_params()
        with parts.engine(params, version=0) as engine:
            programs, state = make_programs(cfg, parts.spec, parts.mesh, params)
            play = parts.rollout(engine, rl.sampling, rl.group_size)
            tasks = Experience(parts.train, cfg)
            for step in range(rl.steps):
                # 1. Play: `group_size` attempts at each task, numbered over the run: no two share randomness.
                attempt = numbered(play, step * rl.group_size)
                drawn = tasks.take(rl.tasks_per_step, step, 0)
                played = parts.workers.collect(drawn, rl.group_size, attempt, deadline_s)
                groups = [shaped(group, rl) for group in played]

                # 2. Judge: the rewards of a group become advantages, and an episode one stream of numbers per token.
                scores = programs.score(state, sampled_trajectories(groups), temperature)
                streams, metrics = compose.streams(groups, rl, step / rl.steps, scores)

                # 3. Learn: each mini-batch is one update of the optimiser.
                updates = []
                for mini_batch in compose.mini_batches(streams, rl, (cfg.seed, step)):
                    state, of_update = programs.train(state, mini_batch, temperature, step)
                    updates += [of_update] if of_update else []  # none: nothing in it had an advantage

                # 4. Hand over: the engine takes the new arrays themselves, and nothing is copied.
                engine.update_params(state.policy, step + 1)
                tasks.record(played, step)
                print(json.dumps(episode_metrics(groups) | metrics | over_updates(updates, rl.staleness)), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])

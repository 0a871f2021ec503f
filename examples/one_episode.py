"""The package as a library: play one group of episodes, look at the tokens of one, take one gradient step.

    python examples/one_episode.py
    python examples/one_episode.py --config.model.path=runs/search_r1/policy      # a policy that has learnt to search

The first takes less than a minute on two CPU cores. Cells begin with "# %%": editors run them one by one, as they do a
notebook's. docs/primer.md explains every word used here.
"""

# %% The config: a recipe with some fields replaced, as on the command line.
import contextlib
import dataclasses
import sys

from jaxagent.algorithms import compose
from jaxagent.config import flags
from jaxagent.learner.programs import make_programs
from jaxagent.runs.parts import open_parts
from jaxagent.types import Group, TokenKind

if {"-h", "--help"} & set(sys.argv[1:]):
    print(__doc__)
    raise SystemExit
MINE = ["--config.workdir=runs/one_episode", "--config.rl.updates_per_step=1", "--config.rl.optimizer.warmup_steps=0"]
given = [argument for argument in sys.argv[1:] if argument.startswith("--config.")]
cfg = flags.parse_argv(["", "--config=search_r1", *MINE, *given]).config

# %% The parts: tasks, a tokenizer, an environment with its search engine, a model, and an engine that samples from it.
opened = contextlib.ExitStack()
parts = opened.enter_context(open_parts(cfg, print))
params = parts.init_params()  # random weights, or those of config.model.path
engine = opened.enter_context(parts.engine(params, version=0))

# %% One group: eight attempts at one task, all at once.
task = parts.heldout[0]
rollout = parts.rollout(engine, cfg.rl.sampling, group_size=8)
(group,) = parts.workers.collect([task], 8, rollout, deadline_s=120.0)
for episode in group.episodes:
    print(f"attempt {episode.sample}: reward {episode.reward:g}, {episode.turns} turns, ended by {episode.stop_reason}")

# %% The tokens of the first attempt. Only ACTION tokens were sampled: they have a log-prob, and are what is trained.
(trajectory,) = group.episodes[0].trajectories
for token, kind, turn, logprob in zip(
    trajectory.tokens, trajectory.kinds, trajectory.turns, trajectory.logprobs, strict=True
):
    sampled = f"{logprob:8.3f}" if kind == TokenKind.ACTION else " " * 8
    print(f"{turn:3} {TokenKind(kind).name:12} {sampled}  {parts.tokenizer.decode([token])!r}")

# %% The reward. Weights at random answer nothing right, and a group of equal rewards teaches nothing. To see a gradient
# there too, we pay such a policy for what it can already do, by chance: writing the letter e.
if len({episode.reward for episode in group.episodes}) == 1:
    paid = [dataclasses.replace(episode, reward=float(episode.text.count("e"))) for episode in group.episodes]
    group = Group(task, paid)

# %% Groups -> streams: one number per token for the advantage, and for the weight of every term of the loss.
streams, counts = compose.streams([group], cfg.rl, progress=0.0)
for stream in streams:
    actions = stream.trajectory.action_mask
    print(f"attempt {stream.episode}: {actions.sum()} sampled tokens, advantage {stream.advantages[actions][0]:+.2f}")

# %% Streams -> packed rows -> one optimiser update. On its own tokens the loss falls.
programs, state = make_programs(cfg, parts.spec, parts.mesh, params)
(update,) = compose.mini_batches(streams, cfg.rl, seed=(0, 0))
state, metrics = programs.train(state, update, cfg.rl.sampling.temperature, step=0)
_, again = programs.train(state, update, cfg.rl.sampling.temperature, step=1)
print(f"largest gap between the engine's log-probs and the trainer's: {metrics['policy/logprob_gap_max']}")
print(f"gradient norm {metrics['policy/grad_norm']:.3f}")
print(f"loss before the step {metrics['loss/policy']:.5f}, after it {again['loss/policy']:.5f}")

# %% The engine takes the new weights; then everything is closed.
engine.update_params(state.policy, int(state.step))
opened.close()

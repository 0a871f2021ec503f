"""An outcome model as the reward: trained by a run on its own attempts, compared with what transformers makes of it."""

import dataclasses
import json

import numpy as np
import pytest

from jaxagent import main as cli
from jaxagent import replay
from jaxagent.algorithms.group_rewards import OutcomeModel
from jaxagent.config import ConfigError, flags
from jaxagent.data import codec
from jaxagent.envs.base import Verdict
from jaxagent.envs.search.environment import SearchAttempt
from jaxagent.runs import checks, outcomes
from jaxagent.runs.parts import open_parts
from jaxagent.types import Group, StopReason
from tests import tiny_run

FLAGS = tuple(
    f"--config.{flag}"
    for flag in (
        "stages=sample,outcome_model,rl", "eval.every=0", "eval.sampled=false", "data.num_eval=2", "rl.steps=2",
        "sample.steps=2", "sample.tasks_per_step=4", "sample.attempts=4", "outcome_model.updates=8",
        "outcome_model.learning_rate=0.01", "outcome_model.examples=8", "rl.group_reward=outcome_model",
        "rl.optimizer.warmup_steps=0",
    )
)  # fmt: skip


async def by_length(self, transcript):
    """A check that a random policy sometimes passes."""
    reward = float(len(transcript.response) % 2)
    return Verdict(reward, {"em": reward})


@pytest.mark.slow
def test_the_policy_earns_what_the_model_says_and_the_check_stands_beside_it(tmp_path, monkeypatch):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    monkeypatch.setattr(SearchAttempt, "verify", by_length)
    argv = tiny_run.argv(tmp_path / "run", *FLAGS)
    assert cli.main(argv) == 0
    folder = tmp_path / "run/outcome_model"
    assert json.loads((tmp_path / "run/summary.json").read_text())["compiles_after_warmup"] == 0
    episodes = [
        codec.decode_episode({**row, "stage": None}, "log") for row in tiny_run.episodes(tmp_path / "run", "rl")
    ]
    assert len(episodes) == 16

    model, head = transformers.AutoModel.from_pretrained(folder), np.load(folder / "value_head.npy")
    for episode in episodes:
        with torch.no_grad():
            hidden = model(torch.tensor(episode.trajectories[-1].tokens[None].astype(np.int64))).last_hidden_state
        z = float(hidden[0, -1].float().numpy() @ head)
        assert abs(z) < 1e-3 or episode.reward == float(z >= 0)
    of_model = {e.reward for e in episodes}
    assert any(e.reward != e.rewards["em"] for e in episodes) and of_model <= {0.0, 1.0}
    last = tiny_run.numbers(tmp_path / "run")[-1]
    assert last["reward/mean"] == np.mean([e.reward for e in episodes[8:]])
    assert last["reward/em"] == np.mean([e.rewards["em"] for e in episodes[8:]])

    assert replay.main(["replay", f"--config.workdir={tmp_path / 'run'}", "--verify=1", "--draw=1"]) == 0

    # A language model that says YES or NO: the exported policy, asked in its own tokens.
    cfg = flags.parse_argv(argv).config
    asked = OutcomeModel(str(tmp_path / "run/policy"), tokens=300)
    cfg = dataclasses.replace(cfg, rl=dataclasses.replace(cfg.rl, group_reward=asked))
    with open_parts(cfg, print) as parts:
        judge = outcomes.opened(parts).cfg.rl.group_reward
        model = transformers.AutoModelForCausalLM.from_pretrained(asked.folder)
        yes, no = (parts.tokenizer.encode(word)[0] for word in ("YES", "NO"))
        z = judge.judge(episodes[:8])
        for episode, ours in zip(episodes[:8], z, strict=True):
            text = outcomes.SYSTEM + outcomes.question(episode, parts.tokenizer)
            ids = parts.tokenizer.encode(text)[-300:]
            with torch.no_grad():
                logits = model(torch.tensor([ids])).logits[0, -1].float()
            np.testing.assert_allclose(ours, float(logits[yes] - logits[no]), rtol=1e-3, atol=1e-4)
        failed = dataclasses.replace(episodes[0], stop_reason=StopReason.ENV_ERROR)
        group = Group(failed.task, (failed, *episodes[1:4]))
        assert judge(group) == [0.0, *(float(number >= 0) for number in z[1:4])]


def test_a_reward_without_a_model_is_refused_before_any_device_work(tmp_path):
    argv = tiny_run.argv(tmp_path, "--config.stages=rl", "--config.rl.group_reward=outcome_model")
    with pytest.raises(ConfigError, match=r"rl\.group_reward='outcome_model' needs a model"):
        checks.check(flags.parse_argv(argv).config)

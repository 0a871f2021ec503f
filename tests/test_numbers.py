"""Numbers that mean nothing are refused by name, in one line, before jax is loaded; a 0 that means "off" is not."""

import copy
import functools
import importlib
import pathlib
import re
from collections.abc import Sequence

import pytest

from jaxagent import config as schema
from jaxagent.algorithms import published
from jaxagent.config import ConfigError, flags, overrides, relations
from jaxagent.config.ranges import Range, at_least, between, more_than
from jaxagent.config.run import STAGE_SECTIONS
from jaxagent.runs import parts
from tests.tiny_run import put

ROOT = pathlib.Path(__file__).resolve().parents[1]
NAN, INF = float("nan"), float("inf")

# What a user might type by mistake, and what it did: trained nothing, made NaNs, failed after minutes of warm start.
IMPOSSIBLE = {
    "seed": (-1, 2**32, 10**400),
    "mesh": {"data": (0, -1), "fsdp": (0,), "tensor": (0,), "context": (0,)},
    "model": {"num_layers": (-1,), "vocab_multiple": (0,), "rope_theta": (-1.0, NAN), "embed_init_std": (-0.1,),
              "logprob_chunk_tokens": (0,), "lora": {"rank": (-1,), "alpha": (0.0, -32.0)}},
    "tokenizer": {"vocab_size": (0, -5)},
    "data": {"seed": (-1,), "num_eval": (0, -1), "source": {"num_cities": (0,), "num_demonstrations": (-1,),
             "num_curriculum": (-1,), "early_answer_frac": (1.5,)}},
    "env": {
        "max_turns": (0, -1), "turn_tokens": (0, -1), "observation_tokens": (0, -1), "context_tokens": (0, -1),
        "episode_timeout_s": (0.0, -1.0, INF, NAN, 1e12),
        "reward": {"min_answers": (0, 3)},
        "retriever": {"topk": (0, -1)},
    },
    "engine": {"slots": (0,), "steps_per_dispatch": (-1,), "prefill_tokens": (-1,), "pages": (-1,),
               "page_tokens": (-64,), "tile_rows": (-1,), "request_timeout_s": (0.0, -1.0)},
    "warm_start": {"max_steps": (-1,), "curriculum": {"sequences": (0,), "steps": (-1,)}, "batch_sequences": (0,),
                   "gate_every": (0,), "gate_accuracy": (1.1,), "gate_questions": (0,),
                   "optimizer": {"learning_rate": (-1.0, NAN, INF)},
                   "batch": {"row_tokens": (0,), "micro_rows": (0,)}},
    "sample": {"steps": (-1,), "tasks_per_step": (0,), "attempts": (0,)},
    "sft": {"negative_frac": (1.0, -0.1), "updates": (0,), "examples": (0,), "learning_rate": (0.0, NAN)},
    "rft": {"min_reward": (NAN,), "per_task": (0,)},
    "dpo": {"pairs_per_task": (0,), "min_gap": (-0.5,), "beta": (0.0,), "nll_coefficient": (-0.2,)},
    "outcome_model": {"held_out_frac": (0.0, 1.0)},
    "opd": {"steps": (-1,), "learning_rate": (0.0,), "distill": {"coefficient": (0.0,)}},
    "rl": {
        "steps": (-1,), "tasks_per_step": (0, -2), "group_size": (0, -4), "staleness": (-1,), "rescore_every": (-1,),
        "updates_per_step": (0,), "epochs": (0,),
        "entropy_coefficient": (-0.01,),
        "routing": {"balance_loss": (-0.1,), "bias_rate": (-0.1,)},
        "keep_groups_frac": (0.0, 1.5), "tool_epsilon": (1.5,),
        "sampling": {"temperature": (-1.0, NAN)},
        "optimizer": {"learning_rate": (-1.0, NAN), "warmup_steps": (-1,), "weight_decay": (-0.01,), "b2": (-0.1,),
                      "grad_clip": (-1.0,)},
        "temperature": {"final": (0.0,)},
        "z_loss": {"coefficient": (0.0, -1.0)},
        "entropy_control": {"target": (0.0, -1.0), "step": (0.0,), "maximum": (0.0,)},
        "refill": {"max_rounds": (0, 1), "tasks_per_round": (-1,)},
        "oversample": {"extra_tasks": (-1,), "extra_attempts": (-1,), "min_group": (1,)},
        "replay": {"per_step": (0, -1), "capacity": (0,), "coefficient": (0.0, -0.1), "low": (-0.5,), "high": (1.5,)},
        "kl": {"coefficient": (0.0, -0.1), "refresh_every": (-1,)},
        "echo": {"coefficient": (0.0, -0.05), "max_tokens": (-1,)},
        "positive_nll": {"coefficient": (0.0, -0.1)},
        "distill": {"coefficient": (0.0, -1.0)},
    },
    "eval": {"every": (-1,)},
    "checkpoint": {"every": (-1,), "keep": (0, -1)},
}  # fmt: skip

# Of entries that a recipe's choices are not: what is chosen on the command line, and then the numbers.
IN_ENTRIES = [
    ("search_r1", ["env.reward=em_format"],
     {"env": {"reward": {"structure_score": (-0.1, 2.0), "final_format_score": (1.1,), "retrieval_score": (-1.0,)}}}),
    ("search_r1", ["env.shaping.overlong.buffer_tokens=12", "env.shaping.efficiency=on"],
     {"env": {"shaping": {"overlong": {"weight": (-1.0, 0.0), "buffer_tokens": (0,)}, "cap": (-0.1, INF),
                          "efficiency": {"penalty": (1.5,), "weight": (0.0,), "budget": (-1,)}}}}),
    ("search_r1", ["env.retriever=http", "env.retriever.url=http://x/retrieve"],
     {"env": {"retriever": {"timeout_s": (0.0, -1.0), "retries": (-1,)}}}),
    ("endless_terminals", [],
     {"env": {"command_timeout_s": (0.0,), "output_chars": (0,), "agent_timeout_s": (-1.0,), "solved_reward": (0.0,),
              "sandbox": {"warm": (-1,), "memory_mb": (0,), "cpus": (0.0,)}},
      "data": {"source": {"num_tasks": (-1,)}}}),
    ("gsm8k_python", [],
     {"env": {"run_timeout_s": (-1.0,), "output_chars": (0,), "judge_timeout_s": (0.0,),
              "sandbox": {"disk_mb": (-16,), "files": (0,), "processes": (0,)}}}),
    ("agentflow", [],
     {"env": {"token_budget": (-1,), "prompt_tokens": (-1,), "result_chars": (0,), "run_timeout_s": (0.0,),
              "output_chars": (0,)},
      "data": {"source": {"num_tasks": (-1,), "num_demonstrations": (-1,), "estimate_frac": (-0.1, 1.1)}}}),
    ("code_agent", ["env=coding", "env.agent=mini_swe_agent"],
     {"env": {"init_s": (0.0,), "run_s": (-1.0,), "verify_s": (0.0, INF),
              "command_timeout_s": (0.0,), "output_chars": (0,),
              "agent": {"steps": (-1,), "command_timeout_s": (0,)}}}),
]  # fmt: skip

# The same of the entries of choices: the field, the entry, and its constants.
CHOSEN = {
    "rl.objective": {
        "ppo_clip": {"clip_low": (-0.1, 2.0), "clip_high": (-0.1, INF)}, "dual_clip": {"clip_dual": (0.5, 1.0)},
        "sapo": {"tau_positive": (0.0,), "tau_negative": (-1.0,)},
    },
    "rl.advantage": {
        "max_at_k": {"k": (0,)}, "gae": {"gamma": (1.1,), "lam": (-0.1,)},
        "gae_adaptive": {"returns_lam": (2.0,), "alpha": (0.0,)}, "gae_bilevel": {"turn_gamma": (-1.0,)},
    },
    "rl.advantage.critic.loss": {
        "squared": {"value_clip": (-0.5,)}, "hl_gauss": {"bins": (1,), "low": (-INF,), "sigma": (0.0,)},
    },
    "rl.aggregation": {"constant": {"constant": (0.0,)}},
    "rl.echo.denominator": {"constant_sum": {"constant": (0.0,)}},
    "rl.correction": {"truncate": {"low": (-0.1, 1.5), "high": (0.0, 0.9), "veto": (1.5,)}, "opsm": {"delta": (-1.0,)}},
    "rl.curriculum": {
        "target": {"target": (1.5,), "width": (0.0,)},
        "failed": {"explore": (-0.1,), "decay": (0.0,), "prior": (2.0,), "prior_attempts": (0.0,)},
    },
    "rl.distill.teacher": {"http": {"timeout_s": (0.0,), "retries": (-1,), "request_tokens": (0,)}},
    "rl.distill.loss": {"jsd": {"beta": (0.0, 1.0)}},
    "rl.distill.loss.support": {"union": {"top_k": (0,)}},
}  # fmt: skip
# What must be chosen first, for a field below to be there.
BEFORE = {
    "rl.advantage.critic": {"rl.advantage": {"name": "gae"}},
    "rl.distill.loss.support": {"rl.distill.loss": {"name": "jsd"}},
}

OFF = (
    "data.source.num_demonstrations", "warm_start.max_steps", "warm_start.curriculum_steps",
    "rl.steps", "rl.staleness", "rl.kl.refresh_every", "rl.optimizer.grad_clip", "rl.optimizer.warmup_steps",
    "rl.advantage.critic.warmup_updates", "rl.echo.max_tokens", "rl.refill.tasks_per_round",
    "rl.tool_epsilon", "eval.every", "checkpoint.every",
)  # fmt: skip


def cases(tree, path=()):
    if isinstance(tree, dict):
        for name, below in tree.items():
            yield from cases(below, (*path, name))
    else:
        yield from ((".".join(path), value) for value in tree)


def changed(changes: dict, recipe: str = "search_r1", chosen: Sequence[str] = ()) -> schema.Config:
    raw = importlib.import_module(f"configs.{recipe}").get_config().to_dict()
    raw = overrides.apply(raw, [tuple(choice.split("=", 1)) for choice in chosen])
    for above in [given for path, given in BEFORE.items() if any(field.startswith(path) for field in changes)]:
        changes = copy.deepcopy(above) | changes
    for field, value in changes.items():
        put(raw, field, value)
        if (stage := field.split(".")[0]) in STAGE_SECTIONS and stage not in raw["stages"]:
            raw["stages"] = (stage, *raw["stages"])  # a run has the sections of its stages alone
    config = schema.parse(raw)
    relations.check(config)
    return config


@pytest.mark.parametrize(
    ("path", "entry", "field", "value"),
    [
        (path, entry, field, value)
        for path, entries in CHOSEN.items()
        for entry, constants in entries.items()
        for field, value in cases(constants)
    ],
)
def test_an_impossible_constant_of_a_choice_is_named(path, entry, field, value):
    with pytest.raises(ConfigError) as refused:
        changed({path: {"name": entry, field: value}})
    message = str(refused.value)
    assert message.startswith(f"config.{path}.{field} must be ") and message.endswith(f", got {value!r}.")


@pytest.mark.parametrize(
    ("field", "value", "recipe", "chosen"),
    [
        (*case, recipe, chosen)
        for recipe, chosen, tree in [("search_r1", (), IMPOSSIBLE), *IN_ENTRIES]
        for case in cases(tree)
    ],
)
def test_an_impossible_number_is_named(field, value, recipe, chosen):
    with pytest.raises(ConfigError) as refused:
        changed({field: value}, recipe, chosen)
    message = str(refused.value)
    assert message.startswith(f"config.{field} must be ") and message.endswith(f", got {value!r}.")
    assert "\n" not in message


@pytest.mark.parametrize("field", OFF)
def test_a_zero_that_means_off_is_fine(field):
    assert functools.reduce(getattr, field.split("."), changed({field: 0})) == 0


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"env.context_tokens": 10}, ("env.turn_tokens (12)", "env.context_tokens (10)")),
        ({"rl.updates_per_step": 129}, ("rl.updates_per_step (129)", "(128)")),
        (
            {"rl.advantage.critic.loss": {"name": "two_hot", "low": 2.0}},
            ("config.rl.advantage.critic.loss: low (2)", "high (1.25)"),
        ),
        ({"rl.replay": {"per_step": 1, "low": 0.95}}, ("rl.replay.low (0.95)", "rl.replay.high (0.95)")),
        ({"rl.entropy_control": {}, "rl.entropy_coefficient": 0.1}, ("rl.entropy_control.maximum (0.005)",)),
    ],
)
def test_numbers_that_contradict_each_other_are_named(changes, named):
    with pytest.raises(ConfigError) as refused:
        changed(changes)
    assert all(part in str(refused.value) for part in named)


def test_a_step_of_more_than_one_epoch_is_said():
    told = list(parts.more_than_an_epoch(changed({"rl.tasks_per_step": 100_000}), 1_126))
    assert told == ["rl.tasks_per_step is 100000, there are 1126 training tasks: one step plays 88.8 epochs"]
    assert not list(parts.more_than_an_epoch(changed({"rl.tasks_per_step": 1_126}), 1_126))


def test_every_number_of_the_schema_has_a_range():
    numbers = [field for field in flags.fields() if field.kind in ("int", "float")]
    assert len(numbers) > 150
    assert [field.path for field in numbers if not field.allowed] == []


@pytest.mark.parametrize("name", ["search_r1", "gsm8k_python", "code_agent", "endless_terminals", "echo"])
def test_every_preset_keeps_to_the_ranges(name):
    file = importlib.import_module(f"configs.{name}")
    (table,) = re.findall(r"presets = \{(.*?)\}", (ROOT / "configs" / f"{name}.py").read_text(), re.DOTALL)
    presets = re.findall(r'"([\w.-]+)": ', table)
    assert "laptop" in presets and len(presets) > 1
    for preset in presets:
        for algorithm in ("", *(f"+{a}" for a in published.PUBLISHED if name != "echo")):
            relations.check(schema.parse(file.get_config(preset + algorithm)))


@pytest.mark.parametrize("name", sorted(p.stem for p in (ROOT / "configs").glob("[!_]*.py")))
def test_large_presets_keep_the_newest_steps_for_a_replay_and_laptops_all(name):
    file = importlib.import_module(f"configs.{name}")
    (table,) = re.findall(r'\{\s*("laptop": .*?)\}', (ROOT / "configs" / f"{name}.py").read_text(), re.DOTALL)
    for preset in re.findall(r'"([\w.-]+)": ', table):
        config = file.get_config(preset)
        assert config.checkpoint.replay == ("newest" if config.numerics == "fast" else "all"), preset


@pytest.mark.parametrize(
    ("allowed", "inside", "outside", "said"),
    [
        (at_least(1), (1, 2, 10**400), (0, 0.5, INF), "at least 1"),
        (more_than(0), (1e-300,), (0, -1), "more than 0"),
        (between(0, 1), (0, 1), (-0.1, 1.1), "at least 0 and at most 1"),
        (between(0, 1, without="both"), (0.5,), (0, 1), "more than 0 and less than 1"),
        (between(0, 1, without="high"), (0,), (1,), "at least 0 and less than 1"),
        (Range(), (-1e300, 0), (NAN, INF, -INF), "finite"),
    ],
)
def test_ranges(allowed, inside, outside, said):
    assert all(number in allowed for number in inside)
    assert not any(number in allowed for number in (*outside, NAN))
    assert str(allowed) == said

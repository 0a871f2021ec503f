"""The schema: what it accepts, what it converts, and what it says when it refuses."""

import dataclasses
import re

import pytest
from ml_collections import ConfigDict

from configs import search_r1
from jaxagent import config as schema
from jaxagent.config import flags
from jaxagent.config.model import suitable_sizes
from jaxagent.config.parse import build
from jaxagent.config.run import STAGE_SECTIONS
from tests.tiny_run import ROOT, put


@dataclasses.dataclass(frozen=True)
class Sizes:
    sizes: tuple[int, ...]


def _raw() -> dict:
    return search_r1.get_config().to_dict()


def test_every_field_of_the_default_config_survives_a_round_trip():
    stored = schema.to_dict(schema.parse(_raw()))
    assert schema.to_dict(schema.parse(stored)) == stored == schema.to_dict(schema.parse(ConfigDict(_raw())))
    assert given({name: value for name, value in _raw().items() if name not in STAGE_SECTIONS}, stored)


def given(part, whole) -> bool:
    """Whether what a recipe says is what is stored, which holds more: defaults, and sections that are off."""
    if isinstance(part, dict):
        return all(name in whole and given(value, whole[name]) for name, value in part.items())
    return part == whole


def leaves(value) -> int:
    """What a run's config says; a section that is off says nothing."""
    return sum(map(leaves, value.values())) if isinstance(value, dict) else value is not None


LAPTOPS = [
    f"{path.stem}:{preset}"
    for path in sorted((ROOT / "configs").glob("[!_]*.py"))
    for preset in sorted(set(re.findall(r'"(laptop[^"]*)": ', path.read_text())))
]


@pytest.mark.parametrize("name", LAPTOPS)
def test_a_run_on_a_laptop_is_said_in_150_values(name):
    stored = schema.to_dict(flags.parse_argv(["main", f"--config={name}"]).config)
    assert leaves(stored) <= 150 and leaves(stored["rl"]) <= 55


@pytest.mark.parametrize(
    ("platform", "slots", "tile", "page"),
    [
        ("cuda", 8, 128, 64),
        ("gpu", 200, 208, 64),  # whole runs of 16 rows
        ("gpu", 512, 256, 64),
        ("gpu", 600, 208, 64),  # three tiles, and few rows that nobody uses
        ("tpu", 512, 128, 128),
    ],
)
def test_sizes_that_suit_an_accelerator(platform, slots, tile, page):
    sizes = {"tile_rows": tile, "page_tokens": page, "steps_per_dispatch": 16, "prefill_tokens": 16_384}
    assert suitable_sizes(platform, slots) == sizes


def test_sizes_that_suit_a_cpu_are_the_laptops():
    laptop = schema.to_dict(schema.parse(search_r1.get_config()))["engine"]
    assert all(laptop[name] == size for name, size in suitable_sizes("cpu", 128).items())


def test_sizes_are_by_platform_where_they_are_0():
    cfg = flags.parse_argv(["main", "--config=search_r1:qwen2.5-3b", "--config.engine.tile_rows=256"]).config
    engine = cfg.for_platform("gpu").engine
    assert (engine.tile_rows, engine.page_tokens, engine.steps_per_dispatch) == (256, 64, 16)
    engine = dataclasses.replace(cfg.engine, tile_rows=0)
    shards = dataclasses.replace(cfg.mesh, data=2, fsdp=2, context=1, tensor=2)  # 128 slots on each of four
    assert dataclasses.replace(cfg, engine=engine, mesh=shards).for_platform("gpu").engine.tile_rows == 128
    assert cfg.for_platform("gpu").for_platform("cpu") == cfg.for_platform("gpu")


def test_integers_become_floats_where_a_float_is_meant():
    raw = _raw()
    raw["rl"]["objective"]["clip_low"] = 1
    value = schema.parse(raw).rl.objective.clip_low
    assert value == 1.0 and isinstance(value, float)


def test_lists_become_tuples_so_that_a_section_is_hashable():
    parsed = build(Sizes, {"sizes": [8, 16]}, "config")
    assert parsed.sizes == (8, 16)
    assert isinstance(hash(parsed), int)


@pytest.mark.parametrize(
    ("value", "message"),
    [(8, "config.sizes must be a sequence, got 8."), ((8, "x"), "config.sizes[1] must be int, got str 'x'.")],
)
def test_what_is_wrong_in_a_sequence_is_named(value, message):
    with pytest.raises(schema.ConfigError, match=re.escape(message)):
        build(Sizes, {"sizes": value}, "config")


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("rl.group_sise", 8, "Unknown config field 'config.rl.group_sise'. Did you mean 'group_size'?"),
        ("rl.echo.target", "env_only", "Did you mean 'targets'?"),
        ("seed", "0", "config.seed must be int, got str '0'."),
        ("seed", True, "config.seed must be int, got bool True."),
        ("rl.advantage.drop_zero_signal", 1, "config.rl.advantage.drop_zero_signal must be bool, got int 1."),
        ("rl.advantage.lam", 1.0, "Unknown config field 'config.rl.advantage.lam'."),  # of another advantage
        ("rl.objective", "gpso", "config.rl.objective has no choice 'gpso'. Did you mean 'gspo'?"),
        ("rl.steps", 1.5, "config.rl.steps must be int, got float 1.5."),
        (
            "rl.kl.where",
            "los",
            "config.rl.kl.where must be one of 'loss', 'reward', 'advantage', 'objective', got 'los'. "
            "Did you mean 'loss'?",
        ),
        ("mesh", 8, "config.mesh must be a section with fields, got 8."),
        ("seed", {"a": 1}, "config.seed must be int, got dict {'a': 1}."),
        ("rl", 8, "config.rl must be a section with fields, got 8."),
    ],
)
def test_what_is_wrong_is_named_with_its_path(path, value, message):
    raw = _raw()
    put(raw, path, value)
    with pytest.raises(schema.ConfigError) as error:
        schema.parse(raw)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_a_missing_field_is_named():
    raw = _raw()
    del raw["rl"]["sampling"]["temperature"]
    with pytest.raises(schema.ConfigError, match=r"'config\.rl\.sampling\.temperature' is missing"):
        schema.parse(raw)


def test_what_earlier_versions_said_of_truncation_and_sizes_reads_as_before():
    """Off was one value each, and 0 was the engine's size; a truncated policy was refused, and is."""
    argv = ["main", "--config=tool_orchestra:laptop-engine"]
    plain = flags.parse_argv(argv).config
    role = "--config.roles.answer-3"
    said = ("--config.rl.sampling.top_p=1.0", f"{role}.sampling.top_k=0", f"{role}.slots=0", f"{role}.pages=0")
    assert flags.parse_argv([*argv, *said]).config == plain
    stored = schema.to_dict(plain)
    stored["rl"]["sampling"] |= {"top_p": 1.0, "top_k": 0, "min_p": 0.0}
    stored["roles"]["answer-3"] |= {"slots": 0, "pages": 0}
    assert schema.parse(stored) == plain
    with pytest.raises(schema.ConfigError, match=r"rl\.sampling\.top_p' exists no more: every token"):
        schema.parse(stored | {"rl": stored["rl"] | {"sampling": {"temperature": 1.0, "top_p": 0.9}}})


def test_parsed_configs_do_not_change():
    with pytest.raises(dataclasses.FrozenInstanceError):
        schema.parse(_raw()).seed = 3


def test_a_run_has_the_sections_of_its_stages_alone():
    raw = _raw() | {"stages": ("sft", "rl")}
    parsed = schema.parse(raw)
    assert parsed.sft is not None and parsed.warm_start is None and parsed.dpo is None
    del raw["sft"]
    with pytest.raises(schema.ConfigError, match=r"names 'sft', and the section config\.sft is missing"):
        schema.parse(raw)
    with pytest.raises(schema.ConfigError, match=r"config\.dpo\.beta would be ignored: config\.stages has no 'dpo'"):
        flags.parse_argv(["main", "--config=configs/search_r1.py", "--config.dpo.beta=0.5"])

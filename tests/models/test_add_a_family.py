"""docs/add_a_family.md is true: its family stands outside the package, equals transformers' and trains."""

from __future__ import annotations

import dataclasses
import re
import runpy
import sys

import pytest

from jaxagent.config import ConfigError
from jaxagent.models import hf_config
from jaxagent.models.blocks import LayerBlock
from jaxagent.models.families import Family
from jaxagent.models.spec import ModelSpec
from tests.models import tiny
from tests.tiny_run import ROOT

PAGE = ROOT / "docs/add_a_family.md"


def write_family(folder, monkeypatch) -> None:
    """The page's files in a folder of the user's, which Python finds."""
    for block in re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL):
        (folder / block.split("\n", 1)[0].removeprefix("# ")).write_text(block, encoding="utf-8")
    monkeypatch.syspath_prepend(folder)


@pytest.fixture
def mine(tmp_path, monkeypatch):
    write_family(tmp_path, monkeypatch)
    yield tmp_path
    sys.modules.pop("my_arcee", None)


@pytest.mark.slow
def test_it_is_what_transformers_computes(mine, capsys):
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    runpy.run_path(str(mine / "check_arcee.py"))
    assert capsys.readouterr().out.endswith("the same\n")


def test_its_config_json_is_read_and_written(mine):
    config = tiny.model_config(
        family="my_arcee:ARCEE", num_layers=2, embed_dim=16, num_heads=4, num_kv_heads=2, head_dim=8, mlp_dim=32,
        rope_theta=1e4, embed_init_std=0.5,
    )  # fmt: skip
    spec = ModelSpec.from_config(config, 61)
    folder = hf_config.spec_to_hf(spec, "float32")
    assert (folder["model_type"], folder["hidden_act"], spec.norm_eps) == ("arcee", "relu2", 1e-5)
    assert hf_config.spec_from_hf(folder, config, "config.json").pattern == spec.pattern
    with pytest.raises(ConfigError, match=r"config.json: hidden_act='silu' is not supported, only 'relu2'."):
        hf_config.spec_from_hf(folder | {"hidden_act": "silu"}, config, "config.json")


def test_the_page_names_what_blocks_and_families_say():
    page = PAGE.read_text(encoding="utf-8")
    says = [name for name in vars(LayerBlock) if not name.startswith("_")]
    says += [field.name for field in dataclasses.fields(Family)] + ["pattern_of", "settings_of", "scaling_of"]
    assert not [name for name in says if f"`{name}" not in page]

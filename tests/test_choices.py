"""A choice brings its constants: what a config, a command line and the stored config say of it."""

import dataclasses
import sys
import types
from typing import Annotated

import pytest

from jaxagent.config import ConfigError, flags, overrides
from jaxagent.config.choice import Choice
from jaxagent.config.parse import Kind, build, hints, kind, to_dict
from jaxagent.config.ranges import PositiveFloat


@dataclasses.dataclass(frozen=True)
class Clip:
    low: float = 0.2
    high: float = 0.2


@dataclasses.dataclass(frozen=True)
class Gate:
    tau: PositiveFloat = 1.0  # how fast it closes


@dataclasses.dataclass(frozen=True)
class Files:
    path: str


CHOICES = {"clip": Clip, "gate": Gate}
SOURCES = {"clip": Clip, "files": Files}


@dataclasses.dataclass(frozen=True)
class Extra:
    coefficient: PositiveFloat = 0.05


@dataclasses.dataclass(frozen=True)
class Section:
    objective: Annotated[Clip | Gate, Choice(f"{__name__}:CHOICES")]  # how it moves
    source: Annotated[object, Choice(f"{__name__}:SOURCES", otherwise="files:path")]
    extra: Extra | None = None
    correction: Annotated[Clip | Gate, Choice(f"{__name__}:CHOICES")] | None = None


RAW = {"objective": {"name": "clip", "low": 0.1, "high": 0.3}, "source": "data/x"}


def _changed(*changes: tuple[str, str]) -> Section:
    raw = dict(RAW)
    for path, text in sorted(changes, key=lambda change: change[0].removesuffix(".name").count(".")):
        raw = overrides._set(Kind(Section, False, None, None), raw, path.split("."), text, "config")
    return build(Section, raw, "config")


def test_a_choice_is_its_class_with_its_constants_and_comes_back_with_its_name():
    section = build(Section, RAW, "config")
    assert section == Section(Clip(0.1, 0.3), Files("data/x"))
    assert to_dict(section) == RAW | {"source": {"name": "files", "path": "data/x"}, "extra": None, "correction": None}
    assert build(Section, to_dict(section), "config") == section


@pytest.mark.parametrize(
    ("changes", "field", "value"),
    [
        ([("objective", "gate")], "objective", Gate(1.0)),
        ([("objective.name", "gate")], "objective", Gate(1.0)),
        ([("objective.tau", "2"), ("objective", "gate")], "objective", Gate(2.0)),  # names count first
        ([("objective", "clip")], "objective", Clip(0.1, 0.3)),  # the recipe's own stays as it is
        ([("objective.low", "0")], "objective", Clip(0.0, 0.3)),
        ([("extra", "on")], "extra", Extra(0.05)),
        ([("extra.coefficient", "1")], "extra", Extra(1.0)),
        ([("extra.coefficient", "1"), ("extra", "none")], "extra", Extra(1.0)),
        ([("correction", "gate"), ("correction.tau", "3")], "correction", Gate(3.0)),
        ([("correction", "none")], "correction", None),
        ([("source", "clip")], "source", Clip()),
        ([("source", "/data/clip.jsonl")], "source", Files("/data/clip.jsonl")),
        ([("source", "tasks.jsonl")], "source", Files("tasks.jsonl")),
    ],
)
def test_a_command_line_chooses_by_name_and_opens_and_closes_sections(changes, field, value):
    assert getattr(_changed(*changes), field) == value


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ([("objective", "gait")], "config.objective has no choice 'gait'. Did you mean 'gate'?"),
        ([("objective.tau", "2")], "Unknown config field 'config.objective.tau'."),  # of the other entry
        ([("objective", "gate"), ("objective.low", "0")], "Unknown config field 'config.objective.low'."),
        ([("objective", "gate"), ("objective.tau", "0")], "config.objective.tau must be more than 0, got 0.0."),
        ([("correction.tau", "1")], "config.correction is off: name a choice first, --config.correction=clip."),
        ([("extra", "5")], "'config.extra' is a section: set one of its fields, coefficient."),
        ([("objective.low", "much")], "config.objective.low must be float, got 'much'."),
        ([("objective.low.x", "1")], "'config.objective.low' is a value: it has no field 'x'."),
        ([("objective", "no_such_module:Mine")], "Python finds no module 'no_such_module'."),
        ([("objective", "mine:Nothing")], "has no attribute 'Nothing'"),
        ([("objective", "mine:function")], "must be a dataclass"),
    ],
)
def test_what_is_wrong_is_named(monkeypatch, changes, message):
    monkeypatch.setitem(sys.modules, "mine", types.SimpleNamespace(function=len))
    with pytest.raises(ConfigError) as error:
        _changed(*changes)
    assert message in str(error.value)


def test_an_entry_of_the_users_own_is_named_by_its_path(monkeypatch):
    own = dataclasses.make_dataclass("Mine", [("k", int, 4)], frozen=True)
    own.__module__ = "mine"
    monkeypatch.setitem(sys.modules, "mine", types.SimpleNamespace(Mine=own))
    section = _changed(("objective", "mine:Mine"), ("objective.k", "7"))
    assert section.objective == own(7)
    assert to_dict(section)["objective"] == {"name": "mine:Mine", "k": 7}


def test_a_choice_that_takes_another_s_place_keeps_sections_that_both_have_and_no_constants(monkeypatch):
    for name in ("one", "two"):
        fields = [("extra", Extra, Extra()), ("k", int, 1)]
        monkeypatch.setitem(CHOICES, name, dataclasses.make_dataclass(name, fields, frozen=True))
    raw = RAW | {"objective": {"name": "one", "extra": {"coefficient": 0.5}, "k": 7}}
    for name, kept in (("two", {"extra": {"coefficient": 0.5}}), ("clip", {})):
        changed = overrides._set(Kind(Section, False, None, None), raw, ["objective"], name, "config")
        assert changed["objective"] == {"name": name, **kept}


def test_a_bare_word_is_a_path_where_there_is_one(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"config.source has no choice 'clips'. Did you mean 'clip'"):
        _changed(("source", "clips"))
    (tmp_path / "clips").mkdir()
    assert _changed(("source", "clips")).source == Files("clips")


def test_help_lists_choices_with_their_fields():
    listed = {(field.path, field.of): field for field in flags.fields(Section)}
    assert (
        listed["config.objective", ""].kind == "clip|gate" and listed["config.objective", ""].meaning == "how it moves"
    )
    assert listed["config.objective.tau", "gate"].meaning == "how fast it closes"
    assert listed["config.correction", ""].kind == "none|clip|gate"
    assert listed["config.extra", ""].kind == "none|on"
    assert kind(hints(Section)["correction"]).optional

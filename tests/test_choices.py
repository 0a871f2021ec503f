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
        ([("extra", "on"), ("extra.coefficient", "1")], "extra", Extra(1.0)),
        ([("extra.coefficient", "1"), ("extra", "on")], "extra", Extra(1.0)),
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
        (
            [("extra", "5")],
            "'config.extra' is a section: say --config.extra=on for its defaults, or set one of its fields, coeff",
        ),
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


BROKEN = {
    "import sys; sys.exit(3)": "SystemExit: 3 (",
    "def f():\n    class Mine: pass\n    return dataclass(frozen=True)(Mine)\nMine = f()": "at the top of its module",
    "@dataclass(frozen=True)\nclass Mine:\n    x: 'Nothing' = 3": "the type of a field: NameError: name 'Noth",
    "@dataclass(frozen=True)\nclass Mine:\n    x: Any = 3": "its field 'x' must be bool, int, float, str",
    "@dataclass(frozen=True)\nclass Mine:\n    x: list[int] = field(default_factory=list)": "must be bool, int",
    "@dataclass(frozen=True)\nclass Mine:\n    x: int | str = 3": "must be bool, int, float, str",
    "@dataclass(frozen=True)\nclass Mine:\n    x: tuple[int, str] = (1, 'a')": "must be bool, int, float, str",
    "@dataclass(frozen=True)\nclass Mine:\n    x: float = None": "config.objective.x must be float, got NoneType",
    "@dataclass(frozen=True)\nclass Mine:\n    x: PositiveInt = 0": "config.objective.x must be at least 1",
    "@dataclass(frozen=True)\nclass Mine:\n    name: str = 'me'": "has a field 'name', which a config",
    "@dataclass(frozen=True)\nclass Mine:\n    x: int = field(default=1, init=False)": "'x': it has init=False.",
    "@dataclass(frozen=True)\nclass Mine:\n    x: InitVar[int]": "config.objective: Mine: TypeError: ",
    "@dataclass(frozen=True)\nclass Mine:\n    __hash__ = None": "must be hashable",
    "@dataclass\nclass Sub: pass\n@dataclass(frozen=True)\nclass Mine:\n    x: Sub = field(default_factory=Sub)": (
        "field 'x': Sub must be hashable, a dataclass(frozen=True)."
    ),
}  # fmt: skip


@pytest.mark.parametrize("number", range(len(BROKEN)))
def test_a_class_that_a_config_cannot_hold_is_refused(tmp_path, monkeypatch, number):
    code, message = list(BROKEN.items())[number]
    head = "from dataclasses import InitVar, dataclass, field\nfrom typing import Any\n"
    head += "from jaxagent.config.ranges import PositiveInt\n"
    (tmp_path / f"broken_{number}.py").write_text(head + code)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError) as error:
        _changed(("objective", f"broken_{number}:Mine"))
    assert message in str(error.value)


def test_what_fields_of_ones_own_can_be(tmp_path, monkeypatch):
    (tmp_path / "able.py").write_text(
        "from dataclasses import dataclass\nfrom typing import Literal\n"
        "@dataclass(frozen=True)\nclass Sub:\n    y: int = 1\n"
        "class Outer:\n    @dataclass(frozen=True)\n    class Mine:\n        a: float | None = None\n"
        "        b: tuple[int, ...] = (1,)\n        c: Literal['x', 'y'] = 'x'\n        d: Sub = Sub()\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    name = "able:Outer.Mine"
    section = _changed(("objective", name), ("objective.b", "2,3"), ("objective.d.y", "4"), ("objective.a", "5"))
    assert to_dict(section)["objective"] == {"name": name, "a": 5.0, "b": (2, 3), "c": "x", "d": {"y": 4}}
    assert build(Section, to_dict(section), "config") == section


def test_a_bare_word_is_a_path_where_there_is_one(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"no choice 'clips', and 'clips' is no file or folder. Did you mean 'clip'"):
        _changed(("source", "clips"))
    (tmp_path / "clips").mkdir()
    assert _changed(("source", "clips")).source == Files("clips")


@dataclasses.dataclass(frozen=True)
class Learnt:
    extra: Extra = Extra(0.5)
    k: int = 1


@dataclasses.dataclass(frozen=True)
class LearntToo:
    extra: Extra = Extra()
    k: int = 1


@dataclasses.dataclass(frozen=True)
class LearntOtherwise:
    extra: Gate = Gate()


def test_of_another_choice_a_section_remains_where_it_is_the_same_section_and_no_constant(monkeypatch):
    for entry in (Learnt, LearntToo, LearntOtherwise):
        monkeypatch.setitem(CHOICES, entry.__name__, entry)
    learnt = (("objective.extra.coefficient", "3"), ("objective.k", "7"))
    old = to_dict(_changed(("objective", "Learnt"), *learnt))["objective"]
    wanted = kind(hints(Section)["objective"])
    for name, kept in (("LearntToo", {"extra": {"coefficient": 3.0}}), ("LearntOtherwise", {}), ("clip", {})):
        assert overrides._replaced(wanted, old, name, "config") == {"name": name, **kept}


def test_help_lists_choices_with_their_fields():
    listed = {(field.path, field.of): field for field in flags.fields(Section)}
    assert (
        listed["config.objective", ""].kind == "clip|gate" and listed["config.objective", ""].meaning == "how it moves"
    )
    assert listed["config.objective.tau", "gate"].meaning == "how fast it closes"
    assert listed["config.correction", ""].kind == "none|clip|gate"
    assert listed["config.extra", ""].kind == "none|on"
    assert kind(hints(Section)["correction"]).optional


def test_choices_and_sections_of_a_recipe_on_the_command_line():
    def rl(preset: str, *changes: str):
        return flags.parse_argv(
            ["main", f"--config=search_r1:{preset}", *(f"--config.rl.{c}" for c in changes)]
        ).config.rl

    assert rl("laptop", "objective.tau_positive=2", "objective=sapo").objective.tau_positive == 2  # names count first
    assert (
        type(rl("laptop", "objective=none", "positive_nll=on").objective).__name__ == "NoObjective"
    )  # a name, not off
    assert rl("laptop-echo", "echo=on").echo.max_tokens == 32  # the recipe's own stays as it is
    optimizer = rl("laptop", "advantage=gae", "advantage.critic.optimizer.learning_rate=0.5").critic.optimizer
    assert (optimizer.learning_rate, optimizer.warmup_steps) == (0.5, 15)  # the rest is the published one


def test_a_source_of_ones_own_is_no_path_and_must_be_a_source(tmp_path, monkeypatch):
    code = "import dataclasses\n@dataclasses.dataclass(frozen=True)\nclass Mine: pass\n"
    (tmp_path / "my_source.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match=r"config.data.source='my_source:Mine' must extend .*SourceConfig"):
        flags.parse_argv(["main", "--config=search_r1", "--config.data.source=my_source:Mine"])

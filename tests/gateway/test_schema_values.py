"""Arguments of any JSON schema that pydantic writes come back from every family's text as they were."""

import enum
import json
import typing
import warnings

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jaxagent.tools import FAMILIES
from jaxagent.tools.calls import Call, Tool

pydantic = pytest.importorskip("pydantic", reason="pydantic is not installed")


class Colour(enum.Enum):
    """Names and numbers that a field may be."""

    RED, BLUE, NINE = "red", "dark blue", 9


def ambiguous(text):
    """Whether a text is written as something else is, so that a field that may be both cannot be told apart."""
    try:
        json.loads(text.strip())
    except ValueError:
        return text.strip().lower() in ("none", "null", "true", "false", "red", "dark blue", "9")
    return True


WORDS = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
PLAIN = [
    (str, WORDS),
    (int, st.integers()),
    (float, st.floats(allow_nan=False, allow_infinity=False)),
    (bool, st.booleans()),
    (Colour, st.sampled_from(Colour)),
    (typing.Literal["a", "b c", 3, True], st.sampled_from(["a", "b c", 3, True])),
    (typing.Literal["only"], st.just("only")),
    (dict[str, int], st.dictionaries(WORDS, st.integers(), max_size=2)),
    (typing.Any, st.integers() | st.lists(st.booleans(), max_size=2) | WORDS.filter(lambda one: not ambiguous(one))),
]


@st.composite
def typed(draw, depth=2):
    """(a type as pydantic takes it, values of it)."""
    kind = draw(st.integers(0, 5 if depth else 2))
    if kind <= 2:
        return draw(st.sampled_from(PLAIN))
    if kind == 3:
        of, values = draw(typed(depth=depth - 1))
        return list[of], st.lists(values, max_size=3)
    if kind == 4:  # a union of two, or of one with nothing
        one, other = draw(typed(depth=depth - 1)), draw(st.just((None, st.none())) | st.sampled_from(PLAIN))
        values = one[1] | other[1]
        return one[0] | other[0] if one[0] is not typing.Any else one[0], values.filter(
            lambda value: not (isinstance(value, str) and ambiguous(value))
        )
    model = draw(models(depth=depth - 1))
    about = pydantic.Field(description="it")  # beside "$ref", or around it as "allOf"
    return typing.Annotated[model[0], about], model[1]


@st.composite
def models(draw, depth=2):
    """(a pydantic model, instances of it)."""
    fields = draw(st.dictionaries(st.sampled_from("abcd"), typed(depth=depth), min_size=1, max_size=3))
    name = f"Model{draw(st.integers(0, 10**9))}"
    made = pydantic.create_model(name, **{key: (of, ...) for key, (of, _) in fields.items()})
    return made, st.builds(made.model_construct, **{key: values for key, (_, values) in fields.items()})


@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_values_of_any_schema_come_back_equal(family, data):
    """Schemas as pydantic writes them ($ref, anyOf, enum, const, allOf), values as the family's models write them."""
    model, values = data.draw(models())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the instances were not validated
        arguments = data.draw(values).model_dump(mode="json")
    schema = model.model_json_schema()
    if data.draw(st.booleans()):  # as pydantic 1 and OpenAPI write a reference that has a description
        schema = json.loads(json.dumps(schema), object_hook=_all_of)
    parser = family([Tool("f", "", schema)])
    said = parser.feed(family.write("", [Call("f", arguments)])) + parser.end()
    assert said == [Call("f", arguments)], schema
    assert json.dumps(said[0].arguments) == json.dumps(arguments)  # 1 is not True


def _all_of(node):
    return {**node, "allOf": [{"$ref": node.pop("$ref")}]} if "$ref" in node else node

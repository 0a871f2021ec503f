"""Arguments of any JSON schema that pydantic writes come back from every family's text as they were."""

import enum
import json
import time
import typing
import warnings

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jaxagent.tools import FAMILIES
from jaxagent.tools.calls import Call, Tool
from jaxagent.tools.qwen3_coder import Qwen3Coder

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
    (typing.Any, WORDS),
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
        if typing.Any in (one[0], other[0]):  # what names no type is a text
            return typing.Any, WORDS
        values = one[1] | other[1]
        return one[0] | other[0], values.filter(lambda value: not (isinstance(value, str) and ambiguous(value)))
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


WRONG = [
    {"type": 5},
    {"type": None},
    {"type": [["string"]]},
    {"enum": 5},
    {"enum": {"a": 1}},
    {"anyOf": 5},
    {"allOf": 5},
]
WRONG += [{"oneOf": "ab"}, {"$ref": 5}, {"$ref": "#/$defs/number"}, {"$ref": "#/$defs/nowhere"}, 5, [], "text"]
UNTYPED = [{}, {"description": "what to write"}, True, None, {"anyOf": [{"title": "one"}, {"type": "integer"}]}]


@pytest.mark.parametrize("schema", [*WRONG, *UNTYPED], ids=str)
@pytest.mark.parametrize("text", ["123", "true", '{"a": 1}', "a word"])
def test_what_names_no_type_is_a_text(schema, text):
    root = {"properties": {"x": schema}, "$defs": {"number": 5}}
    body = f"<tool_call>\n<function=f>\n<parameter=x>\n{text}\n</parameter>\n</function>\n</tool_call>"
    assert Qwen3Coder([Tool("f", "", root)]).feed(body) == [Call("f", {"x": text})]
    assert Qwen3Coder([Tool("f", "", {"$ref": "#/$defs/number", **root})]).feed(body) == [Call("f", {"x": text})]


@pytest.mark.parametrize("key", ["anyOf", "oneOf", "allOf"])
def test_a_schema_that_refers_to_itself_is_read_in_linear_time(key):
    """The chain has 4 ** 14 paths, the other no end."""
    chain = {f"A{i}": {key: [{"$ref": f"#/$defs/A{i + 1}"} for _ in range(4)]} for i in range(14)}
    chain |= {"A14": {"type": "integer"}, "itself": {key: [{"$ref": "#/$defs/itself"} for _ in range(4)]}}
    began = time.process_time()  # and not the clock, which goes on while others compute
    for first, value in (("itself", "7"), ("A0", 7)):
        root = {"properties": {"x": {"$ref": f"#/$defs/{first}"}}, "$defs": chain}
        body = "<tool_call><function=f><parameter=x>7</parameter></function></tool_call>"
        assert Qwen3Coder([Tool("f", "", root)]).feed(body) == [Call("f", {"x": value})]
    assert time.process_time() - began < 5.0

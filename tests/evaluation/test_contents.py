"""A folder of attempts and what their environment has read: the same goes on, another is refused, unsaid is told."""

import json

import pytest

from jaxagent.config import ConfigError
from jaxagent.runs.evaluation.run import begin


def record(**contents):
    return {"evaluated": {"seed": 1} | ({"contents": contents} if contents else {}), "results": None}


def stored(out):
    return json.loads((out / "evaluation.json").read_text())["evaluated"]


def test_another_content_is_refused_and_named(tmp_path):
    notes = []
    assert begin(tmp_path, record(documents="a"), notes.append) == record(documents="a")["evaluated"]
    assert (
        begin(tmp_path, record(documents="a"), notes.append) == stored(tmp_path) == record(documents="a")["evaluated"]
    )
    with pytest.raises(ConfigError, match=r"holds attempts with contents\.documents = 'a', here it is 'b'"):
        begin(tmp_path, record(documents="b"), notes.append)
    with pytest.raises(ConfigError, match=r"with contents = \{'documents': 'a'\}, here it is None"):
        begin(tmp_path, record(), notes.append)
    assert not notes


def test_a_folder_of_an_earlier_version_goes_on_is_told_and_never_claims_what_it_does_not_know(tmp_path):
    notes = []
    begin(tmp_path, record(), notes.append)
    for _ in range(2):
        assert begin(tmp_path, record(documents="a", shop="b"), notes.append) == {"seed": 1} == stored(tmp_path)
    told = f"'{tmp_path}' does not say with which documents, shop its attempts were made: that is not compared"
    assert notes == [told, told]
    with pytest.raises(ConfigError, match="seed = 1, here it is 2"):
        begin(tmp_path, {"evaluated": {"seed": 2, "contents": {"documents": "a"}}}, notes.append)


def test_an_environment_that_reads_nothing_else_says_nothing(tmp_path):
    notes = []
    for _ in range(2):
        assert begin(tmp_path, record(), notes.append) == {"seed": 1}
    assert not notes and stored(tmp_path) == {"seed": 1}

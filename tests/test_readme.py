"""The first page is short, and its Python is that of a page which a test runs (gateway/test_bring_your_agent.py).

What stands beside it names the version and the licence of the package.
"""

import re

import pytest

from jaxagent import __version__
from tests.tiny_run import ROOT


def test_the_first_page_is_short_and_its_agent_is_the_one_that_is_tested():
    page = (ROOT / "README.md").read_text(encoding="utf-8")
    (agent,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    assert agent in (ROOT / "docs/bring_your_agent.md").read_text(encoding="utf-8")
    assert len(page.splitlines()) <= 100 and max(map(len, page.splitlines())) <= 140


def test_the_citation_is_one_of_this_version():
    """What the format's schema (1.2.0) asks for; cffconvert itself wants another jsonschema than the tests."""
    yaml = pytest.importorskip("yaml")
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    known = "abstract authors cff-version commit contact date-released doi identifiers keywords license license-url "
    known += (
        "message preferred-citation references repository repository-artifact repository-code title type url version"
    )
    assert {"cff-version", "message", "title", "authors"} <= set(cited) <= set(known.split())
    assert (cited["cff-version"], str(cited["version"]), cited["type"]) == ("1.2.0", __version__, "software")
    assert all(isinstance(cited[key], str) for key in ("message", "title", "abstract", "license"))
    assert all(set(author) <= {"name", "given-names", "family-names", "orcid"} for author in cited["authors"])
    assert f'license="{cited["license"]}"' in (ROOT / "setup.py").read_text(encoding="utf-8")


def test_the_newest_changes_stand_first():
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    days = re.findall(r"^## (\d{4}-\d\d-\d\d)", text, re.MULTILINE)
    assert days == sorted(days, reverse=True) and len(days) > 4 and __version__ in text

"""The first page is short, and its Python is that of a page which a test runs (gateway/test_bring_your_agent.py)."""

import re

from tests.tiny_run import ROOT


def test_the_first_page_is_short_and_its_agent_is_the_one_that_is_tested():
    page = (ROOT / "README.md").read_text(encoding="utf-8")
    (agent,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    assert agent in (ROOT / "docs/bring_your_agent.md").read_text(encoding="utf-8")
    assert len(page.splitlines()) <= 100 and max(map(len, page.splitlines())) <= 140

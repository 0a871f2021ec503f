"""docs/gateway.md names a test for every rule, and the tests exist; the routes that it names are served."""

import pathlib
import re

from jaxagent.gateway import server
from tests.gateway import world

ROOT = pathlib.Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs/gateway.md").read_text("utf-8")


def test_every_test_that_the_page_names_exists():
    written = "".join(path.read_text("utf-8") for path in (ROOT / "tests/gateway").glob("test_*.py"))
    named = set(re.findall(r"`(test_\w+)`", PAGE))
    assert len(named) >= 15
    assert [name for name in sorted(named) if f"def {name}(" not in written] == []
    rules = PAGE.split("| what the program does |")[1].split("\n\n")[0].splitlines()[2:]
    assert len(rules) >= 15 and all("test" in line.split("|")[-2] for line in rules)
    for path in re.findall(r"`(?:tests/gateway/)?(test_\w+\.py)`", PAGE):
        assert (ROOT / "tests/gateway" / path).is_file()


def test_every_route_that_the_page_names_is_served():
    named = set(re.findall(r"`(?:GET|POST|DELETE) (/[\w/]+)", PAGE))
    gateway = server.Gateway(make=world.session, admin_token="x")
    served = {resource.canonical.split("{")[0].rstrip("/") for resource in gateway.app().router.resources()}
    engines = {"/v1/score", "/v1/tokenizer"}
    missing = [path for path in sorted(named - engines) if not any(path.startswith(one) for one in served if one)]
    assert missing == [] and {"/v1/chat/completions", "/v1/responses", "/v1/messages"} <= served

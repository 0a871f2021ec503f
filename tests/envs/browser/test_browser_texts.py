"""How actions are read and pages are written, without a browser."""

import dataclasses

import pytest

from jaxagent.config import ConfigError
from jaxagent.config.parse import build
from jaxagent.envs.browser import tree
from jaxagent.envs.browser.actions import Action, read
from jaxagent.envs.browser.environment import Browser
from jaxagent.envs.browser.miniwob import MiniWob
from jaxagent.envs.browser.page import form_of
from jaxagent.envs.browser.tree import Element


@pytest.mark.parametrize(
    ("reply", "action"),
    [
        ("<action>click 3</action>", Action("click", 3)),
        ("<action> CLICK [3] </action>", Action("click", 3)),
        ("I go.\n<action>click 1</action><action>click 2</action>", Action("click", 2)),
        ("I think.\n\nclick 3\n", Action("click", 3)),
        ("<action>type 2 red mug</action>", Action("type", 2, "red mug")),
        ('<action>type [2] "it\'s"</action>', Action("type", 2, "it's")),
        ("<action>type 2 'a'b'</action>", Action("type", 2, "a'b")),
        ("<action>type 2</action>", Action("type", 2)),
        ("<action>type 2 two\nlines</action>", Action("type", 2, "two\nlines")),
        ("<action>select 4 Extra large</action>", Action("select", 4, "Extra large")),
        ("<action>scroll Down</action>", Action("scroll", 0, "down")),
        ("<action>press ENTER</action>", Action("press", 0, "Enter")),
        ("<action>back</action>", Action("back")),
        ("<action>answer 42 mugs</action>", Action("answer", 0, "42 mugs")),
        ("<action>answer <action></action>", Action("answer", 0, "<action>")),
    ],
)
def test_actions_are_read(reply, action):
    assert read(reply) == (action, "")


@pytest.mark.parametrize(
    ("reply", "words"),
    [
        ("", "there is none"),
        ("<action></action>", "there is none"),
        ("<action>jump</action>", "'jump' is none"),
        ("<action>click</action>", "behind click stands NUMBER"),
        ("<action>click 3 times</action>", "behind click stands NUMBER"),
        ("<action>click 3.5</action>", "behind click stands NUMBER"),
        ("<action>click 99999999</action>", "behind click stands NUMBER"),
        ("<action>select 4</action>", "behind select stands NUMBER OPTION"),
        ("<action>press F5</action>", "behind press stands KEY, which is enter, tab"),
        ("<action>back 2</action>", "behind back stands nothing"),
        ("<action>answer</action>", "behind answer stands TEXT"),
        ("<action>type 1 " + "x" * 2_001 + "</action>", "at most 2000 characters"),
        ("<action>type 1 a\x1bb</action>", "none that cannot be seen"),
        ("<action>" * 100_000, "is none"),
    ],
)
def test_what_is_no_action_is_said(reply, words):
    action, why = read(reply)
    assert action is None and words in why and len(why) < 200


def test_a_page_is_written():
    elements = [
        Element("heading", "Red\n  mug"),
        Element("combobox", "Size", True, "S", ("S", "M")),
        Element("checkbox", "Gift", True, states=("checked", "disabled")),
        Element("text", "one\u202etwo"),
        Element("listbox", "", True, "", tuple(map(str, range(60)))),
    ]
    text, numbered = tree.page_text("Shop", "/a?b=1", elements, above=1, below=2)
    *lines, options, below = text.split("\n")
    assert lines == [
        'page "Shop" at /a?b=1',
        "... 1 more element above: scroll up",
        'heading "Red mug"',
        '[1] combobox "Size" = "S" of "S", "M"',
        '[2] checkbox "Gift" (checked, disabled)',
        'text "onetwo"',
    ]
    assert options.startswith('[3] listbox = "" of "0", "1"') and options.endswith('"49" and 10 more')
    assert below == "... 2 more elements below: scroll down" and numbered == [1, 2, 4]
    assert tree.find(text, "checkbox", "Gift") == 2 and tree.find(text, "listbox") == 3
    assert tree.find(text, "checkbox", "Gif") == 0 and tree.find(text, "combobox", nth=1) == 0
    cut, numbered = tree.page_text("Shop", "/", elements, left=3, most_elements=2)
    assert cut.endswith("... 6 more elements here, left out") and numbered == [1]


def test_no_character_of_a_page_is_ours():
    every = "".join(map(chr, range(0x3000))) + '"<>\u2028\u2029\ufeff\U000e0041\U0001f600'
    seen = tree.clean(every, len(every))
    assert not set('"<>\n\r\x00\u202e\u2028\ufeff\U000e0041') & set(seen) and "\U0001f600" in seen
    assert seen.isprintable() and tree.clean("a" * 300) == "a" * 199 + "…"


@pytest.mark.parametrize(
    ("request_", "read_"),
    [
        ({"method": "GET", "url": "http://s.test/a%20b?q=x+y&q=z&e="}, ("GET", "/a b", {"q": "z", "e": ""})),
        ({"method": "GET", "url": "http://s.test"}, ("GET", "/", {})),
        (
            {"method": "POST", "url": "http://s.test/p?a=1", "hasPostData": True,
             "postDataEntries": [{"bytes": "Yj0y"}], "headers": {"Content-Type": "application/x-www-form-urlencoded"}},
            ("POST", "/p", {"a": "1", "b": "2"}),
        ),
        (
            {"method": "PUT", "url": "http://s.test/p", "hasPostData": True,
             "postDataEntries": [{"bytes": "e30="}], "headers": {"content-type": "application/json"}},
            ("PUT", "/p", {"": "{}"}),
        ),
    ],
)  # fmt: skip
def test_requests_are_read(request_, read_):
    assert form_of(request_) == read_


@dataclasses.dataclass(frozen=True)
class OwnSite:
    size: int = 3


def test_a_site_of_ones_own_is_named_by_its_path():
    own = build(Browser, {"site": {"name": f"{__name__}:OwnSite"}}, "env")
    assert type(own.site).__name__ == "OwnSite" and type(build(Browser, {"site": "miniwob"}, "env").site) is MiniWob
    with pytest.raises(ConfigError, match=r"env\.site"):
        build(Browser, {"site": "no_such_site"}, "env")

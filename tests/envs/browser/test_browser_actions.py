"""What actions do to a page in a real Chromium, and what the policy is shown."""

import asyncio
import base64

import pytest

from jaxagent.envs.browser.sites import Response
from jaxagent.types import StopReason
from tests.envs.browser.playing import FAST, Play

FORM = """<title>Shop</title><h1>Order</h1>
<form action=/order method=post>
<label>Name <input name=name></label>
<label for=size>Size</label><select id=size name=size><option>S<option>M<option disabled>L</select>
<label><input type=checkbox name=gift> As a gift</label>
<input type=hidden name=secret value=1>
<button>Buy</button></form><a href=/help>Help</a>"""


def test_a_form_is_filled_and_sent(browsers):
    pages = {
        "/": FORM,
        "/order": lambda method, form: Response(status=303, location="/thanks"),
        "/thanks": "<title>Thanks</title><p>Thank you.</p>",
    }
    with Play(browsers, pages) as play:
        assert play.first == (
            'page "Shop" at /\nheading "Order"\n[1] textbox "Name"\n[2] combobox "Size" = "S" of "S", "M", "L"\n'
            '[3] checkbox "As a gift"\n[4] button "Buy"\n[5] link "Help"'
        )
        assert '[1] textbox "Name" = "Ada L."' in play.act("type 1 Ada L.")
        assert '[1] textbox "Name" = "Bob"' in play.act('type [1] "Bob"')
        assert '"Size" = "M" of' in play.act("select 2 m")
        assert '"As a gift" (checked)' in play.act("click 3")
        assert play.act("click 4") == 'page "Thanks" at /thanks\ntext "Thank you."'
        asked = [one for one in play.asked if one[1] != "/favicon.ico"]  # of a whole Chromium
        assert asked[1] == ("POST", "/order", {"name": "Bob", "size": "M", "gift": "on", "secret": "1"})
        assert asked[2] == ("GET", "/thanks", {}) and play.refused == 0
        assert 'page "Shop" at /' in play.act("back")
        assert play.act("answer right") == StopReason.ANSWER
        assert play.run(play.attempt.verify(None)).reward == 1.0


@pytest.mark.parametrize(
    ("action", "words"),
    [
        ("dance", "No action: 'dance' is none. Write <action>...</action> with one of: click NUMBER"),
        ("", "No action: there is none. Write"),
        ("click", "behind click stands NUMBER"),
        ("click 9", "No action: there is no element 9."),
        ("click 0", "there is no element 0"),
        ("type 4 x", "element 4 is no field to type into"),
        ("type 2 x", "element 2 is no field to type into"),
        ("select 1 x", "element 1 is no list to select from"),
        ("select 2 XL", "element 2 has no such option"),
        ("select 2 L", "that option, which is disabled"),
        ("click 2", "element 2 is a list: select an option of it"),
        ("press F5", "behind press stands KEY, which is enter"),
        ("back", "there is no page to go back to"),
        ("scroll down", "does not scroll further down"),
        ("click 4 now", "behind click stands NUMBER"),
    ],
)
def test_what_cannot_be_done_is_answered_by_a_warning(browsers, filled, action, words):
    shown = filled.act(action)
    assert words in shown and "\n" not in shown
    assert filled.attempt.counters["actions"] == 0


@pytest.fixture(scope="module")
def filled(browsers):
    with Play(browsers, FORM, max_turns=100) as play:
        yield play


def test_a_turn_is_lost_by_a_malformed_action(browsers):
    with Play(browsers, FORM, max_turns=2) as play:
        assert "No action" in play.act("dance")
        assert play.act("dance") == StopReason.TURN_LIMIT
        assert play.attempt.counters["invalid_actions"] == 2


def test_a_long_page_is_scrolled_and_what_is_left_out_is_counted(browsers):
    page = "".join(f"<button style='display:block;height:100px'>B{i}</button>" for i in range(30))
    with Play(browsers, page, height=500, elements=3) as play:
        assert play.first.split("\n")[1:] == [
            '[1] button "B0"',
            '[2] button "B1"',
            '[3] button "B2"',
            "... 2 more elements here, left out",
            "... 25 more elements below: scroll down",
        ]
        shown = play.act("scroll down").split("\n")
        assert shown[1] == "... 3 more elements above: scroll up" and shown[2] == '[1] button "B3"'
        assert '"B0"' in play.act("scroll up")
    with Play(browsers, page, height=500, chars=40) as play:
        assert play.first.endswith("... 4 more elements here, left out\n... 25 more elements below: scroll down")


def test_keys_and_listeners_of_the_page_are_reached(browsers):
    page = """<input aria-label=Find onkeydown="if (event.key == 'Enter') document.title = this.value">
    <div id=menu>Open me</div><span>plain</span>
    <script>menu.addEventListener('click', e => menu.textContent = e.isTrusted ? 'Opened' : 'Faked')</script>"""
    with Play(browsers, page) as play:
        assert play.first.split("\n")[1:] == ['[1] textbox "Find"', '[2] text "Open me"', 'text "plain"']
        play.act("type 1 red mug")
        assert 'page "red mug"' in play.act("press enter")
        assert '[2] text "Opened"' in play.act("click 2")


def test_fields_of_every_kind(browsers):
    page = """<input type=password aria-label=Secret value=hidden><input type=file aria-label=Upload>
    <input type=date aria-label=Day><input type=range aria-label=Loud min=0 max=10>
    <div contenteditable aria-label=Note></div><textarea aria-label=More readonly>fixed</textarea>
    <button disabled>Off</button>"""
    with Play(browsers, page) as play:
        assert play.first.split("\n")[1:] == [
            '[1] password "Secret" = "••••••"',
            '[2] file "Upload"',
            '[3] date "Day"',
            '[4] slider "Loud" = "5"',
            '[5] textbox "Note"',
            '[6] textbox "More" = "fixed" (read-only)',
            '[7] button "Off" (disabled)',
        ]
        assert '"Secret" = "•••"' in play.act("type 1 new")
        assert "element 2 takes a file, and there is none" in play.act("click 2")
        assert "takes a value such as 2024-12-31" in play.act("type 3 tomorrow")
        assert '"Day" = "2025-02-03"' in play.act("type 3 2025-02-03")
        assert '"Loud" = "7"' in play.act("type 4 7")
        assert '"Note" = "hello"' in play.act("type 5 hello")
        assert "is read-only" in play.act("type 6 x")
        assert "is disabled" in play.act("click 7")
        assert play.js("document.querySelector('[type=password]').value") == "new"


def test_the_same_actions_are_answered_the_same(browsers):
    page = """<p id=out></p><button onclick="tell()">Tell</button><script>
    const tell = () => { out.textContent = [Math.random(), Date.now(), new Date().toISOString(), performance.now(),
      crypto.getRandomValues(new Uint8Array(4)), Intl.DateTimeFormat().resolvedOptions().timeZone, navigator.language,
      innerWidth].join(' '); };
    setInterval(() => document.title = performance.now(), 70); setTimeout(tell, 500);
    const found = document.body.appendChild(document.createElement('p'));
    const get = async i => (await fetch('/n?i=' + i)).text();
    const ask = async () => { for (let i = 0; i < 3; i++) found.textContent += await get(i); };
    const xhr = () => { const x = new XMLHttpRequest(); x.onload = () => found.append(x.responseText);
      x.open('GET', '/n?i=x'); x.send(); };
    const add = () => { const one = document.createElement('script'); one.src = '/code'; document.body.append(one);
      const two = document.createElement('iframe'); two.src = '/frame'; document.body.append(two); };
    const all = () => { setTimeout(ask, 300); setTimeout(xhr, 600); add(); };
    document.querySelector('button').addEventListener('click', all);
    </script>
    <iframe srcdoc="<script>setTimeout(() => document.body.append(Math.random()), 400)</script>"></iframe>"""
    pages = {
        "/": page,
        "/n": lambda method, form: Response(f"n{form['i']} ", content_type="text/plain"),
        "/code": Response("found.append('code ')", content_type="text/javascript"),
        "/frame": "<button>Framed</button><script>fetch('/n?i=f')</script>",
    }

    def played(seed):
        with Play(browsers, pages, seed=seed) as play:
            return [play.first, play.act("click 1"), play.act("click 1")]

    first = played(1)
    assert first == played(1) and first != played(2)
    assert "2024-01-01T12:00:01" in first[1] and "UTC en-US 1280" in first[1]
    assert len(set(first)) == 3  # the clock goes and chance goes on
    assert "code n0 n1 n2 nx" in first[1] and "nx code n0 n1 n2 nx" in first[2] and first[0].count("0.") >= 2
    assert first[1].count("Framed") == 1 and first[2].count("Framed") == 2


PICTURE_TEXT = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAQAAAC1HAwCAAAAC0lEQVR42mNkYAAAAAYAAjCB0C8AAAAASUVORK5CYII="
PICTURE = base64.b64decode(PICTURE_TEXT)


@pytest.mark.parametrize("kind", ["content", "picture", "lazy", "here", "sheet", "frame"])
def test_what_a_page_shows_waits_for_its_pictures_and_sheets(browsers, kind):
    """A click begets an element that has no size, or another one, until the site has answered."""
    made = {
        "content": "made.className = 'star'",
        "picture": "made = document.createElement('img'); made.src = '/p.png'; made.alt = 'star'",
        "lazy": "made = document.createElement('img'); made.loading = 'lazy'; made.src = '/p.png'; made.alt = 'star'",
        "here": f"made = new Image(); made.alt = 'star'; made.src = 'data:image/png;base64,{PICTURE_TEXT}'",
        "sheet": "made = document.createElement('link'); made.rel = 'stylesheet'; made.href = '/s.css'",
        "frame": "made = document.createElement('iframe'); made.src = '/f'",
    }[kind]
    style = ".star { content: url(/p.png); cursor: pointer }"
    page = f"""<style>{style}</style><p id=late hidden>star</p>
        <button onclick="let made = document.createElement('span'); {made}; document.body.append(made)">go</button>"""

    def late(response):
        async def answer():
            await asyncio.sleep(0.5)
            return response

        return lambda method, form: answer()

    pages = {
        "/": page,
        "/p.png": late(Response(PICTURE, content_type="image/png")),
        "/s.css": late(Response("#late { display: block }", content_type="text/css")),
        "/f": late(Response(f"<style>{style}</style><span class=star></span>")),
    }
    with Play(browsers, pages) as play:
        assert "star" not in play.first
        assert "star" in play.act("click 1")
        again = play.act("click 1")  # what is in the browser's cache by now comes from there
        assert "star" in again and "finished loading" not in again


def test_a_picture_that_never_comes_is_waited_for_once(browsers):
    async def never():
        await asyncio.sleep(60)

    pages = {
        "/": "<button onclick=\"document.body.append(Object.assign(new Image(), {src: '/p.png'}))\">go</button>"
        "<button>other</button>",
        "/p.png": lambda method, form: never(),
    }
    with Play(browsers, pages, **FAST) as play:
        assert "The page has not finished loading in 2 s." in play.act("click 1")
        assert "finished" not in play.act("click 2")


def test_what_the_page_before_asked_for_is_not_waited_for(browsers):
    async def never():
        await asyncio.sleep(60)

    asks = "document.body.append(Object.assign(new Image(), {src: '/p.png'})); document.body.offsetWidth"
    pages = {
        "/": f"""<button onclick="{asks}; location = '/next'">go</button>""",
        "/next": "<p>next",
        "/p.png": lambda method, form: never(),
    }
    with Play(browsers, pages, **FAST) as play:
        shown = play.act("click 1")
        assert 'text "next"' in shown and "finished" not in shown

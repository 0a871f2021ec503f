"""The page in a real Chromium: that it is quick, that nothing in an episode runs, and that everybody can use it.

Needs the package playwright, and a Chromium: playwright's own, or one that CHROMIUM or the path names. AXE names
axe-core's axe.min.js.
"""

from __future__ import annotations

import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import time
from urllib.parse import quote

import pytest

from jaxagent.observe import report, shown_episodes
from tests.tiny_run import ROOT
from tests.view import made_run

playwright = pytest.importorskip("playwright.sync_api", reason="the page's tests need the package playwright")
pytestmark = pytest.mark.slow
SLOWNESS = 5  # the machine that runs tests has other things to do; docs/seeing.md has the times alone


@pytest.fixture(scope="module")
def browser():
    path = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("google-chrome")
    with playwright.sync_playwright() as started:
        try:
            browser = started.chromium.launch(executable_path=path, args=["--no-sandbox"])
        except playwright.Error as error:
            pytest.skip(f"there is no Chromium: {str(error).splitlines()[0]}")
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    root = tmp_path_factory.mktemp("runs")
    made_run.write(root / "default", 70)
    made_run.write(root / "other", 6, seed=1)
    made_run.write(root / "hostile", 2, tasks=2, group=2, evil=1000)
    (root / "<img src=x onerror=hacked=8>").mkdir()
    (root / "<img src=x onerror=hacked=8>/metrics.jsonl").write_text('{"stage":"rl","step":1,"reward/mean":1}\n')
    return root


@pytest.fixture(scope="module")
def address(root):
    # Token i is byte i: made runs have no tokenizer.
    code = (
        "import sys\nfrom jaxagent.observe import shown_episodes\nfrom tests.view import made_run\n"
        "shown_episodes.token_table = lambda workdir, config: made_run.table()\n"
        "from jaxagent.view.__main__ import main\nsys.exit(main(sys.argv[1:]))\n"
    )
    words = [sys.executable, "-c", code, str(root), "--port=0"]
    process = subprocess.Popen(words, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    yield process.stdout.readline().strip()
    process.terminate()
    process.wait(20)


class Watched:
    """A page, with all that went wrong on it."""

    def __init__(self, browser, **about):
        self.context = browser.new_context(**about)
        self.page = self.context.new_page()
        self.wrong: list[str] = []
        self.asked: list[str] = []
        self.page.on("pageerror", lambda error: self.wrong.append(f"error: {error}"))
        self.page.on("console", lambda m: self.wrong.append(m.text) if m.type in ("error", "warning") else None)
        self.page.on("dialog", lambda dialog: (self.wrong.append("a dialog"), dialog.dismiss()))
        self.page.on("request", lambda request: self.asked.append(request.url))

    def __enter__(self):
        return self

    def __exit__(self, *failure):
        self.context.close()

    def go(self, address, view="", wait="main > div > *"):
        self.page.goto("about:blank")
        self.page.goto(address + view)
        self.page.wait_for_selector(wait, state="attached")

    def until(self, script):
        """Waits for a script to be true; the page's own policy forbids the browser to wait for one."""
        for _ in range(600):
            if self.page.evaluate(script):
                return
            self.page.wait_for_timeout(50)
        raise AssertionError(f"never: {script}")

    def check(self, address):
        assert self.wrong == []
        assert {url for url in self.asked if not url.startswith((address, "about:", "data:"))} == set()
        assert self.page.evaluate("window.hacked") is None
        made = self.page.evaluate(
            "document.querySelectorAll('main :is(script, style, iframe, img, svg, base, meta, object)').length"
        )
        assert made == 0


def seconds(page, script):
    """How long a script's promise takes, with the painting that follows."""
    return page.evaluate(
        f"(async () => {{ const t = performance.now(); await ({script})(); "
        "await new Promise((done) => requestAnimationFrame(() => setTimeout(done))); "
        "return (performance.now() - t) / 1000; })()"
    )


def test_a_default_run_is_shown_filtered_and_searched_at_once(browser, address):
    with Watched(browser) as watched:
        started = time.monotonic()
        watched.go(address, "#episodes?run=default&log=rl", "tbody tr")
        assert time.monotonic() - started < 1.0 * SLOWNESS
        page = watched.page
        assert page.inner_text(".count").startswith("8,960 of 8,960 episodes")
        watched.until("document.querySelector('tbody td.text').textContent.startsWith('Question')")
        took = seconds(page, "async () => { const i = document.querySelectorAll('[data-bound=reward]')[1]; "
                             "i.value = 0.5; i.dispatchEvent(new Event('change')); }")  # fmt: skip
        assert took < 0.2 * SLOWNESS
        assert "reward=..0.5" in page.url and not page.inner_text(".count").startswith("8,960")
        started = time.monotonic()
        before = page.inner_text(".count")
        page.fill("label.wide input", "capital river")
        watched.until(f"document.querySelector('.count').textContent !== {before!r}")
        assert time.monotonic() - started < 1.0 * SLOWNESS
        watched.check(address)


def test_the_views_of_a_run(browser, address):
    with Watched(browser) as watched:
        page = watched.page
        watched.go(address)
        assert (
            page.inner_text("tbody tr:has-text('default') td.bad, tbody tr:has-text('default')").count("rl 70 of 70")
            == 1
        )
        watched.go(address, "#curves?run=default&with=other", "canvas")
        assert "2 config fields differ" in page.inner_text("main") or "differ" in page.inner_text("main")
        box = page.locator(".plot canvas").first.bounding_box()
        page.mouse.move(box["x"] + 120, box["y"] + 60)
        page.mouse.down()
        page.mouse.move(box["x"] + 200, box["y"] + 60, steps=4)
        page.mouse.up()
        assert re.search(r"from=\d+&to=\d+", page.url), "dragging over a curve zooms all"
        page.click("text=all steps")
        assert "from=" not in page.url
        assert "× env_error in rl" in page.inner_text(".failures")
        watched.go(address, "#episodes?run=default&log=rl&by=tokens", ".histogram button")
        page.locator(".histogram button").nth(3).click()
        assert "tokens=" in page.url and page.locator(".histogram [aria-pressed=true]").count() == 1
        page.locator("tbody th a").first.click()
        page.wait_for_selector(".one")
        page.select_option("label:has-text('show') select", "tokens")
        page.select_option("label:has-text('colour by') select", "gap")
        tokens = page.locator(".tokens")
        tokens.first.focus()
        for _ in range(30):
            page.keyboard.press("ArrowRight")
        assert "token 29" in page.inner_text(".inspector")
        page.keyboard.press("j")
        watched.until("document.querySelector('main .one')")
        page.keyboard.press("g")
        page.wait_for_selector(".cards .card")
        assert page.locator(".card").count() % 8 == 0  # a task may have been drawn twice
        page.locator(".histogram button").first.click()
        page.wait_for_selector("form.filters")
        assert "task=train" in page.url and re.search("(reward|tokens)=", page.url)
        watched.go(address, "#compare?run=default&with=other", "tbody tr")
        page.locator("tbody th a").first.click()
        page.wait_for_selector(".sides .side:nth-child(2) .one")
        watched.go(address, "#summary?run=default")
        watched.check(address)


def test_alarms_are_listed_lead_to_their_curve_and_come_while_one_looks(browser, address, root):
    made_run.write(root / "growing", 3, tasks=1, group=2, seed=2)
    time.sleep(2.5)  # the list of runs is no older
    with Watched(browser) as watched:
        page = watched.page
        watched.go(address, "#curves?run=default", "canvas")
        assert re.match("entropy_falls, rl step [0-9]+ to [0-9]+: the policy ceases", page.inner_text(".alarms li"))
        page.click(".alarms a")
        watched.until("document.querySelectorAll('figure').length === 1 && document.querySelector('canvas')")
        assert "metric=policy%2Fentropy" in page.url and page.inner_text("figcaption") == "policy/entropy"
        watched.go(address, "#summary?run=default", ".alarms li")
        assert "[object" not in page.inner_text("main")
        watched.go(address, "#curves?run=growing", "canvas")
        assert page.locator(".alarms").is_hidden()
        with (root / "growing/metrics.jsonl").open("a") as file:
            for step in range(4, 12):
                file.write(json.dumps({"stage": "rl", "step": step, "stop/token_limit": 1.0}) + "\n")
        watched.until("document.querySelector('.alarms li')?.textContent.startsWith('truncation, rl step 8 to now')")
        watched.check(address)


def test_nothing_in_a_thousand_hostile_episodes_runs(browser, address):
    with Watched(browser) as watched:
        page = watched.page
        stage = f"#curves?run=hostile&stage={quote(made_run.HOSTILE[0])}"
        for view in ("", "#curves?run=hostile", stage, "#episodes?run=hostile&log=evil", "#summary?run=hostile"):
            watched.go(address, view, {"": "tbody tr:nth-child(4)"}.get(view, "canvas" if "curves" in view else "td"))
            watched.check(address)
        watched.go(address, "#episodes?run=hostile&log=evil", "tbody tr")
        for number in range(20):
            assert page.locator("tbody tr").count() == 50
            watched.until("[...document.querySelectorAll('tbody tr')].every((r) => r.children[8].textContent)")
            if number < 19:
                page.click("text=older")
                watched.until(f"document.querySelector('.pager').textContent.includes('page {number + 2} ')")
        page.locator("tbody td a").first.click()
        page.wait_for_selector(".card")
        watched.check(address)
        page.set_default_timeout(400_000)
        shown = page.evaluate(
            """async () => {
              const main = document.getElementById("main"), one = await run("hostile");
              for (let row = 0; row < 1000; row++) {
                shownAs.mode = row % 8 < 2 ? "tokens" : "text";
                const body = make("div");
                await VIEWS.episode(new URLSearchParams({ run: "hostile", log: "evil", row }), body);
                for (const d of body.querySelectorAll("details")) d.open = true;
                main.replaceChildren(body);
                if (!main.textContent.includes("policy")) return `row ${row}: ${main.textContent.slice(0, 200)}`;
                const hidden = /[\\u0000-\\u0008\\u000e-\\u001f\\u202a-\\u202e\\u2066-\\u2069]/;
                if (hidden.test(main.textContent)) return `row ${row} shows what is hidden`;
                if (row % 50 === 0) await new Promise((done) => setTimeout(done));
              }
              return "all";
            }"""
        )
        assert shown == "all"
        watched.check(address)


def test_the_file_of_one_run_needs_nobody(browser, root, tmp_path, monkeypatch):
    monkeypatch.setattr(shown_episodes, "token_table", lambda workdir, config: made_run.table())
    for name in ("default", "hostile"):
        shutil.copytree(root / name, tmp_path / name)
        path = report.write_report(tmp_path / name)
        assert path.stat().st_size < 16_000_000
        with Watched(browser, offline=True) as watched:
            watched.go(path.as_uri(), wait="canvas")
            log = "rl" if name == "default" else "evil"
            watched.go(path.as_uri(), f"#episodes?log={log}", "tbody tr")
            watched.page.locator("tbody th a").first.click()
            watched.page.wait_for_selector(".one, main .note")
            assert "Runs" not in watched.page.inner_text("nav") and "verify" not in watched.page.inner_text("main")
            watched.check("file:")


def test_a_run_of_two_hundred_thousand_episodes_opens(browser, address, root):
    folder = root / "large"
    if not folder.exists():
        shutil.copytree(root / "default", folder)
        index = (folder / "episodes/rl.index").read_bytes()
        (folder / "episodes/rl.index").write_bytes(index * 23)  # the same blocks again: 206,080 rows
    time.sleep(2.5)  # the list of runs is no older
    with Watched(browser) as watched:
        started = time.monotonic()
        watched.go(address, "#episodes?run=large&log=rl", "tbody tr")
        assert time.monotonic() - started < 4.0 * SLOWNESS
        assert watched.page.inner_text(".count").startswith("206,080 of 206,080")
        took = seconds(watched.page, "async () => { const i = document.querySelectorAll('[data-bound=reward]')[1]; "
                                     "i.value = 0.5; i.dispatchEvent(new Event('change')); }")  # fmt: skip
        assert took < 0.5 * SLOWNESS
        watched.check(address)


VIEWS = ("", "#curves?run=default", "#episodes?run=default&log=rl", "#episode?run=default&log=rl&row=100",
         "#summary?run=default", "#compare?run=default&with=other")  # fmt: skip


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_on_a_phone_nothing_is_wider_than_the_screen(browser, address, scheme):
    with Watched(browser, viewport={"width": 360, "height": 740}, color_scheme=scheme) as watched:
        for view in VIEWS:
            watched.go(address, view)
            assert watched.page.evaluate("document.documentElement.scrollWidth") <= 360, view
        watched.check(address)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_no_serious_fault_of_accessibility(browser, address, scheme):
    path = os.environ.get("AXE")
    if not path:
        pytest.skip("AXE does not name axe-core's axe.min.js")
    axe = pathlib.Path(path).read_text(encoding="utf-8")
    with Watched(browser, color_scheme=scheme) as watched:
        for view in (*VIEWS, "#group?run=default&log=rl&step=3&task=" + _task(address, watched)):
            watched.go(address, view)
            if "episode?" in view:
                watched.page.select_option("label:has-text('show') select", "tokens")
            watched.page.wait_for_timeout(300)
            watched.page.evaluate(axe)
            found = watched.page.evaluate("axe.run()")["violations"]
            bad = [
                (v["id"], [n["html"][:160] for n in v["nodes"][:3]])
                for v in found
                if v["impact"] in ("serious", "critical")
            ]
            assert bad == [], view


def _task(address, watched):
    watched.go(address, "#episodes?run=default&log=rl&step=3..3", "tbody tr")
    return watched.page.inner_text("tbody th a >> nth=0")

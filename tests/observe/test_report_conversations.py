"""The report shows an episode of several conversations and roles as such: whose each is, and what is not trained."""

import dataclasses
import json
import re
import shutil
import subprocess

import pytest

from jaxagent import types
from jaxagent.observe import report
from jaxagent.observe.episodes import episode_record
from jaxagent.observe.files import EPISODES_FILE
from tests.observe.test_report import BYTES, _browsed, _episode, _log, _Text


def _several() -> types.Episode:
    """Two conversations of the policy, a guide before them, one only shown between them, and a critic after both."""
    one = _episode()
    conversation = types.UntrainedConversation
    heard = (
        conversation("guide", (("Who is <he>?", "He & she"), ("More", "L" * 2000)), one.trajectories[0], 0),
        conversation("policy", (("only shown", "here"),), one.trajectories[0], 1),
        conversation("critic", (("Is it so?", "yes"),), None, 2),
    )
    return dataclasses.replace(one, trajectories=[*one.trajectories] * 2, heard=heard)


def test_conversations_with_roles_are_shown_in_their_order_each_with_whose_it_is(tmp_path):
    record = episode_record(_several(), BYTES, stage="rl", step=3, split="eval")
    assert json.loads(json.dumps(record)) == record
    _log(tmp_path / EPISODES_FILE, record)
    text = report.write_report(tmp_path).read_text()
    titles = re.findall(r"<h5>(.*?) <i>(.*?)</i></h5>", text)
    assert titles == [
        ("guide", "not trained"), ("policy, conversation 1", "trained"), ("policy", "not trained"),
        ("policy, conversation 2", "trained"), ("critic", "not trained"),
    ]  # fmt: skip
    page = _Text()
    page.feed(text)
    assert page.tokens.replace("↵", "") == "Who? <b>\né!<i>São</i>again" * 2, "only trained tokens have colours"
    assert '<p class="shown">Who is &lt;he&gt;?</p><p class="said">He &amp; she</p>' in text
    assert "<summary>800 characters</summary>" in text
    (browsed,) = _browsed(text)
    assert [(talk["role"], talk["after"]) for talk in browsed["heard"]] == [("guide", 0), ("policy", 1), ("critic", 2)]
    assert browsed["heard"][0]["turns"][0] == ["Who is <he>?", "He & she"] and "trajectory" not in browsed["heard"][0]


def test_one_conversation_without_roles_is_shown_as_it_is(tmp_path):
    _log(tmp_path / EPISODES_FILE, episode_record(_episode(), BYTES, stage="rl", step=3, split="eval"))
    text = report.write_report(tmp_path).read_text()
    assert "<h5>" not in text and 'class="talks"' not in text and "heard" not in _browsed(text)[0]


# As much of a page as the script asks for; prints every <section> that opening all rows makes.
DOM = """
class Element {
  constructor(tag) {
    Object.assign(this, { tag, children: [], dataset: {}, style: { setProperty() {} }, on: {} });
  }
  append(...all) { this.children.push(...all); }
  replaceChildren() { this.children = []; }
  addEventListener(name, does) { this.on[name] = does; }
  querySelector(what) { return found[what] ??= new Element(what); }
  querySelectorAll() { return []; }
  set textContent(text) { this.children = [text]; }
  get textContent() { return this.children.map((c) => (typeof c === "string" ? c : c.textContent)).join("|"); }
}
const found = {}, ids = { browser: new Element("div"), episodes: new Element("script"), tip: new Element("div") };
ids.episodes.textContent = require("fs").readFileSync(process.argv[2], "utf8");
found.input = Object.assign(new Element("input"), { value: "" });
globalThis.document = Object.assign(new Element("document"), {
  getElementById: (id) => ids[id], createElement: (tag) => new Element(tag),
});
require("vm").runInThisContext(require("fs").readFileSync(process.argv[3], "utf8"));
for (const row of found[".rows"].children) { row.open = true; row.on.toggle(); }
const sections = (e) => {
  if (typeof e === "string") return [];
  return e.tag === "section" ? [[e.className, e.textContent]] : e.children.flatMap(sections);
};
console.log(JSON.stringify(sections(found[".rows"])));
"""


@pytest.mark.skipif(shutil.which("node") is None, reason="there is no node to run the page's script")
def test_the_list_of_all_episodes_shows_conversations_too(tmp_path):
    _log(tmp_path / EPISODES_FILE, episode_record(_several(), BYTES, stage="rl", step=3, split="eval"))
    (tmp_path / "episodes.json").write_text(json.dumps(_browsed(report.write_report(tmp_path).read_text())))
    (tmp_path / "dom.js").write_text(DOM)
    script = report.pathlib.Path(report.__file__).parent / "report.js"
    words = ["node", str(tmp_path / "dom.js"), str(tmp_path / "episodes.json"), str(script)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    talks = json.loads(done.stdout)
    assert [(css, text.split("|")[:2]) for css, text in talks] == [
        ("talk heard", ["guide ", "not trained"]), ("talk", ["policy, conversation 1 ", "trained"]),
        ("talk heard", ["policy ", "not trained"]), ("talk", ["policy, conversation 2 ", "trained"]),
        ("talk heard", ["critic ", "not trained"]),
    ]  # fmt: skip
    assert "Who is <he>?|He & she|More|" in talks[0][1] and "800 characters" in talks[0][1]

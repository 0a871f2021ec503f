// Values under the pointer, for curves and for tokens, and episodes. The rest is complete without it.
const tip = document.getElementById("tip");
function show(event, text) {
  tip.textContent = text;
  tip.style.display = "block";
  const box = tip.getBoundingClientRect();
  tip.style.left = Math.min(event.clientX + 14, innerWidth - box.width - 8) + "px";
  tip.style.top = (event.clientY + box.height + 24 > innerHeight ? event.clientY - box.height - 12 : event.clientY + 16) + "px";
}
const hide = () => { tip.style.display = "none"; };
const format = (v) => (Math.abs(v) >= 1000 ? Math.round(v).toLocaleString() : Number(v.toPrecision(4)).toString());

for (const figure of document.querySelectorAll(".chart")) {
  const data = JSON.parse(figure.dataset.series);
  const svg = figure.querySelector("svg"), cursor = figure.querySelector(".cursor");
  const place = data.log ? Math.log : (x) => x;
  const [left, right, top, bottom] = data.frame, [low, high] = data.x.map(place);
  const xs = [...new Set(data.series.flatMap(([, points]) => points.map((p) => p[0])))];
  svg.addEventListener("pointermove", (event) => {
    const box = svg.getBoundingClientRect();
    const at = ((event.clientX - box.left) / box.width) * svg.viewBox.baseVal.width;
    const wanted = low + ((at - left) / (right - left)) * (high - low);
    const x = xs.reduce((a, b) => (Math.abs(place(b) - wanted) < Math.abs(place(a) - wanted) ? b : a));
    const pixel = left + ((place(x) - low) / (high - low || 1)) * (right - left);
    cursor.setAttribute("d", `M${pixel},${top}V${bottom}`);
    const lines = data.series.map(([name, points]) => [name, points.find((p) => p[0] === x)]).filter(([, p]) => p);
    show(event, [`${data.name} ${x}`, ...lines.map(([name, p]) => `${name}  ${format(p[1])}`)].join("\n"));
  });
  svg.addEventListener("pointerleave", () => { cursor.setAttribute("d", ""); hide(); });
}
const kinds = ["prompt", "action", "observation", "warning"];
document.addEventListener("pointermove", (event) => {
  const token = event.target.closest(".tokens span");
  if (!token) return event.target.closest(".chart") ? undefined : hide();
  const { k, p, t, v } = token.dataset;
  const lines = [`${kinds[k]}, turn ${t}`];
  if (p !== undefined) lines.push(`log-prob ${p}   p ${format(Math.exp(p))}`, `policy version ${v}`);
  show(event, lines.join("\n"));
});

// Episodes: those that were chosen; and all, with filters, a row for each, its tokens when it is opened.
const browser = document.getElementById("browser");
if (browser) {
  const PAGE = 50, HEAD = 60, TAIL = 240, SURPRISE = 3;
  const { pairs, all: episodes } = JSON.parse(document.getElementById("episodes").textContent);
  const rows = browser.querySelector(".rows"), count = browser.querySelector(".count"), more = browser.querySelector(".more");
  const make = (tag, css, text) => {
    const element = document.createElement(tag);
    if (css) element.className = css;
    if (text !== undefined) element.textContent = text;
    return element;
  };
  const result = (e) => (e.reward === null ? "failed" : e.reward > 0 ? "more than 0" : "0 or less");
  const value = (e, by) => (by === "result" ? result(e) : String(e[by]));
  // What the policy wrote last: where the answer stands.
  const ending = (e) => {
    const t = e.trajectories.at(-1);
    if (!t) return e.error;
    const end = t.kind.lastIndexOf("1"), before = [...t.kind.slice(0, end)].findLastIndex((k) => k !== "1");
    return e.error || t.text.slice(before + 1, end + 1).join("");
  };
  for (const e of episodes) {
    e.ending = ending(e);
    e.heard ??= [];
    const said = [...e.trajectories.map((t) => t.text.join("")), ...e.heard.flatMap((h) => [h.role, ...h.turns.flat()])];
    e.words = [e.task, e.prompt, e.answers.join(" "), e.error, ...said].join("\n").toLowerCase();
  }
  const selects = [...browser.querySelectorAll("select")], search = browser.querySelector("input");
  for (const select of selects) {
    const values = [...new Set(episodes.map((e) => value(e, select.dataset.by)))];
    const numbers = values.every((v) => v !== "" && !isNaN(v));
    values.sort((a, b) => (numbers ? a - b : a < b ? -1 : 1));
    for (const v of values) select.add(new Option(v || "(none)", v === "" ? "\0" : v));
  }
  const spread = (runs) => runs.flatMap((n, i) => (i % 2 ? [] : Array(n).fill(runs[i + 1])));
  const tokens = (t) => {
    const turns = spread(t.turn), versions = spread(t.version), block = make("div", "tokens");
    let sampled = 0;
    const spans = t.text.map((text, i) => {
      const span = make("span", `k${t.kind[i]}`, text.replaceAll("\n", "↵\n"));
      span.dataset.k = t.kind[i];
      span.dataset.t = turns[i];
      if (t.kind[i] === "1") {
        const p = t.logprob[sampled];
        if (p !== null) {
          span.dataset.p = p;
          span.dataset.v = versions[sampled];
          span.style.setProperty("--s", Math.min(1, -p / SURPRISE).toFixed(2));
        }
        sampled += 1;
      }
      return span;
    });
    if (spans.length <= HEAD + TAIL + 40) block.append(...spans);
    else {
      const folded = make("details"), middle = spans.slice(HEAD, -TAIL);
      folded.append(make("summary", "", `${middle.length} tokens`), ...middle);
      block.append(...spans.slice(0, HEAD), folded, ...spans.slice(-TAIL));
    }
    return block;
  };
  // A conversation with whose it is; of one that is not trained, what its role was shown and said.
  const talk = (name, trained, ...bodies) => {
    const block = make("section", trained ? "talk" : "talk heard"), title = make("h5", "", `${name} `);
    title.append(make("i", "", trained ? "trained" : "not trained"));
    block.append(title, ...bodies);
    return block;
  };
  const long = (css, text) => {
    const block = make("p", css), head = 400, tail = 800;
    if (text.length <= head + tail + 200) block.append(text);
    else {
      const folded = make("details"), middle = text.slice(head, -tail);
      folded.append(make("summary", "", `${middle.length} characters`), middle);
      block.append(text.slice(0, head), folded, text.slice(-tail));
    }
    return block;
  };
  const heard = (h) => talk(h.role, false, ...h.turns.flatMap(([shown, said]) => [long("shown", shown), long("said", said)]));
  // In the order in which they began.
  const conversations = (e) => {
    const last = e.trajectories.length;
    if (!e.heard.length && last <= 1) return e.trajectories.map(tokens);
    const talks = make("div", "talks");
    e.trajectories.forEach((t, i) => {
      talks.append(...e.heard.filter((h) => h.after === i).map(heard));
      talks.append(talk(last > 1 ? `policy, conversation ${i + 1}` : "policy", true, tokens(t)));
    });
    talks.append(...e.heard.filter((h) => h.after >= last).map(heard));
    return [talks];
  };
  const attempt = (e) => {
    const block = make("div", "attempt"), title = make("h4", "", `${e.stage}, step ${e.step} `);
    const rewards = Object.entries(e.rewards).map(([name, v]) => `${name} ${format(v)}`).join(", ");
    const reward = e.reward === null ? "failed" : `reward ${format(e.reward)}`;
    title.append(make("span", e.reward > 0 ? "win" : "loss", reward), " ");
    title.append(make("i", "", [rewards, `${e.turns} turns`, e.stop_reason, e.error].filter(Boolean).join(" · ")));
    block.append(title, ...conversations(e));
    return block;
  };
  const task = (attempts) => {
    const article = make("article", "episode"), head = make("header"), pair = make("div", "pair"), [e] = attempts;
    head.append(make("b", "", e.prompt), make("span", "", e.kind), make("span", "", `gold: ${e.answers.join(", ")}`));
    pair.append(...attempts.map(attempt));
    article.append(head, pair);
    return article;
  };
  for (const e of pairs.flat()) e.heard ??= [];
  document.getElementById("pairs")?.replaceChildren(...pairs.map(task));
  const row = (e) => {
    const item = make("details", "row"), head = make("summary");
    const reward = e.reward === null ? "failed" : format(e.reward);
    head.append(make("span", e.reward > 0 ? "win" : "loss", reward));
    head.append(make("span", "where", `${e.stage}${e.split === "eval" ? ", evaluation" : ""}, step ${e.step}`));
    head.append(make("span", "where", e.stop_reason), make("span", "prompt", e.prompt), make("span", "end", e.ending));
    item.append(head);
    item.addEventListener("toggle", () => {
      if (!item.open || item.children.length > 1) return;
      const rewards = Object.entries(e.rewards).map(([name, v]) => `${name} ${format(v)}`).join(", ");
      const facts = [`${e.task}, attempt ${e.sample}`, e.kind, `gold: ${e.answers.join(", ")}`, rewards, `${e.turns} turns`, e.error];
      item.append(make("p", "note", facts.filter(Boolean).join(" · ")), ...conversations(e));
    });
    return item;
  };
  let chosen = [], shown = 0;
  const page = () => {
    rows.append(...chosen.slice(shown, shown + PAGE).map(row));
    shown = Math.min(shown + PAGE, chosen.length);
    more.hidden = shown === chosen.length;
    const counted = chosen.filter((e) => e.reward !== null);
    const mean = counted.length ? format(counted.reduce((sum, e) => sum + e.reward, 0) / counted.length) : "–";
    count.textContent = `${chosen.length} of ${episodes.length} episodes, mean reward ${mean}, ${chosen.length - counted.length} failed; ${shown} listed`;
  };
  const filter = () => {
    const words = search.value.toLowerCase();
    const wanted = selects.filter((s) => s.value).map((s) => [s.dataset.by, s.value === "\0" ? "" : s.value]);
    chosen = episodes.filter((e) => wanted.every(([by, v]) => value(e, by) === v) && e.words.includes(words));
    rows.replaceChildren();
    shown = 0;
    page();
  };
  more.addEventListener("click", page);
  browser.querySelector("form").addEventListener("input", filter);
  browser.querySelector("form").addEventListener("submit", (event) => event.preventDefault());
  filter();
}

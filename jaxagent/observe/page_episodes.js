// The list of a run's episodes: filters, full-text search, a histogram whose bins filter; and the attempts at one task.

const PAGE = 50, BINS = 24;
const HISTOGRAMS = ["reward", "advantage", "tokens", "sampled", "turns", "seconds", "step"];
const between = (at, name) => {
  const [low, high] = (at.get(name) || "..").split("..");
  return [low === "" ? -Infinity : Number(low), high === "" || high === undefined ? Infinity : Number(high)];
};

// The rows of a table that pass what an address says, but for the bounds of one column.
function passing(table, at, found, without = "") {
  const bounds = HISTOGRAMS.filter((n) => at.get(n) && n !== without).map((n) => [table[n], ...between(at, n)]);
  const stop = at.get("stop"), task = (at.get("task") || "").toLowerCase(), kind = at.get("kind");
  const tasks = task && table.names.map((name) => name.toLowerCase().includes(task));
  const rows = [];
  for (let r = 0; r < table.n; r++) {
    if (stop && (stop === "failed" ? !FAILED.has(table.stop[r]) : table.stop[r] !== stop)) continue;
    if (task && !tasks[table.task[r]]) continue;
    if (kind && table.kind[r] !== kind) continue;
    if (found && !found.has(r + table.first)) continue;
    if (bounds.some(([column, low, high]) => column[r] === null || column[r] < low || column[r] > high)) continue;
    rows.push(r);
  }
  return rows;
}

function bins(table, rows, name) {
  const column = table[name];
  let low = Infinity, high = -Infinity;
  const distinct = new Set();
  for (const r of rows) {
    const v = column[r];
    if (v === null) continue;
    if (v < low) low = v;
    if (v > high) high = v;
    if (distinct.size <= BINS) distinct.add(v);
  }
  if (low > high) return [];
  const edges = distinct.size <= BINS ? [...distinct].sort((a, b) => a - b).map((v) => [v, v])
    : Array.from({ length: BINS }, (_, i) => [low + ((high - low) * i) / BINS, low + ((high - low) * (i + 1)) / BINS]);
  const counts = Array(edges.length).fill(0), places = new Map(edges.map(([v], i) => [v, i]));
  for (const r of rows) {
    if (column[r] === null) continue;
    counts[distinct.size <= BINS ? places.get(column[r]) : Math.min(BINS - 1, Math.floor(((column[r] - low) / (high - low)) * BINS))] += 1;
  }
  return edges.map(([from, to], i) => ({ from, to, count: counts[i] }));
}

function histogram(list, name, chosen, pick) {
  const most = Math.max(...list.map((b) => b.count), 1), [low, high] = chosen;
  return make("div", { class: "histogram", role: "group", "aria-label": `episodes by ${name}` }, list.map((bin) => {
    const within = bin.from >= low && bin.to <= high;
    const title = `${name} ${format(bin.from)}${bin.to > bin.from ? ` to ${format(bin.to)}` : ""}: ${bin.count} episodes`;
    const bar = make("button", { type: "button", title, "aria-label": title, "aria-pressed": String(within && Number.isFinite(low)), onclick: () => pick(bin) }, make("span"));
    bar.firstChild.style.height = `${Math.max(bin.count ? 3 : 0, (100 * bin.count) / most)}%`;
    return bar;
  }));
}

const outcome = (table, r) => (FAILED.has(table.stop[r]) ? make("span", { class: "bad", text: "failed" })
  : make("span", { class: table.reward[r] > 0 ? "good" : "", text: format(table.reward[r]) }));
const open_ = (name, log, table, r) => link("episode", { run: name, log, row: r + table.first });
let listed = { key: "", rows: [] }; // what was listed last: an episode's neighbours

VIEWS.episodes = async (at, body) => {
  const one = await run(at.get("run")), logs = one.facts.logs;
  if (!logs.length) {
    add(body, make("p", { class: "note", text: "This run has kept no episodes." }));
    return null;
  }
  const log = logs.includes(at.get("log")) ? at.get("log") : logs.includes("rl") ? "rl" : logs[0];
  const table = await one.table(log);
  let found = null, searched = "", page = Number(at.get("page") || 0), rows = [], shape = at.get("by") || "reward", turn = 0, showing = 0;
  const count = make("p", { class: "note count", role: "status" }), shapes = make("div"), list = make("tbody"), pager = make("p", { class: "pager" });
  const set = (changes) => { page = 0; note({ ...changes, page: "" }); fill(); };
  const bound = (name, i) => {
    const ends = between(at, name);
    return make("input", { type: "number", step: "any", "aria-label": `${name} ${i ? "at most" : "at least"}`, value: Number.isFinite(ends[i]) ? ends[i] : "", "data-bound": name, onchange: (e) => {
      const now = (at.get(name) || "..").split("..");
      now[i] = e.target.value;
      set({ [name]: now.join("..") === ".." ? "" : now.join("..") });
    } });
  };
  const stops = () => [["", "all"], ["failed", "any failure"], ...[...new Set(table.stop)].sort().map((s) => [s, s])];
  const kinds = [...new Set(table.kind)].filter(Boolean).sort().slice(0, 200);
  const text = make("input", { type: "search", value: at.get("words") || "", placeholder: "all words, in any text", oninput: () => search() });
  async function search() {
    const words = text.value.trim(), mine = ++turn;
    await new Promise((later) => setTimeout(later, 150));
    if (mine !== turn || words === searched) return;
    const rows_ = words ? await one.search(log, words).catch((error) => { say(error.message); return new Set(); }) : null;
    if (mine !== turn) return;
    [searched, found] = [words, rows_];
    set({ words });
  }
  const form = make("form", { class: "filters", onsubmit: (e) => e.preventDefault() },
    choose("log", log, logs.map((l) => [l, l]), (l) => { location.hash = link("episodes", { run: one.name, with: at.get("with"), log: l }); }),
    make("label", {}, "step", bound("step", 0), "to", bound("step", 1)),
    make("label", {}, "reward", bound("reward", 0), "to", bound("reward", 1)),
    make("label", {}, "tokens", bound("tokens", 0), "to", bound("tokens", 1)),
    choose("ended by", at.get("stop") || "", stops(), (stop) => set({ stop })),
    kinds.length > 1 && choose("kind", at.get("kind") || "", [["", "all"], ...kinds.map((k) => [k, k])], (kind) => set({ kind })),
    field("task", { type: "search", value: at.get("task") || "", oninput: (e) => set({ task: e.target.value }) }),
    make("label", { class: "wide" }, "text", text),
    make("a", { href: link("episodes", { run: one.name, with: at.get("with"), log }), onclick: (e) => { if (!location.hash.includes("=")) e.preventDefault(); } }, "clear"));
  const by = choose("histogram of", shape, HISTOGRAMS.map((h) => [h, h]), (h) => { shape = h; note({ by: h }); bars(); });
  const columns = ["step", "task", "attempt", "reward", "advantage", "ended by", "turns", "tokens", "prompt", "end"];
  const sortable = { step: "step", reward: "reward", advantage: "advantage", turns: "turns", tokens: "tokens" };
  const heads = columns.map((name) => make("th", { scope: "col" }, sortable[name] ? make("button", { type: "button", onclick: () => {
    const now = at.get("sort") || "";
    set({ sort: now === name ? `-${name}` : now === `-${name}` ? "" : name });
  } }, name) : name));
  function bars() {
    const list_ = bins(table, passing(table, at, found, shape), shape);
    const focus = [...shapes.querySelectorAll("button")].indexOf(document.activeElement);
    shapes.replaceChildren(list_.length ? histogram(list_, shape, between(at, shape), (bin) => {
      const said = `${bin.from}..${bin.to}`;
      set({ [shape]: at.get(shape) === said ? "" : said });
    }) : make("p", { class: "note", text: "nothing to count" }));
    if (focus >= 0) shapes.querySelectorAll("button")[focus]?.focus();
  }
  async function fill() {
    rows = passing(table, at, found);
    const sort = at.get("sort") || "", column = table[sortable[sort.replace("-", "")]];
    if (column) rows.sort((a, b) => (sort[0] === "-" ? column[a] - column[b] : column[b] - column[a]) || b - a);
    else rows.reverse(); // the newest first
    columns.forEach((name, i) => heads[i].setAttribute("aria-sort", sort === name ? "descending" : sort === `-${name}` ? "ascending" : "none"));
    listed = { key: `${one.name} ${log}`, rows };
    let sum = 0, counted = 0, failed = 0;
    for (const r of rows) if (table.reward[r] !== null) { sum += table.reward[r]; counted += 1; } else failed += 1;
    count.textContent = `${rows.length.toLocaleString("en")} of ${table.n.toLocaleString("en")} episodes, mean reward ${format(counted ? sum / counted : NaN)}, ${failed} failed`;
    for (const input of form.querySelectorAll("[data-bound]")) {
      if (input === document.activeElement) continue;
      const end = between(at, input.dataset.bound)[input.getAttribute("aria-label").endsWith("at most") ? 1 : 0];
      input.value = Number.isFinite(end) ? end : "";
    }
    bars();
    await show();
  }
  async function show() {
    const mine = rows.slice(page * PAGE, (page + 1) * PAGE), shows = ++showing;
    list.replaceChildren(...mine.map((r) => make("tr", {},
      make("td", { text: table.step[r] }),
      make("th", { scope: "row" }, make("a", { href: open_(one.name, log, table, r) }, table.names[table.task[r]])),
      make("td", {}, make("a", { href: link("group", { run: one.name, log, step: table.step[r], task: table.names[table.task[r]] }), "aria-label": `attempt ${table.sample[r]}: its group` }, table.sample[r])),
      make("td", {}, outcome(table, r)), make("td", { text: format(table.advantage[r]) }), make("td", { text: table.stop[r] }),
      make("td", { text: table.turns[r] }), make("td", { text: table.tokens[r] }),
      make("td", { class: "text" }), make("td", { class: "text end", text: table.error[r] }))));
    const pages = Math.max(1, Math.ceil(rows.length / PAGE));
    const go = (by_) => { page += by_; note({ page: page || "" }); show(); };
    pager.replaceChildren(make("button", { type: "button", disabled: page === 0, onclick: () => go(-1) }, "newer"),
      ` page ${page + 1} of ${pages} `, make("button", { type: "button", disabled: page + 1 >= pages, onclick: () => go(1) }, "older"));
    const lines = [...list.children], texts = await one.previews(log, mine.map((r) => r + table.first));
    if (shows !== showing) return;
    mine.forEach((r, i) => {
      const said = texts[r + table.first];
      lines[i].children[8].textContent = said ? clean(said.prompt) : "its text is not here";
      if (said && !table.error[r]) lines[i].children[9].textContent = clean(`${said.end.length > 50 ? "\u2026" : ""}${said.end.slice(-50)}`);
    });
  }
  add(body, form, by, shapes, count, make("div", { class: "table", tabindex: 0, role: "region", "aria-label": "episodes" },
    make("table", { class: "list" }, make("thead", {}, make("tr", {}, heads)), list)), pager);
  if (embedded) add(body, make("p", { class: "note", text: "This file has the text of some episodes. The command jaxagent.view shows all." }));
  if (text.value) { found = await one.search(log, searched = text.value.trim()); }
  await fill();
  return async () => { if (await table.refresh() && page === 0) await fill(); };
};

// The attempts at a task in one step, side by side; and how the task went over the run.
VIEWS.group = async (at, body) => {
  const one = await run(at.get("run")), log = at.get("log"), table = await one.table(log);
  const step = Number(at.get("step")), place = table.names.indexOf(at.get("task")), all = [];
  for (let r = 0; r < table.n; r++) if (table.task[r] === place) all.push(r);
  const rows = all.filter((r) => table.step[r] === step);
  const texts = await one.previews(log, rows.slice(0, 200).map((r) => r + table.first));
  listed = { key: `${one.name} ${log}`, rows };
  const most = Math.max(...rows.map((r) => Math.abs(table.advantage[r] || 0)), 1e-9);
  const cards = rows.slice(0, 200).map((r) => {
    const bar = make("i", { class: table.advantage[r] < 0 ? "bar minus" : "bar" });
    bar.style.width = `${(100 * Math.abs(table.advantage[r] || 0)) / most}%`;
    const said = texts[r + table.first];
    return make("article", { class: "card" }, make("h3", {}, make("a", { href: open_(one.name, log, table, r) }, table.attempt(r))),
      make("p", {}, "reward ", outcome(table, r), ` \u00b7 advantage ${format(table.advantage[r])} \u00b7 ${table.stop[r]} \u00b7 ${table.turns[r]} turns \u00b7 ${table.tokens[r]} tokens`),
      make("p", { class: "track" }, bar), make("p", { class: "text", text: table.error[r] || (said ? said.end : "its text is not here") }));
  });
  const steps = new Map();
  for (const r of all) steps.set(table.step[r], [...(steps.get(table.step[r]) || []), r]);
  const history = [...steps].map(([when, own]) => {
    const paid = own.filter((r) => !table.fork[r]).map((r) => table.reward[r]).filter((v) => v !== null);
    return make("tr", {}, make("th", { scope: "row" }, make("a", { href: link("group", { run: one.name, log, step: when, task: at.get("task") }), "aria-current": when === step && "true" }, `step ${when}`)),
      make("td", { text: own.length }), make("td", { text: format(paid.length ? paid.reduce((a, b) => a + b, 0) / paid.length : NaN) }), make("td", { text: own.length - paid.length }));
  });
  const first = rows.length ? texts[rows[0] + table.first] : null;
  const every = new Set(all.map((r) => table.reward[r])).size > 1 ? "reward" : "tokens", shares = bins(table, all, every);
  const shape = shares.length ? histogram(shares, every, [-Infinity, Infinity], (bin) => {
    location.hash = link("episodes", { run: one.name, log, task: at.get("task"), by: every, [every]: `${bin.from}..${bin.to}` });
  }) : null;
  add(body, make("h1", { text: at.get("task") }), make("p", { class: "note", text: first ? first.prompt : "" }),
    make("p", {}, `${rows.length} attempts in step ${step} of ${log}`), verifier(one, log, step),
    make("div", { class: "cards" }, cards), make("h2", { text: `The same task over the run: ${all.length} attempts, by ${every}` }), shape,
    make("div", { class: "table", tabindex: 0, role: "region", "aria-label": "the task over the run" }, make("table", {}, make("thead", {}, make("tr", {}, ["when", "attempts", "mean reward", "failed"].map((t) => make("th", { scope: "col", text: t })))), make("tbody", {}, history))));
  return null;
};

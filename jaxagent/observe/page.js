"use strict";
// The page of runs: elements, where data comes from, tables of episodes, and which view is shown.
// Nothing here makes markup of text: what runs have written is only ever the text of an element.

const HIDDEN = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff]/g;
// Characters that are not seen, or turn what stands beside them around, by their numbers.
const clean = (text) => String(text).replace(HIDDEN, (c) =>
  c < " " ? String.fromCharCode(0x2400 + c.charCodeAt(0)) : `\u27e8${c.charCodeAt(0).toString(16).padStart(4, "0")}\u27e9`);

// make("a", { href, class, text, onclick, "aria-label" }, child, "text", ...)
function make(tag, about = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(about)) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "text") element.textContent = clean(value);
    else if (name === "value" || name === "checked" || name === "disabled" || name === "open") element[name] = value;
    else element.setAttribute(name, value === true ? "" : clean(value));
  }
  return add(element, ...children);
}
// Children may be lists of children; null, undefined and false are none.
function add(element, ...children) {
  const all = children.flat(Infinity).filter((c) => c !== null && c !== undefined && c !== false);
  element.append(...all.map((c) => (c instanceof Node ? c : document.createTextNode(clean(c)))));
  return element;
}
// Halves of surrogate pairs stand in no address: a name has others in their place everywhere.
const wellFormed = (text) => String(text).replace(/[\ud800-\udbff](?![\udc00-\udfff])|(?<![\ud800-\udbff])[\udc00-\udfff]/g, "\ufffd");
const format = (v) => {
  if (v === null || v === undefined || Number.isNaN(v)) return "\u2013";
  if (typeof v !== "number") return String(v);
  return Math.abs(v) >= 1000 ? Math.round(v).toLocaleString("en") : Number(v.toPrecision(4)).toString();
};
const say = (text) => { document.getElementById("say").textContent = text; };
const choose = (label, value, options, change) => make("label", {}, label, make("select",
  { onchange: (event) => change(event.target.value) },
  options.map(([name, title]) => {
    const option = make("option", { value: name, text: title });
    option.selected = name === value;
    return option;
  })));
const field = (label, about) => make("label", {}, label, make("input", about));

// ---- where data comes from: a server, or the page itself

const inside = document.getElementById("data");
const embedded = inside && JSON.parse(inside.textContent);
let token = "";

function takeToken() {
  const said = /^#token=([\w-]+)$/.exec(location.hash);
  try {
    if (said) sessionStorage.setItem("token", said[1]);
    token = sessionStorage.getItem("token") || "";
  } catch { token = said ? said[1] : ""; }
  if (said) history.replaceState(null, "", location.pathname);
}

async function ask(name, params = {}, about = {}) {
  const query = new URLSearchParams(params).toString();
  const headers = { ...(token && { Authorization: `Bearer ${token}` }), ...about.headers };
  const answer = await fetch(`api/${name}${query && "?" + query}`, { ...about, headers });
  if (!answer.ok) throw new Error((await answer.json().catch(() => ({}))).error || `${name}: ${answer.status}`);
  return answer;
}
const values = async (name, params) => (await ask(name, params)).json();

// Whole lines of a file that grows: what was read stays, the next call reads on.
class Lines {
  constructor(name, params, text) {
    Object.assign(this, { name, params, next: "0", text });
  }
  async more() {
    if (this.text !== undefined) {
      const text = this.text;
      this.text = "";
      return { text, again: false };
    }
    if (embedded) return { text: "", again: false };
    const answer = await ask(this.name, { ...this.params, from: this.next });
    const again = answer.headers.get("X-From") !== this.next;
    this.next = answer.headers.get("X-Next");
    return { text: await answer.text(), again };
  }
}
const records = (text) => {
  const out = [];
  for (const line of text.split("\n")) if (line) try { out.push(JSON.parse(line)); } catch { /* the last, half written */ }
  return out;
};

// ---- what is known of a run

const NUMBERS = ["reward", "advantage", "turns", "tokens", "sampled", "seconds"];
const FAILED = new Set(["timeout", "env_error", "engine_error", "cancelled"]);

// The index of a log, column by column; row r of all columns is one episode.
class Table {
  constructor(lines, first = 0) {
    Object.assign(this, { lines, first, names: [], places: new Map() });
    this.clear();
  }
  clear() {
    this.n = 0;
    for (const name of ["step", "task", "kind", "sample", "fork", "stop", "error", "kept", ...NUMBERS]) this[name] = [];
  }
  attempt(r) {
    const fork = this.fork[r];
    return `attempt ${this.sample[r]}${fork ? `, a fork of attempt ${fork[0]} at turn ${fork[1]}` : ""}`;
  }
  async refresh() {
    const before = this.n, { text, again } = await this.lines.more();
    if (again) this.clear();
    for (const block of records(text)) this.add(block);
    return again || this.n !== before;
  }
  add(block) {
    const tasks = block.tasks.map(wellFormed).map((name) => {
      if (!this.places.has(name)) this.places.set(name, this.names.push(name) - 1);
      return this.places.get(name);
    });
    const size = block.sample.length;
    for (let i = 0; i < size; i++) {
      this.step.push(block.step);
      this.task.push(tasks[block.task[i]]);
      this.kind.push(block.kinds[block.task[i]]);
      this.sample.push(block.sample[i]);
      this.fork.push(block.fork ? block.fork[i] : null);
      this.stop.push(block.stop[i]);
      this.error.push(block.error[i]);
      this.kept.push(block.body > 0);
      for (const name of NUMBERS) this[name].push(block[name][i]);
    }
    this.n += size;
  }
}

class Run {
  constructor(name) {
    this.name = name;
    this.series = {}; // stage -> metric -> { x, y }
    this.tables = {};
    this.lines = new Lines("metrics", { run: name }, embedded ? embedded.metrics : undefined);
  }
  async ask() {
    this.facts = embedded ? embedded.facts : await values("run", { run: this.name });
  }
  async open() {
    if (!this.facts) await this.ask();
    if (!this.read) this.read = this.refresh();
    await this.read;
    return this;
  }
  async refresh() {
    const { text, again } = await this.lines.more();
    if (again) this.series = {};
    const found = records(text);
    for (const record of found) {
      const stage = (this.series[record.stage] ??= {});
      for (const [name, value] of Object.entries(record)) {
        if (typeof value !== "number" || name === "step") continue;
        const line = (stage[name] ??= { x: [], y: [] });
        line.x.push(record.step);
        line.y.push(value);
      }
    }
    return found.length > 0;
  }
  async table(log) {
    const stored = embedded && embedded.logs[log];
    const make = () => new Table(new Lines("index", { run: this.name, log }, stored ? stored.index : undefined), stored ? stored.first : 0);
    const table = (this.tables[log] ??= make());
    if (!table.ready) table.ready = table.refresh();
    await table.ready;
    return table;
  }
  // Beginnings and ends of the texts of rows, by row.
  async previews(log, rows) {
    if (!embedded) return values("previews", { run: this.name, log, rows: rows.join(",") });
    return Object.fromEntries(rows.map((row) => [row, embedded.logs[log].episodes[row]?.preview ?? null]));
  }
  async episode(log, row) {
    return embedded ? embedded.logs[log].episodes[row] ?? null : values("episode", { run: this.name, log, row });
  }
  // The rows whose texts hold all the words.
  async search(log, words) {
    if (!embedded) return new Set(await values("search", { run: this.name, log, words }));
    const wanted = words.toLowerCase().split(/\s+/);
    const hit = (text) => wanted.every((word) => text.includes(word));
    return new Set(Object.entries(embedded.logs[log].episodes).filter(([, e]) => hit(allTexts(e))).map(([row]) => Number(row)));
  }
}
const joined = (parts) => parts.filter((part) => typeof part === "string").join("\n");
const allTexts = (e) => [
  joined(e.prompt), e.task, joined(e.error), ...e.answers.map(joined), e.text ? joined(e.text) : "",
  ...e.trajectories.map((t) => t.windows.map((w) => w.text.join("")).join("\n")),
  ...e.heard.flatMap((h) => h.turns.flat().map(joined)),
].join("\n").toLowerCase();

const known = new Map();
const run = (name) => {
  if (!known.has(name)) known.set(name, new Run(name));
  return known.get(name).open();
};

// ---- which view is shown: #view?key=value&...

const VIEWS = {}; // name -> async (parameters, main) => what to do when data has grown, or nothing
let here = { view: "", at: new URLSearchParams() };
let grown = null, drawing = 0;

function parse(hash) {
  const [view, query] = hash.replace(/^#\/?/, "").split("?");
  return { view, at: new URLSearchParams(query || "") };
}
const link = (view, at) => `#${view}?${new URLSearchParams(Object.entries(at).filter(([, v]) => v !== undefined && v !== null && v !== ""))}`;
// The same view with other parameters: written into the address, not drawn anew.
function note(changes) {
  for (const [name, value] of Object.entries(changes)) {
    if (value === "" || value === null || value === undefined) here.at.delete(name);
    else here.at.set(name, value);
  }
  history.replaceState(null, "", `#${here.view}?${here.at}`);
}

async function draw() {
  const mine = ++drawing, main = document.getElementById("main");
  here = parse(location.hash);
  if (!VIEWS[here.view]) here = { view: embedded ? "curves" : "runs", at: here.at };
  if (embedded) here.at.set("run", embedded.run);
  const body = make("div", { class: here.view });
  try {
    if (!here.at.get("run") && here.view !== "runs") here.view = "runs";
    const follow = await VIEWS[here.view](here.at, body);
    if (mine !== drawing) return;
    grown = follow || null;
  } catch (error) {
    if (mine !== drawing) return;
    grown = null;
    body.replaceChildren(make("p", { class: "bad", role: "alert", text: error.message }));
  }
  top_();
  main.replaceChildren(body);
  document.title = `${here.at.get("run") || "runs"} \u00b7 ${here.view}`;
}

function top_() {
  const at = Object.fromEntries(["run", "with"].map((name) => [name, here.at.get(name)]));
  const views = [["runs", "Runs"], ["curves", "Curves"], ["episodes", "Episodes"], ["compare", "Compare"], ["summary", "Summary"]];
  const shown = views.filter(([name]) => (embedded ? !["runs", "compare"].includes(name) : name === "runs" || at.run));
  const nav = make("nav", { "aria-label": "views" }, shown.map(([name, title]) =>
    make("a", { href: link(name, name === "runs" ? {} : at), "aria-current": name === here.view && "page" }, title)));
  document.getElementById("top").replaceChildren(make("strong", { class: "run" }, at.run || "jaxagent"), nav);
}

// Data that grows is asked for while the page is looked at.
async function follow() {
  if (!document.hidden && grown) try { await grown(); } catch { /* the server is away; it may come back */ }
  setTimeout(follow, 5000);
}

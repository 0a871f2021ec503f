// The list of runs, two runs side by side, a run's summary; and the start.

VIEWS.runs = async (at, body) => {
  const chosen = new Set();
  const rows = make("tbody"), overlay = make("a", { class: "hop", href: "#runs" }, "choose runs to lay their curves over each other");
  const update = () => {
    const [first, ...rest] = [...chosen];
    overlay.setAttribute("href", first ? link("curves", { run: first, with: rest.join(",") }) : "#runs");
    overlay.textContent = first ? `curves of ${chosen.size} runs` : "choose runs to lay their curves over each other";
  };
  const ago = (t) => {
    const s = Math.max(0, Date.now() / 1000 - t);
    return s < 90 ? `${Math.round(s)} s ago` : s < 5400 ? `${Math.round(s / 60)} min ago` : s < 129600 ? `${Math.round(s / 3600)} h ago` : `${Math.round(s / 86400)} days ago`;
  };
  let before = "";
  const fill = async () => {
    const list = await values("runs");
    if (JSON.stringify(list) === before) return false;
    before = JSON.stringify(list);
    rows.replaceChildren(...list.map((r) => {
      const box = make("input", { type: "checkbox", checked: chosen.has(r.name), "aria-label": `choose ${r.name}`, onchange: () => {
        if (box.checked) chosen.add(r.name); else chosen.delete(r.name);
        update();
      } });
      const steps = r.steps ? ` of ${r.steps}` : "";
      return make("tr", {}, make("td", {}, box), make("th", { scope: "row" }, make("a", { href: link("curves", { run: r.name }) }, r.name)),
        make("td", {}, make("span", { class: `status ${r.status}`, text: r.status })), make("td", { text: r.environment || "" }),
        make("td", { text: r.stage ? `${r.stage} ${format(r.step)}${steps}` : "" }),
        make("td", { text: r.score ? `${r.score} ${format(r.value)}` : "" }), make("td", { text: format(r.reward) }),
        make("td", { class: r.failed ? "bad" : "", text: r.error || format(r.failed) }), make("td", { text: r.written ? ago(r.written) : "" }));
    }));
    return true;
  };
  const head = ["", "run", "status", "environment", "step", "held-out score", "reward", "failed", "last record"];
  add(body, make("h1", { text: "Runs" }), make("p", {}, overlay), make("div", { class: "table", tabindex: 0, role: "region", "aria-label": "runs" },
    make("table", {}, make("thead", {}, make("tr", {}, head.map((t) => (t ? make("th", { scope: "col", text: t }) : make("td"))))), rows)));
  await fill();
  return fill;
};

VIEWS.summary = async (at, body) => {
  const one = await run(at.get("run")), { summary, config, folder, about: words } = one.facts;
  const rows = Object.entries(summary).filter(([k]) => k !== "alarms").flatMap(([k, v]) => (v && typeof v === "object" && !Array.isArray(v) ? Object.entries(v).map(([i, x]) => [`${k}.${i}`, x]) : [[k, v]]));
  add(body, make("h1", { text: one.name }), make("p", { class: "note", text: `${words} \u00b7 ${folder}${embedded ? ` \u00b7 written ${embedded.written}` : ""}` }), tiles(one.facts), alarmList([one]), make("h2", { text: "Summary" }),
    make("div", { class: "table", tabindex: 0, role: "region", "aria-label": "summary" }, make("table", {}, make("tbody", {}, rows.map(([k, v]) => make("tr", {}, make("th", { scope: "row", text: k }), make("td", { text: Array.isArray(v) ? v.join(", ") : format(v) })))))),
    make("h2", { text: "Config" }), make("pre", { class: "config", tabindex: 0, text: JSON.stringify(config, null, 2) }));
  return null;
};

const meanOf = (column, rows) => {
  const paid = rows.map((r) => column[r]).filter((v) => v !== null);
  return paid.length ? paid.reduce((a, b) => a + b, 0) / paid.length : NaN;
};

// Two runs at the same tasks: where they differ most first, and an attempt of each side by side.
VIEWS.compare = async (at, body) => {
  const one = await run(at.get("run")), names = (await values("runs")).map((r) => r.name).filter((n) => n !== one.name);
  const other = names.includes(at.get("with")) ? at.get("with") : names[0];
  if (!other) {
    add(body, make("p", { class: "note", text: "There is no other run to compare with." }));
    return null;
  }
  const two = await run(other), shared = one.facts.logs.filter((l) => two.facts.logs.includes(l));
  const log = shared.includes(at.get("log")) ? at.get("log") : shared.find((l) => l.endsWith(".eval")) || shared[0];
  const go = (changes) => { location.hash = link("compare", { run: one.name, with: other, log, ...changes }); };
  add(body, make("h1", { text: `${one.name} and ${other}` }), make("div", { class: "filters" },
    choose("with", other, names.map((n) => [n, n]), (n) => go({ with: n })), shared.length ? choose("log", log, shared.map((l) => [l, l]), (l) => go({ log: l })) : null), difference([one, two]));
  if (!log) {
    add(body, make("p", { class: "note", text: "The two runs have no log of episodes in common." }));
    return null;
  }
  const tables = await Promise.all([one.table(log), two.table(log)]);
  const byTask = tables.map((t) => {
    const last = t.n ? t.step[t.n - 1] : 0, rows = new Map();
    for (let r = 0; r < t.n; r++) {
      if (log.endsWith(".eval") && t.step[r] !== last) continue; // of held-out tasks the last evaluation
      const name = t.names[t.task[r]];
      rows.has(name) ? rows.get(name).push(r) : rows.set(name, [r]);
    }
    return rows;
  });
  const pairs = [...byTask[0].keys()].filter((n) => byTask[1].has(n)).map((name) => {
    const means = tables.map((t, i) => meanOf(t.reward, byTask[i].get(name)));
    return { name, means, gap: means[1] - means[0] };
  }).sort((a, b) => Math.abs(b.gap || 0) - Math.abs(a.gap || 0));
  const task = pairs.some((p) => p.name === at.get("task")) ? at.get("task") : "";
  const list = make("table", { class: "list" }, make("thead", {}, make("tr", {}, ["task", one.name, other, "difference"].map((t) => make("th", { scope: "col", text: t })))),
    make("tbody", {}, pairs.slice(0, 200).map((p) => make("tr", {}, make("th", { scope: "row" }, make("a", { href: link("compare", { run: one.name, with: other, log, task: p.name }) }, p.name)),
      p.means.map((m, i) => make("td", { text: `${format(m)} (${byTask[i].get(p.name).length})` })), make("td", { class: p.gap > 0 ? "good" : p.gap < 0 ? "bad" : "", text: format(p.gap) })))));
  if (task) {
    const sides = await Promise.all([one, two].map(async (r, i) => {
      const table = tables[i], rows = byTask[i].get(task), row = rows.at(-1), e = await r.episode(log, row + table.first);
      const links = rows.slice(-24).map((k) => make("a", { class: "hop", href: open_(r.name, log, table, k) }, `step ${table.step[k]}, ${table.sample[k]}: ${format(table.reward[k])}`));
      return make("section", { class: "side" }, make("h2", { text: r.name }), make("p", { class: "hops" }, links), e ? episodeBox(r, log, row + table.first, e) : make("p", { class: "note", text: "its tokens were given up" }));
    }));
    add(body, make("h2", { text: task }), make("div", { class: "sides" }, sides));
  }
  const better = pairs.filter((p) => p.gap > 0).length, worse = pairs.filter((p) => p.gap < 0).length;
  add(body, make("p", { class: "note", text: `${pairs.length} tasks in common; ${other} has a higher mean reward at ${better}, a lower one at ${worse}. In brackets: attempts.` }),
    make("div", { class: "table", tabindex: 0, role: "region", "aria-label": "tasks in common" }, list));
  return null;
};

takeToken();
addEventListener("hashchange", () => {
  const next = parse(location.hash);
  if (`${next.view}?${next.at}` !== `${here.view}?${here.at}`) draw().then(() => document.getElementById("main").focus({ preventScroll: true }));
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => draw());
draw();
if (!embedded) follow();

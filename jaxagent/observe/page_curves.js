// Curves of one run or several: zoom by dragging or by typing steps, smoothing, values as a table; what failed first.

const FIRST = [
  "reward/mean", "loss", "loss/total", "policy/entropy", "policy/clip_frac", "policy/ratio_p99", "policy/grad_norm",
  "logprob_gap/max", "policy/drift_max", "groups/zero_signal_frac", "stop/token_limit", "episode/action_tokens", "tokens_per_s", "time/step_s",
];
const COLOURS = 8, AGAINST = "held-out score against the cost of a task";
const colour = (i) => getComputedStyle(document.documentElement).getPropertyValue(`--c${i % COLOURS}`).trim();

function smoothed(ys, weight) {
  let mean = 0, mass = 0;
  return ys.map((y) => {
    if (y === null) return null;
    mean = weight * mean + (1 - weight) * y;
    mass = weight * mass + (1 - weight);
    return mean / mass;
  });
}

// One chart of one metric: a line per run. `range` is [from, to] of steps, null where not bounded; `alarms` are shaded.
function chart(name, lines, options, onRange, alarms) {
  const xs = [...new Set(lines.flatMap(({ x }) => x))].sort((a, b) => a - b);
  const place = new Map(xs.map((x, i) => [x, i]));
  const columns = lines.map(({ x, y }) => {
    const column = Array(xs.length).fill(null);
    x.forEach((at, i) => { column[place.get(at)] = y[i]; });
    return column;
  });
  const last = lines.map(({ name: of, y }) => `${of} ${format(y.at(-1))}`).join(", ");
  const box = make("div", { class: "plot", role: "img", "aria-label": `${name} over steps ${format(xs[0])} to ${format(xs.at(-1))}; newest: ${last}` });
  const legend = make("p", { class: "legend" }, lines.map(({ name: of, y }, i) => {
    const key = make("span", { class: "key" }, `${of} `, make("b", { text: format(y.at(-1)) }));
    key.style.setProperty("--c", colour(i));
    return key;
  }));
  const rows = () => xs.map((x, i) => make("tr", {}, make("th", { scope: "row", text: x }), columns.map((c) => make("td", { text: format(c[i]) }))));
  const table = make("details", { class: "values", ontoggle: () => {
    if (table.open && table.children.length < 2) {
      const head = make("tr", {}, make("th", { scope: "col", text: "step" }), lines.map((l) => make("th", { scope: "col", text: l.name })));
      table.append(make("div", { class: "table", tabindex: 0, role: "region", "aria-label": `values of ${name}` }, make("table", {}, make("thead", {}, head), make("tbody", {}, rows()))));
    }
  } }, make("summary", { text: "values" }));
  const figure = make("figure", { class: "chart" }, make("figcaption", { text: name }), box, legend, table);
  const plot = () => {
    const styles = getComputedStyle(document.documentElement);
    const soft = styles.getPropertyValue("--soft"), hair = styles.getPropertyValue("--hair");
    const raw = options.smooth > 0;
    const data = [xs, ...columns.flatMap((c) => (raw ? [c, smoothed(c, options.smooth)] : [c]))];
    const line = (i, faint) => ({ stroke: colour(i) + (faint ? "55" : ""), width: faint ? 1 : 2, spanGaps: true, points: { show: xs.length < 3 } });
    const series = [{}, ...lines.flatMap((_, i) => (raw ? [line(i, true), line(i, false)] : [line(i, false)]))];
    const axis = { stroke: soft, grid: { stroke: hair, width: 1 }, ticks: { stroke: hair, width: 1 }, font: "11px system-ui, sans-serif" };
    const values_ = (u, ticks) => ticks.map((v) => (Math.abs(v) >= 1e4 || (v && Math.abs(v) < 1e-3) ? v.toExponential(0) : String(v)));
    const [from, to] = options.range, span = (low, high) => (high > low ? [low, high] : [low - 0.5, low + 0.5]);
    new uPlot({
      width: Math.max(200, box.clientWidth), height: 190, legend: { show: false }, series,
      scales: { x: { time: false, range: (u, min, max) => (min === null ? [null, null] : span(from ?? min, to ?? max)) } },
      axes: [{ ...axis, values: values_ }, { ...axis, size: 52, values: values_ }],
      cursor: { drag: { x: true, y: false, setScale: false }, sync: { key: "steps" } },
      hooks: {
        drawClear: [(u) => {
          u.ctx.fillStyle = `${styles.getPropertyValue("--bad").trim()}22`;
          for (const { step, last } of alarms) {
            const [left, right] = [step - 0.5, (last ?? xs.at(-1)) + 0.5].map((v) => Math.min(Math.max(u.valToPos(v, "x", true), u.bbox.left), u.bbox.left + u.bbox.width));
            u.ctx.fillRect(left, u.bbox.top, right - left, u.bbox.height);
          }
        }],
        setSelect: [(u) => {
          const at = [u.select.left, u.select.left + u.select.width].map((p) => u.posToVal(p, "x"));
          if (u.select.width > 4) onRange(at.map(Math.round));
        }],
        setCursor: [(u) => {
          const i = u.cursor.idx;
          [...legend.children].forEach((key, k) => { key.lastChild.textContent = format(i === null || i === undefined ? lines[k].y.at(-1) : columns[k][i]); });
          figure.firstChild.textContent = i === null || i === undefined ? clean(name) : `${clean(name)} \u00b7 step ${xs[i]}`;
        }],
      },
    }, data, box);
  };
  return { figure, plot };
}

VIEWS.curves = async (at, body) => {
  const names = [at.get("run"), ...(at.get("with") || "").split(",").filter(Boolean)];
  const runs = await Promise.all([...new Set(names)].map(run));
  const stages = [...new Set(runs.flatMap((r) => Object.keys(r.series)))].sort((a, b) => (b === "rl") - (a === "rl"));
  const options = { smooth: Number(at.get("smooth") || 0), range: ["from", "to"].map((n) => (at.get(n) ? Number(at.get(n)) : null)) };
  let stage = stages.includes(at.get("stage")) ? at.get("stage") : stages[0], words = at.get("metric") || "";
  const grid = make("div", { class: "charts" }), all = make("div", { class: "charts" });
  const ends = ["from", "to"].map((name, i) => make("input", { type: "number", step: "any", value: options.range[i] ?? "", onchange: (e) => {
    options.range[i] = e.target.value === "" ? null : Number(e.target.value);
    note({ [name]: e.target.value });
    fill();
  } }));
  const onRange = (range) => {
    range.forEach((v, i) => { options.range[i] = v; ends[i].value = v ?? ""; });
    note({ from: range[0], to: range[1] });
    fill();
  };
  const rest = make("details", { class: "rest" }, make("summary"), all);
  const seen = new IntersectionObserver((entries) => entries.forEach((e) => {
    if (e.isIntersecting && e.target.draw) { e.target.draw(); e.target.draw = null; seen.unobserve(e.target); }
  }), { rootMargin: "300px" });
  function put(where, metrics) {
    where.replaceChildren(...metrics.map((name) => {
      const lines = runs.map((r) => ({ name: r.name, ...(r.series[stage]?.[name] || { x: [], y: [] }) })).filter((l) => l.x.length);
      const own = runs.flatMap((r) => r.facts.alarms.filter((a) => a.stage === stage && name.startsWith(a.metric)));
      const { figure, plot } = chart(name, lines, options, onRange, own);
      figure.draw = plot;
      figure.addEventListener("dblclick", () => onRange([null, null]));
      seen.observe(figure);
      return figure;
    }));
  }
  function fill() {
    const every = [...new Set(runs.flatMap((r) => Object.keys(r.series[stage] || {})))];
    const score = runs[0].facts.score, first = [`eval/${score}`, `eval/${score}_sampled`, `reward/${score}`, ...FIRST].filter((n) => every.includes(n));
    const wanted = words ? every.filter((n) => n.toLowerCase().includes(words.toLowerCase())).sort() : first;
    for (const r of runs) { // what a task costs is no step, and still what a score is to be seen over
      const own = r.series[stage] || {}, cost = own["eval/cost"], paid = own[`eval/${score}`];
      if (cost && paid) own[AGAINST] = { x: cost.y.filter((_, i) => paid.x.includes(cost.x[i])), y: cost.x.filter((x) => paid.x.includes(x)).map((x) => paid.y[paid.x.indexOf(x)]) };
    }
    if (!words && runs.some((r) => r.series[stage]?.[AGAINST])) wanted.push(AGAINST);
    const others = every.filter((n) => !wanted.includes(n) && n !== AGAINST).sort();
    put(grid, wanted);
    rest.firstChild.textContent = `${others.length} more metrics`;
    rest.hidden = !others.length;
    rest.ontoggle = () => { if (rest.open) put(all, others); };
    if (rest.open) put(all, others);
  }
  const controls = make("form", { class: "filters", onsubmit: (e) => e.preventDefault() },
    choose("stage", stage, stages.map((s) => [s, s]), (s) => { stage = s; note({ stage }); fill(); }),
    field("metric", { type: "search", value: words, oninput: (e) => { words = e.target.value; note({ metric: words }); fill(); } }),
    field("smoothing", { type: "range", min: 0, max: 0.99, step: 0.01, value: options.smooth, onchange: (e) => { options.smooth = Number(e.target.value); note({ smooth: options.smooth || "" }); fill(); } }),
    make("label", {}, "steps from", ends[0]), make("label", {}, "to", ends[1]),
    make("button", { type: "button", onclick: () => onRange([null, null]) }, "all steps"));
  add(body, ...runs.length > 1 ? [difference(runs)] : [make("p", { class: "note", text: runs[0].facts.about }), tiles(runs[0].facts)]);
  let raised = alarmList(runs);
  add(body, raised, controls, grid, rest, await failures(runs[0]));
  fill();
  return async () => {
    const news = await Promise.all(runs.map((r) => r.refresh()));
    if (!news.some(Boolean)) return;
    await Promise.all(runs.map((r) => r.ask()));
    raised.replaceWith(raised = alarmList(runs));
    fill();
  };
};

// What went wrong by name, the newest first, with links to the curves that show it.
function alarmList(runs) {
  const all = runs.flatMap((r) => r.facts.alarms.map((a) => ({ ...a, run: r.name })).reverse());
  return make("section", { class: "alarms", hidden: !all.length }, make("h2", { text: "Alarms" }), make("ul", {}, all.map((a) => make("li", {},
    make("a", { href: link("curves", { run: a.run, stage: a.stage, metric: a.metric }) }, `${a.name}, ${a.stage} step ${a.step} to ${a.last ?? "now"}`),
    `${runs.length > 1 ? ` (${a.run})` : ""}: ${a.sin} (${a.says}: ${format(a.value)}, more than ${format(a.threshold)}). Look at config.${a.knob}.`))));
}

function tiles(facts) {
  return make("dl", { class: "tiles" }, facts.tiles.map((t) => make("div", { class: "tile" },
    make("dt", { text: t.title }),
    make("dd", { class: t.bad ? "bad" : "" }, t.from === undefined || t.from === null ? "" : `${format(t.from)} \u2192 `, t.value === null ? "nothing was measured" : format(t.value)),
    t.more && make("dd", { class: "note", text: t.more }))));
}

// Config fields in which runs differ.
function difference(runs) {
  const flat = (value, path, out) => {
    if (value && typeof value === "object" && !Array.isArray(value)) for (const [k, v] of Object.entries(value)) flat(v, path ? `${path}.${k}` : k, out);
    else out[path] = JSON.stringify(value);
    return out;
  };
  const configs = runs.map((r) => flat(r.facts.config, "", {}));
  const fields = [...new Set(configs.flatMap(Object.keys))].filter((f) => new Set(configs.map((c) => c[f])).size > 1).sort();
  const head = make("tr", {}, make("th", { scope: "col", text: "config" }), runs.map((r) => make("th", { scope: "col", text: r.name })));
  const rows = fields.map((f) => make("tr", {}, make("th", { scope: "row", text: f }), configs.map((c) => make("td", { text: c[f] ?? "\u2013" }))));
  return make("details", { class: "rest", open: fields.length < 12 }, make("summary", { text: `${fields.length} config fields differ` }),
    make("div", { class: "table", tabindex: 0, role: "region", "aria-label": "differences of configs" }, make("table", {}, make("thead", {}, head), make("tbody", {}, rows))));
}

// Failed episodes of all logs by what they said first.
async function failures(one) {
  const counts = new Map();
  for (const log of one.facts.logs) {
    const table = await one.table(log);
    for (let r = 0; r < table.n; r++) {
      if (!FAILED.has(table.stop[r])) continue;
      const why = `${log}\n${table.stop[r]}\n${table.error[r].replace(/[0-9]+/g, "#").slice(0, 80)}`;
      const entry = counts.get(why) || { count: 0, first: table.step[r], error: table.error[r], stop: table.stop[r], log };
      entry.count += 1;
      counts.set(why, entry);
    }
  }
  const list = [...counts.values()].sort((a, b) => b.count - a.count).slice(0, 30);
  return make("section", { class: "failures" }, make("h2", { text: "What failed" }), list.length
    ? make("ul", {}, list.map((e) => make("li", {}, make("a", { href: link("episodes", { run: one.name, log: e.log, stop: e.stop }) },
      `${e.count} \u00d7 ${e.stop} in ${e.log}, first at step ${e.first}`), `: ${e.error || "nothing was said"}`)))
    : make("p", { class: "note", text: "No episode failed." }));
}

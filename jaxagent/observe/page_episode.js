// One episode: its facts, where its time went, its conversations in their order, as text or token by token.

const KINDS = ["prompt", "policy", "observation", "warning"];
const COLOURED = [["logprob", "log-prob"], ["gap", "trainer less engine"], ["advantage", "advantage"], ["none", "nothing"]];
const FOLD = 700; // characters of what others wrote, above which it is folded
const shownAs = { mode: "text", by: "logprob" };

const spread = (counts) => {
  const out = [];
  for (let i = 0; i < counts.length; i += 2) for (let k = 0; k < counts[i]; k++) out.push(counts[i + 1]);
  return out;
};
// [{ text, kind, turn, logprob, version, gap, advantage, mask }] of a window.
function tokensOf(w) {
  const turns = spread(w.turn), versions = spread(w.version);
  let a = 0;
  return w.text.map((text, i) => {
    const token = { at: w.first + i, text, kind: Number(w.kind[i]), turn: turns[i] };
    if (token.kind === 1) {
      Object.assign(token, { logprob: w.logprob[a], version: versions[a], gap: w.gap?.[a], advantage: w.advantage?.[a], counted: w.mask ? w.mask[a] === "1" : undefined });
      a += 1;
    }
    return token;
  });
}
// [text] or [head, left out, tail] as elements.
const parts = (cut) => (cut.length === 1 ? [cut[0]] : [cut[0], make("em", { class: "left", text: ` ${cut[1].toLocaleString("en")} characters are left out ` }), cut[2]]);

const about = (t) => [
  `token ${t.at}`, JSON.stringify(clean(t.text)), KINDS[t.kind], `turn ${t.turn + 1}`,
  ...(t.kind === 1 ? [`log-prob ${format(t.logprob)}`, `p ${format(t.logprob === null ? NaN : Math.exp(t.logprob))}`, `policy version ${t.version}`,
    t.gap === undefined || t.gap === null ? "" : `trainer less engine ${format(t.gap)}`,
    t.advantage === undefined ? "" : `advantage ${format(t.advantage)}`, t.counted === undefined ? "" : t.counted ? "counts in the loss" : "does not count in the loss"] : []),
].filter(Boolean).join(", ");

function strength(t, by, most) {
  if (by === "logprob") return [t.logprob === null ? 0 : Math.min(1, -t.logprob / 3), "--tone"];
  const value = t[by];
  if (value === undefined || value === null) return [0, "--tone"];
  return [Math.min(1, Math.abs(value) / (most || 1)), value < 0 ? "--minus" : "--plus"];
}

function tokenView(tokens, inspector) {
  const block = make("div", { class: "tokens", tabindex: 0, role: "group", "aria-label": "tokens; the arrow keys go from one to the next" });
  const most = Math.max(...tokens.map((t) => Math.abs(t[shownAs.by] || 0)), 0);
  const spans = tokens.map((t) => {
    const span = make("span", { class: `k${t.kind}${t.counted === false ? " masked" : ""}` }, t.text.replaceAll("\n", "\u21b5\n"));
    if (t.kind === 1 && shownAs.by !== "none") {
      const [s, tone] = strength(t, shownAs.by, most);
      span.style.backgroundColor = `rgb(var(${tone}) / ${(0.06 + 0.4 * s).toFixed(3)})`;
    }
    return span;
  });
  const places = new Map(spans.map((s, i) => [s, i]));
  let at = -1;
  const go = (i) => {
    if (i < 0 || i >= spans.length) return;
    spans[at]?.classList.remove("here");
    spans[(at = i)].classList.add("here");
    inspector.textContent = about(tokens[i]);
  };
  block.addEventListener("pointerover", (e) => { if (places.has(e.target)) go(places.get(e.target)); });
  block.addEventListener("keydown", (e) => {
    if (e.key === "ArrowRight" || e.key === "ArrowLeft") {
      e.preventDefault();
      e.stopPropagation();
      go(at + (e.key === "ArrowRight" ? 1 : -1));
    }
  });
  block.append(...spans);
  return block;
}

function textView(tokens) {
  const out = [];
  for (const t of tokens) {
    const last = out.at(-1);
    if (last && last.kind === t.kind && last.turn === t.turn) { last.text += t.text; last.n += 1; } else out.push({ kind: t.kind, turn: t.turn, text: t.text, n: 1 });
  }
  return out.map(({ kind, turn, text, n }) => {
    const title = `${KINDS[kind]}${kind === 0 ? "" : `, turn ${turn + 1}`} \u00b7 ${n} tokens`, content = make("pre", { text });
    if (kind === 1 || text.length <= FOLD) return make("section", { class: `part k${kind}` }, make("h4", { text: title }), content);
    return make("details", { class: `part k${kind}` }, make("summary", {}, title, make("span", { class: "begin", text: ` ${text.slice(0, 90).replace(/\s+/g, " ")}` })), content);
  });
}

// One trajectory: its windows, and between them more when it is asked for.
function trajectory(one, log, row, number, t, inspector) {
  const box = make("div"), windows = [...t.windows];
  const fill = () => {
    box.replaceChildren(...windows.flatMap((w, i) => {
      const tokens = tokensOf(w), end = w.first + w.text.length, next = windows[i + 1]?.first ?? t.length;
      const view = shownAs.mode === "tokens" ? [tokenView(tokens, inspector)] : textView(tokens);
      if (next <= end) return view;
      return [...view, make("p", {}, make("button", { type: "button", disabled: !!embedded, onclick: async () => {
        const more = await values("window", { run: one.name, log, row, trajectory: number, from: end });
        for (const name of ["text"]) more[name] = more[name].slice(0, next - end);
        windows.splice(i + 1, 0, more);
        fill();
      } }, `${(next - end).toLocaleString("en")} tokens between: show more`))];
    }));
  };
  fill();
  return { box, fill };
}

function times(metrics) {
  const names = Object.keys(metrics).filter((n) => n.endsWith("_s") && n !== "total_s" && metrics[n] > 0);
  const inner = ["queue_s", "prefill_s", "decode_s"].some((n) => metrics[n] > 0) ? names.filter((n) => n !== "engine_s") : names;
  const sum = inner.reduce((s, n) => s + metrics[n], 0), total = Math.max(metrics.total_s || 0, sum);
  if (!total) return null;
  const list = [...inner.map((n) => [n.slice(0, -2), metrics[n]]), ["rest", total - sum]].filter(([, v]) => v > total / 1000);
  return make("div", { class: "times" }, make("div", { class: "bar", "aria-hidden": "true" }, list.map(([, v], i) => {
    const part = make("i");
    part.style.width = `${(100 * v) / total}%`;
    part.style.setProperty("--c", `var(--c${i % 8})`);
    return part;
  })), make("p", { class: "legend" }, list.map(([name, v], i) => {
    const key = make("span", { class: "key" }, `${name} ${format(v)} s`);
    key.style.setProperty("--c", `var(--c${i % 8})`);
    return key;
  }), ` of ${format(total)} s`));
}

// The whole of an episode, as it is shown alone and beside another.
function episodeBox(one, log, row, e) {
  const inspector = make("p", { class: "inspector", "aria-live": "polite", text: "Point at a token, or choose the tokens and use the arrow keys." });
  const drawn = [], talks = [];
  const heard = (h) => make("section", { class: "talk heard" }, make("h3", {}, h.role, make("small", { text: " not trained" })),
    h.turns.map(([shown, reply]) => [make("pre", { class: "shown" }, parts(shown)), make("pre", { class: "reply" }, parts(reply))]),
    h.more ? make("p", { class: "note", text: `${h.more} more turns are left out` }) : null);
  e.trajectories.forEach((t, i) => {
    talks.push(...e.heard.filter((h) => h.after === i).map(heard));
    const { box, fill } = trajectory(one, log, row, i, t, inspector);
    drawn.push(fill);
    const title = e.trajectories.length > 1 ? `policy, conversation ${i + 1} of ${e.trajectories.length}` : "policy";
    talks.push(make("section", { class: "talk" }, make("h3", {}, title, make("small", { text: ` ${t.length} tokens` })), box));
  });
  talks.push(...e.heard.filter((h) => h.after >= e.trajectories.length).map(heard));
  if (e.text) talks.push(make("pre", { class: "shown" }, parts(e.text)));
  const rewards = Object.entries(e.rewards).map(([n, v]) => `${n} ${format(v)}`).join(", ");
  const redraw = () => {
    inspector.hidden = shownAs.mode !== "tokens";
    drawn.forEach((fill) => fill());
  };
  const has = (name) => e.trajectories.some((t) => t.windows.some((w) => w[name]));
  const gaps = has("gap") ? "" : one.facts.summary.logprob_gap_max === 0 ? " Trainer and engine agreed to the bit in every step of this run." : " The trainer's log-probs were not kept.";
  const controls = make("div", { class: "filters" },
    choose("show", shownAs.mode, [["text", "text"], ["tokens", "tokens"]], (m) => { shownAs.mode = m; redraw(); }),
    choose("colour by", shownAs.by, COLOURED, (by) => { shownAs.by = by; shownAs.mode = "tokens"; controls.querySelector("select").value = "tokens"; redraw(); }));
  inspector.hidden = shownAs.mode !== "tokens";
  return make("div", { class: "one" },
    make("p", { class: "question" }, parts(e.prompt)),
    make("p", {}, "reward ", e.reward === null ? make("b", { class: "bad", text: "failed" }) : make("b", { class: e.reward > 0 ? "good" : "", text: format(e.reward) }),
      rewards && ` (${rewards})`, ` \u00b7 ended by ${e.stop} \u00b7 ${e.turns} turns`, e.kind && ` \u00b7 ${e.kind}`),
    e.turn_rewards.length ? make("p", { class: "note", text: `rewards of turns: ${e.turn_rewards.map(format).join(", ")}` }) : null,
    e.answers.length ? make("p", { class: "note" }, "gold: ", e.answers.map((a, i) => [i ? ", " : "", ...parts(a)]).flat()) : null,
    e.error.length > 1 || e.error[0] ? make("p", { class: "bad" }, parts(e.error)) : null,
    times(e.metrics),
    make("details", {}, make("summary", { text: "counters and times" }), make("dl", { class: "facts" }, Object.entries(e.metrics).map(([n, v]) => [make("dt", { text: n }), make("dd", { text: format(v) })]))),
    controls, has("advantage") ? null : make("p", { class: "note", text: "This episode was not trained on." }),
    gaps && make("p", { class: "note", text: gaps }), inspector, talks);
}

VIEWS.episode = async (at, body) => {
  const one = await run(at.get("run")), log = at.get("log"), row = Number(at.get("row")), table = await one.table(log);
  const r = row - table.first, e = await one.episode(log, row), task = table.names[table.task[r]];
  const near = listed.key === `${one.name} ${log}` && listed.rows.includes(r) ? listed.rows : null, place = near ? near.indexOf(r) : r;
  const neighbour = (by) => {
    const next = near ? near[place + by] : r + by;
    return next !== undefined && next >= 0 && next < table.n ? open_(one.name, log, table, next) : null;
  };
  const hop = (by, text, key) => (neighbour(by) ? make("a", { href: neighbour(by), class: "hop", "aria-keyshortcuts": key }, text) : null);
  add(body, make("h1", {}, task ?? `episode ${row}`, make("small", { text: ` ${log}, step ${table.step[r]}, ${table.attempt(r)}` })),
    make("p", { class: "hops" }, hop(-1, "previous (k)", "k"), hop(1, "next (j)", "j"),
      make("a", { class: "hop", href: link("group", { run: one.name, log, step: table.step[r], task }), "aria-keyshortcuts": "g" }, "its group (g)"),
      make("a", { class: "hop", href: link("episodes", { run: one.name, log }), "aria-keyshortcuts": "l" }, "the list (l)")),
    verifier(one, log, table.step[r]),
    e ? episodeBox(one, log, row, e) : make("p", { class: "note", text: embedded ? "This file does not have the episode: jaxagent.view shows it." : "Its tokens were given up, as config.episodes says; the row of the index is all there is." }));
  return null;
};
addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || /^(INPUT|SELECT|TEXTAREA)$/.test(event.target.tagName)) return;
  const wanted = document.querySelector(`a[aria-keyshortcuts="${CSS.escape(event.key)}"]`);
  if (wanted) wanted.click();
});

// A button that has the step made again, and what came of it. Only where the step was recorded, and a server is there.
function verifier(one, log, step) {
  const stage = log.split(".")[0];
  if (embedded || log !== stage || !(one.facts.recorded[stage] || []).includes(step)) return null;
  const out = make("div", { role: "status" }), box = make("div", { class: "verify" });
  const show = (v) => {
    if (v.state === "none") return;
    const words = { passed: "equal to the bit", failed: "something differs", incomplete: "incomplete", "not made": "it could not be made again" };
    out.replaceChildren(make("p", { class: v.state === "running" ? "" : v.verdict === "passed" ? "good" : "bad" },
      make("b", { text: v.state === "running" ? `step ${step} is being made again \u2026` : `step ${step}: ${v.verdict}, ${words[v.verdict]}` }),
      v.checked ? ` (${v.checked.episodes} episodes sampled again, ${v.differences} differences)` : ""),
      v.lines && v.lines.length ? make("details", { open: v.state === "ended" && v.verdict !== "passed" }, make("summary", { text: "what it said" }), make("pre", { text: v.lines.join("\n") })) : "");
  };
  const watch = async () => {
    const v = await values("verdict", { run: one.name, stage, step });
    show(v);
    button.disabled = v.state === "running";
    if (v.state === "running" && box.isConnected) setTimeout(watch, 1000);
  };
  const button = make("button", { type: "button", onclick: async () => {
    button.disabled = true;
    try {
      show(await (await ask("verify", {}, { method: "POST", body: JSON.stringify({ run: one.name, step, stage }), headers: { "Content-Type": "application/json" } })).json());
      setTimeout(watch, 1000);
    } catch (error) {
      out.replaceChildren(make("p", { class: "bad", text: error.message }));
      button.disabled = false;
    }
  } }, `verify step ${step}`);
  box.append(button, out);
  setTimeout(() => watch().catch(() => {}), 0);
  return box;
}

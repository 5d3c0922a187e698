// The board's own script. All requests carry the token, which comes from the address (#token=...) or is typed in; news come as a stream of lines.
themeSwitch($("theme"));
const runs = new Map(), chosen = new Set(), order = [], body = $("table").tBodies[0];
let byHand = false, drift = 0, F = null, opened = null, sorted = null;
const now = () => Date.now() / 1000 + drift;
const span = t => t == null ? "" : t < 90 ? `${Math.round(t)} s` : t < 5400 ? `${Math.round(t / 60)} min` : t < 172800 ? `${(t / 3600).toFixed(1)} h` : `${Math.round(t / 86400)} days`;
const ago = t => t ? `${span(Math.max(0, now() - t))} ago` : "";
const pill = (text, kind) => h("span", { class: `pill ${kind || text}` }, text);
const card = (value, text) => h("div", { class: "card" }, h("b", {}, value), h("span", {}, text));
const nameOf = r => r.id;
const used = r => (r.headline || "personal") === "personal" ? "" : ` (${r.headline})`;
const scored = r => r.score == null ? "" : r.metric?.percent === false ? `${r.metric.name} ${r.score.toPrecision(4)}${used(r)}` : number(r.score) + used(r);
const colour = id => { if (!order.includes(id)) order.push(id); return order.indexOf(id); };

let token = "";
const withToken = () => ({ headers: { "x-coterie-token": token } });
async function read(url) { try { return await fetch(url, withToken()); } catch { return { ok: false }; } } // the page says elsewhere that the board is gone

// ---- news ----
const live = (text, kind) => { $("live").textContent = text; $("live").className = `pill ${kind}`; };
async function listen() {
  const mine = token;
  try {
    const news = await fetch("/api/stream", withToken()); if (news.status === 401) { lock("this board needs the token that `coterie board` printed"); return; } if (!news.ok) throw new Error(news.statusText);
    live("live", "live"); const reader = news.body.pipeThrough(new TextDecoderStream()).getReader(); let rest = "";
    for (;;) { const { done, value } = await reader.read(); if (done) throw new Error("the board has ended"); const parts = (rest + value).split("\n\n"); rest = parts.pop(); for (const p of parts) if (p.startsWith("data: ")) heard(JSON.parse(p.slice(6))); }
  } catch { live("connection lost, trying again", "lost"); setTimeout(() => { if (mine === token) listen(); }, 3000); }
}
function heard(m) {
  drift = m.now - Date.now() / 1000; for (const r of m.runs) runs.set(r.id, r); for (const id of m.gone) { runs.delete(id); chosen.delete(id); } F = m.federation;
  $("where").textContent = `Runs in ${m.root}` + (m.of ? `; federation in ${m.of}` : ""); choose(); draw(); if (opened && m.runs.some(r => r.id === opened)) refreshOpen();
}
function choose() { // until somebody chooses: what runs, or else what changed last
  if (byHand) return; chosen.clear(); const all = [...runs.values()].filter(r => r.round > 0), live = all.filter(r => r.state === "running");
  const newest = all.sort((a, b) => b.changed - a.changed), near = newest.filter(r => newest[0].changed - r.changed < 3600);
  for (const r of [...live, ...near].slice(0, 10)) chosen.add(r.id);
}

// ---- table ----
function row(r) {
  const tr = h("tr", { "data-id": r.id }); const cells = {};
  const add = (name, attrs = {}, ...kids) => { const c = h(name === "run" ? "th" : "td", attrs, ...kids); cells[name] = c; tr.append(c); return c; };
  add("run", { scope: "row" }, h("button", { type: "button", class: "open", onclick: () => openRun(r.id) }, r.id));
  const box = h("input", { type: "checkbox", "aria-label": `show ${r.id} in the chart` }); box.onchange = () => { byHand = true; box.checked ? chosen.add(r.id) : chosen.delete(r.id); curves(); }; add("chart", {}, box);
  for (const c of ["method", "data", "seed", "round", "score", "sent", "seconds", "left", "state", "changed", "remarks"]) add(c, { class: c === "remarks" ? "note" : ["method", "data", "state"].includes(c) ? "text link" : null });
  cells.round.append(h("span"), " ", h("progress", { max: 1, value: 0, "aria-label": "rounds done" })); cells.state.append(pill("", "")); tr.cells_ = cells; tr.box = box; return tr;
}
function fill(tr, r) {
  const c = tr.cells_, set = (cell, text, v) => { if (cell.textContent !== text) cell.textContent = text; cell.dataset.v = v ?? text; };
  set(c.method, r.title || "", r.title); set(c.data, [r.data, r.partition].filter(x => x).join(", ")); set(c.seed, r.seed == null ? "" : String(r.seed), r.seed ?? "");
  c.round.firstChild.textContent = `${r.round}/${r.rounds}`; c.round.lastChild.value = r.rounds ? r.round / r.rounds : 0; c.round.dataset.v = r.round; c.round.dataset.csv = r.round;
  set(c.score, scored(r), r.score ?? ""); set(c.sent, r.bytes == null ? "" : size(r.bytes), r.bytes ?? ""); set(c.seconds, r.seconds == null ? "" : r.seconds.toFixed(2), r.seconds ?? ""); set(c.left, r.state === "running" && r.left != null ? span(r.left) : "", r.state === "running" ? r.left ?? "" : "");
  const p = c.state.firstChild; p.textContent = r.state; p.className = `pill ${r.state}`; c.state.dataset.v = r.state; set(c.changed, ago(r.changed), r.changed || "");
  const remarks = [r.trouble, r.failed ? `${r.failed} client failures` : "", r.nonfinite ? `training diverged: ${r.nonfinite} uploads not finite` : "", ...(r.warnings || [])].filter(x => x).join("; "); set(c.remarks, remarks); tr.box.checked = chosen.has(r.id);
}
const fits = r => { const t = $("filter").value.trim().toLowerCase(), s = $("state").value; return (!s || r.state === s) && (!t || [r.id, r.title, r.method, r.data, r.partition].some(x => String(x || "").toLowerCase().includes(t))); };
function table() {
  const have = new Map([...body.rows].map(tr => [tr.dataset.id, tr])); let shown = 0;
  for (const [id, tr] of have) if (!runs.has(id)) tr.remove();
  const all = [...runs.values()].sort((a, b) => (b.state === "running") - (a.state === "running") || (a.id < b.id ? -1 : 1)), fresh = all.some(r => !have.has(r.id));
  for (const r of all) { let tr = have.get(r.id); if (!tr) { tr = row(r); body.append(tr); } fill(tr, r); const ok = fits(r); tr.classList.toggle("hidden", !ok); shown += ok; }
  if (sorted) sortBy($("table"), ...sorted); else if (fresh) body.append(...all.map(r => [...body.rows].find(tr => tr.dataset.id === r.id)));
  $("count").textContent = shown === runs.size ? `${shown} runs` : `${shown} of ${runs.size} runs`;
}
sortable($("table")); $("table").tHead.querySelectorAll("th button").forEach(b => b.addEventListener("click", () => { const th = b.closest("th"); sorted = [th.cellIndex, th.getAttribute("aria-sort")]; }));
$("filter").oninput = $("state").onchange = table;
$("csv").onclick = () => saveCsv("runs.csv", [["run", "method", "data", "partition", "seed", "round", "rounds", "metric", "score", "bytes", "seconds per round", "state"], ...[...runs.values()].filter(fits).map(r => [r.id, r.title, r.data, r.partition, r.seed, r.round, r.rounds, r.metric?.label, r.score, r.bytes, r.seconds, r.state])]);

// ---- curves ----
function series(r, view, axis) {
  const c = r.curves[view]; if (!c) return null; if (axis === "x") return { name: r.id, i: colour(r.id), x: c.x, y: c.y };
  return { name: r.id, i: colour(r.id), x: c.mb, y: c.y, round: c.x };
}
// runs that differ in their seed only, as one line with a band of one standard deviation
function overSeeds(ids, view, axis) {
  const groups = new Map(); for (const id of ids) { const g = runs.get(id).group || id; groups.set(g, [...(groups.get(g) || []), id]); }
  return [...groups.values()].map(members => {
    const lines = members.map(id => series(runs.get(id), view, axis)).filter(x => x); if (!lines.length) return null; const at = lines.map(l => l.round || l.x), name = members[0].replace(/[-_]?s(eed)?[-_]?\d+$/, "") || members[0];
    if (lines.length < 2) return lines[0]; const x = at[0].filter(t => at.every(a => a.includes(t))), pick = (l, a, t, of) => l[of][a.indexOf(t)], rows = x.map(t => lines.map((l, k) => pick(l, at[k], t, "y"))), mean = row => row.reduce((a, b) => a + b, 0) / row.length;
    return { name: `${name} (${lines.length} seeds)`, i: lines[0].i, x: axis === "x" ? x : x.map(t => mean(lines.map((l, k) => pick(l, at[k], t, "x")))), round: axis === "x" ? null : x, y: rows.map(mean), s: rows.map(r => { const m = mean(r); return Math.sqrt(r.reduce((a, v) => a + (v - m) ** 2, 0) / (r.length - 1)); }) };
  }).filter(x => x);
}
const metrics = ids => [...new Set(ids.map(id => runs.get(id)?.metric?.label).filter(x => x))];
const viewOptions = (view, axis, ids, more = {}) => ({ percent: ["personal", "participants"].includes(view) && ids.every(id => runs.get(id)?.metric?.percent !== false), zero: view === "megabytes", integerX: axis === "x", digits: view === "loss" || ids.some(id => runs.get(id)?.metric?.percent === false) ? 3 : 1, xLabel: axis === "x" ? "round" : "sent so far (MB)", yLabel: { loss: "training loss", megabytes: "MB" }[view] || metrics(ids).join(" or "), height: 340, ...more });
function curves() {
  const view = $("view").value, axis = $("axis").value, mine = [...chosen].filter(id => runs.has(id)).sort(), grouped = $("seeds").checked, linked = [];
  const seeds = new Set(mine.map(id => runs.get(id).group)); $("by-seed").classList.toggle("hidden", seeds.size === mine.length);
  const kinds = ["loss", "megabytes"].includes(view) || !mine.length ? [""] : metrics(mine).length ? metrics(mine) : [""], box = $("plots"); // a chart for each metric
  while (box.children.length > kinds.length) box.lastChild.remove();
  kinds.forEach((kind, k) => { if (!box.children[k]) box.append(s("svg", { class: "chart", id: k ? `plot-${k}` : "plot", viewBox: "0 0 800 340", role: "img", "aria-label": "Curves of the chosen runs" }));
    const ids = mine.filter(id => !kind || runs.get(id).metric?.label === kind), lines = grouped ? overSeeds(ids, view, axis) : ids.map(id => series(runs.get(id), view, axis)).filter(x => x);
    lineChart(box.children[k], lines, viewOptions(view, axis, ids, { empty: mine.length ? "no such numbers yet" : "choose runs in the table", smooth: +$("smooth").value, range, zoom: zoomTo, linked, height: kinds.length > 1 ? 260 : 340, direct: grouped }), $("tip")); });
  $("unzoom").classList.toggle("hidden", !range);
  $("legend").replaceChildren(...mine.map(id => h("button", { type: "button", "aria-pressed": "true", title: "take out of the chart", onclick: () => { byHand = true; chosen.delete(id); draw(); } }, key(colour(id)), id)));
}
let range = null; function zoomTo(to) { range = to; curves(); }
$("view").onchange = $("seeds").onchange = $("smooth").oninput = curves; $("axis").onchange = $("unzoom").onclick = () => zoomTo(null);
for (const [kind, save] of [["svg", saveSvg], ["png", savePng]]) $(kind).onclick = () => [...$("plots").children].forEach((svg, k) => save(svg, k ? `runs-${k + 1}` : "runs"));

// ---- summary and federation ----
function cards() {
  const all = [...runs.values()], n = s => all.filter(r => r.state === s).length, left = Math.max(0, ...all.filter(r => r.state === "running").map(r => r.left || 0));
  $("cards").replaceChildren(card(String(n("running")), "running"), card(String(n("finished")), "finished"), card(String(n("stopped")), "stopped"), ...(n("damaged") ? [card(String(n("damaged")), "damaged")] : []), card(size(all.reduce((a, r) => a + (r.bytes || 0), 0)), "sent in all"), ...(left ? [card(span(left), "until the last one ends")] : []));
}
function scoreCard(text) { const m = /^(.*?) *(-?[0-9.]+(?:e[+-]?[0-9]+)?|nan|-?inf)$/.exec(text || ""); return card(m ? m[2] : "–", m && m[1] || "score"); } // "C-index 0.6" is a name and a number
// equal texts once, with their number, the newest first
function folded(items, text = x => x, where = () => "") { const found = new Map(); for (const x of items) { const t = text(x); found.set(t, [...(found.get(t) || []), x]); } return [...found].reverse().map(([t, all]) => (all.length > 1 ? `${all.length} times: ` : "") + t + where(all)).join("\n"); }
const some = (all, most = 6) => { const u = [...new Set(all)]; return u.slice(0, most).join(", ") + (u.length > most ? ` and ${u.length - most} more` : ""); };
const inRounds = all => { const r = all.map(w => w.round), a = Math.min(...r), b = Math.max(...r), c = some(all.map(w => w.client)); return ` (round${a === b ? ` ${a}` : `s ${a} to ${b}`}, client${c.includes(",") ? "s" : ""} ${c})`; };
function node(d) {
  const seen = d.last_seen ? `last seen ${ago(d.last_seen)}` : "not seen yet";
  return h("div", { class: "node" + (d.online ? "" : " off"), "data-node": d.name }, h("b", {}, d.name), pill(d.online ? "online" : d.last_seen ? "gone" : "absent"), h("small", {}, [d.client == null ? d.role : `client ${d.client}`, d.online ? "" : seen, d.round == null ? "" : `last upload: round ${d.round}`, d.uploads == null || d.role === "edge" ? "" : `${d.uploads} uploads`].filter(x => x).join(" · ")), d.out ? h("span", { class: "why" }, `not in the run: ${d.out}`) : null, ...d.refused.map(r => h("span", { class: "why" }, `refused${r.round == null ? "" : ` in round ${r.round}`}: ${r.why}`)));
}
function federation() {
  if (!$("federation") || !F) return; const t = $("f-trouble"); t.textContent = F.trouble || ""; t.classList.toggle("hidden", !F.trouble); logsOf(F.logs || []);
  if (F.state == null) { $("f-tree").replaceChildren(); return; }
  const devices = [...F.devices, ...F.edges.flatMap(e => e.devices)];
  $("f-cards").replaceChildren(h("div", { class: "card" }, h("b", {}, `${F.round}/${F.rounds}`), h("span", {}, "round")), card(`${F.online}/${Math.max(F.places, devices.length)}`, "devices online"), scoreCard(F.score), ...Object.entries(F.wire).map(([link, ways]) => card(size(Object.values(ways).reduce((a, p) => a + (p.payload || 0) + (p.framing || 0), 0)), link)), card(ago(F.heartbeat), "heartbeat"));
  const waits = F.state === "ended" ? "The run has ended." : F.waiting_for.length ? `${F.doing ? F.doing + ": " : ""}waiting for ${F.waiting_for.slice(0, 12).join(", ")}${F.waiting_for.length > 12 ? ` and ${F.waiting_for.length - 12} more` : ""}` : F.doing || "";
  if ($("f-waiting").textContent !== waits) $("f-waiting").textContent = waits;
  $("f-tree").replaceChildren(h("li", {}, h("div", { class: "node" }, h("b", {}, "cloud"), pill(F.state), h("small", {}, F.method)), h("ul", {}, ...F.edges.map(e => h("li", {}, node(e), h("ul", {}, ...e.devices.map(d => h("li", {}, node(d)))))), ...F.devices.map(d => h("li", {}, node(d))))));
  const said = F.errors.map(e => /^round (\d+)[:,]? *(.*)$/s.exec(e)).map((m, i) => m ? { round: +m[1], text: m[2] } : { text: F.errors[i] });
  $("f-errors").textContent = said.length ? folded(said, e => e.text, all => { const r = all.map(e => e.round).filter(t => t != null); return r.length ? ` (round${r.length > 1 && r[0] !== r.at(-1) ? `s ${Math.min(...r)} to ${Math.max(...r)}` : ` ${r[0]}`})` : ""; }) : "none";
}
function logsOf(names) { const s = $("f-log-of"); if ([...s.options].map(o => o.value).join() === names.join()) return; s.replaceChildren(...names.map(n => new Option(n, n))); s.closest("h3").parentNode.classList.toggle("hidden", !names.length); if (names.length) fedLog(); }
async function fedLog() { const name = $("f-log-of").value; if (!name) return; const r = await read(`/api/log?node=${encodeURIComponent(name)}`); if (r.ok) { $("f-log").textContent = await r.text() || "empty so far"; $("f-log").scrollTop = 1e9; } }
if ($("f-log-of")) $("f-log-of").onchange = fedLog;

// ---- one run ----
async function openRun(id) { opened = id; $("run-said").textContent = ""; $("run-body").replaceChildren(h("p", {}, "reading ...")); if (!$("run").open) $("run").showModal(); await refreshOpen(true); }
let busy = false;
async function refreshOpen(first) {
  if (busy && !first) return; busy = true;
  try { const id = opened, r = await read(`/api/run?run=${encodeURIComponent(id)}`), log = await read(`/api/log?run=${encodeURIComponent(id)}`); if (opened !== id) return; if (!r.ok) { const known = runs.get(id); show({ ...(known || { id, title: id, state: "damaged", curves: {}, round: 0, rounds: 0 }), settings: {}, wrong: [] }, log.ok ? await log.text() : ""); return; } show(await r.json(), log.ok ? await log.text() : ""); } finally { busy = false; }
}
let client = null;
function show(r, log) {
  $("run-title").replaceChildren(r.id, " ", pill(r.state)); $("stop").disabled = r.state !== "running" || r.federation; $("resume").disabled = !["stopped", "damaged"].includes(r.state) || r.federation;
  const S = r.clients?.ids ? r.clients : null, fact = (k, v) => v == null || v === "" ? [] : [h("dt", {}, k), h("dd", {}, v)], keep = $("run-body").querySelector("details.settings")?.open;
  const plot = s("svg", { class: "chart", viewBox: "0 0 700 260", role: "img", "aria-label": "Score of this run" }), parts = [];
  parts.push(h("dl", { class: "facts" }, ...fact("method", r.title), ...fact("data", [r.data, r.partition].filter(x => x).join(", ")), ...fact("clients", S == null && r.settings?.settings ? String(r.settings.settings.federation?.clients ?? "") : S ? String(S.ids.length) : ""), ...fact("round", `${r.round} of ${r.rounds}`), ...fact("participants", r.participants ? `${r.participants} in the last round` : ""), ...fact("score", r.score == null ? "" : `${scored(r)} (mean over clients, round ${r.evaluated})`), ...fact("sent", r.bytes == null ? "" : size(r.bytes)), ...fact("time left", r.state === "running" && r.left != null ? span(r.left) : ""), ...fact("process", r.pid == null ? "" : String(r.pid))));
  for (const w of [r.trouble, ...(r.warnings || [])]) if (w) parts.unshift(h("div", { class: "warn" }, w)); parts.push(h("figure", {}, plot));
  if (S) {
    const acc = Object.values(S.values)[0] || [], t = h("table", { class: "sortable", id: "clients-table" }, h("thead", {}, h("tr", {}, ...["client", "test samples", "labels", r.metric?.label || "score"].map((c, i) => h("th", { scope: "col", "aria-sort": i ? "none" : "ascending" }, h("button", { type: "button" }, c))))), h("tbody", {}, ...S.ids.map((id, k) => h("tr", {}, h("th", { scope: "row", "data-v": id }, h("button", { type: "button", class: "open", onclick: () => { client = id; everyClient(r, S); oneClient(r, S); } }, `client ${id}`)), h("td", {}, String(S.samples[k])), h("td", {}, String(S.labels[k].filter(n => n).length)), h("td", { "data-v": acc[k] ?? "" }, number(acc[k], r.metric?.percent === false ? 3 : 1))))));
    sortable(t); parts.push(h("h3", {}, "Clients", h("small", {}, " at the last evaluation; open one to see its labels and its curve")), h("figure", {}, s("svg", { class: "chart", id: "all-clients", viewBox: "0 0 700 230", role: "img", "aria-label": "All clients over the rounds" }), h("figcaption", { class: "tip", id: "all-tip" })), h("div", { id: "one-client" }), h("div", { class: "tall", style: "max-height:16rem" }, t));
  } else parts.push(h("p", {}, r.no_clients || "The clients appear after the first evaluation."));
  if (r.wrong?.length) parts.push(h("h3", {}, "What went wrong"), h("pre", { class: "log" }, folded(r.wrong, w => w.why, inRounds)));
  if (log) parts.push(h("h3", {}, "Log"), h("pre", { class: "log", id: "run-log", tabindex: 0 }, log)); // runs that were started elsewhere print there
  if (r.settings?.settings) parts.push(h("details", { class: "settings", open: keep || false }, h("summary", {}, "Settings"), h("pre", {}, JSON.stringify(r.settings.settings, null, 1))));
  const focus = document.activeElement?.closest?.("#run-body") ? document.activeElement.textContent : null, top = $("run").scrollTop;
  $("run-body").replaceChildren(...parts); $("run").scrollTop = top; if (focus) [...$("run-body").querySelectorAll("button")].find(b => b.textContent === focus)?.focus();
  const view = r.curves.personal ? "personal" : "participants", line = series(r, view, "x"); lineChart(plot, line ? [line] : [], viewOptions(view, "x", [r.id], { height: 230, maxWidth: 960, empty: "no score yet" }));
  if (S) everyClient(r, S); if (client != null && S) oneClient(r, S); const box = $("run-log"); if (box) box.scrollTop = 1e9;
}
function everyClient(r, S) { // a line for each client; for many of them, the tenths of the clients
  const course = Object.values(S.course)[0], percent = r.metric?.percent !== false, more = { height: 230, maxWidth: 960, percent, digits: percent ? 1 : 3, integerX: true, xLabel: "round", yLabel: r.metric?.label || "score", empty: "one evaluation so far" }; let lines = [];
  if (course && S.ids.length <= 60) lines = S.ids.map((id, k) => ({ name: `client ${id}`, i: id === client ? 1 : 0, thin: id !== client, x: course.x, y: course.y.map(v => v[k]) }));
  else if (course) lines = [["lowest", 0], ["lowest tenth", .1], ["median", .5], ["highest tenth", .9], ["highest", 1]].map(([name, q], i) => ({ name, i, x: course.x, y: course.y.map(v => { const known = v.filter(x => x != null).sort((a, b) => a - b); return known.length ? known[Math.round(q * (known.length - 1))] : null; }) }));
  lineChart($("all-clients"), lines, { ...more, direct: S.ids.length > 60 }, $("all-tip"));
}
function oneClient(r, S) {
  const k = S.ids.indexOf(client), box = $("one-client"); if (k < 0 || !box) return; const course = Object.values(S.course)[0], bars = s("svg", { class: "chart", viewBox: "0 0 400 200", role: "img", "aria-label": "test samples by label" }), plot = s("svg", { class: "chart", id: "client-plot", viewBox: "0 0 400 200", role: "img", "aria-label": "accuracy of the client" });
  box.replaceChildren(h("h3", {}, `Client ${client}`, h("small", {}, ` ${S.samples[k]} test samples`)), h("div", { class: "two" }, h("div", {}, bars), h("div", {}, plot)));
  const n = S.labels[k], A = axes(bars, { height: 200, maxWidth: 500, x: [-.6, n.length - .4], y: [0, Math.max(...n, 1)], xTicks: n.map((_, i) => i), xLabel: "label", yLabel: "test samples" }), w = Math.max(2, Math.min(30, (A.R - A.L) / n.length * .7)); n.forEach((v, i) => v && bars.append(s("rect", { x: A.X(i) - w / 2, width: w, y: A.Y(v), height: A.B - A.Y(v), fill: "var(--c0)" })));
  lineChart(plot, course ? [{ name: `client ${client}`, i: colour(r.id), x: course.x, y: course.y.map(v => v[k]) }] : [], { height: 200, maxWidth: 500, percent: r.metric?.percent !== false, integerX: true, xLabel: "round", yLabel: r.metric?.label || "score", empty: "one evaluation so far" });
}
$("run-close").onclick = () => $("run").close(); $("run").onclose = () => { opened = client = null; };

// ---- actions ----
const keep = { get: () => { try { return sessionStorage.getItem("coterie-token") || ""; } catch { return ""; } }, set: t => { try { sessionStorage.setItem("coterie-token", t); } catch { /* no storage */ } } };
async function post(what, about) { const r = await fetch(`/api/${what}`, { method: "POST", headers: { "content-type": "application/json", "x-coterie-token": token }, body: JSON.stringify(about) }), text = (await r.text()).trim(); if (!r.ok) throw new Error(text); return JSON.parse(text); }
const told = (id, text, bad) => { $(id).textContent = text; $(id).classList.toggle("bad", !!bad); };
function lock(why) { live("locked", "lost"); $("unlock-form").classList.remove("hidden"); told("token-said", why, true); }
async function unlock(given) { try { token = given; await post("token", {}); keep.set(token); $("token").value = ""; $("unlock-form").classList.add("hidden"); told("token-said", ""); listen(); } catch (e) { token = ""; lock(e.message); } }
$("unlock-form").onsubmit = e => { e.preventDefault(); unlock($("token").value.trim()); };
$("start").onsubmit = async e => {
  e.preventDefault(); const about = {}; for (const [k, v] of new FormData($("start"))) if (v.trim() && k !== "more") about[k] = v.trim();
  for (const part of $("start").elements.more.value.split(/,(?![^(]*\))/)) { const [k, ...v] = part.split("="); if (k.trim()) about[k.trim()] = v.join("=").trim(); }
  try { const r = await post("start", about); byHand = false; told("start-said", `started ${r.run}`); } catch (x) { told("start-said", x.message, true); }
};
for (const what of ["stop", "resume"]) $(what).onclick = async () => { try { await post(what, { run: opened }); told("run-said", what === "stop" ? "it stops after this round" : "it goes on"); } catch (e) { told("run-said", e.message, true); } };

function draw() { cards(); table(); curves(); federation(); }
setInterval(() => { for (const tr of body.rows) { const r = runs.get(tr.dataset.id); if (r) tr.cells_.changed.textContent = ago(r.changed); } federation(); }, 1000);
setInterval(() => { if ($("federation")) fedLog(); if (opened && runs.get(opened)?.state === "running") refreshOpen(); }, 4000);
let wait; addEventListener("resize", () => { clearTimeout(wait); wait = setTimeout(draw, 120); });
const handed = /^#token=(.+)$/.exec(location.hash); if (handed) history.replaceState(null, "", location.pathname); // the part after # is never sent
draw(); token = handed ? decodeURIComponent(handed[1]) : keep.get(); if (token) unlock(token); else lock("this board needs the token that `coterie board` printed");

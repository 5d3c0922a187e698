// The report's own script: one state (group, filter, hidden methods), redrawn when it changes.
const D = JSON.parse($("data").textContent), off = new Set(), names = [...new Set(D.groups.flatMap(g => g.methods))];
const at = n => names.indexOf(n), wanted = n => n.toLowerCase().includes(($("filter")?.value || "").trim().toLowerCase());
let G = D.groups[0];
themeSwitch($("theme"));
document.querySelectorAll("table.sortable").forEach(sortable);
document.querySelectorAll("table[data-part=summary]").forEach(t => sortBy(t, 1, "descending"));

// ---- choice of group, the same in every section ----
const pickers = [...document.querySelectorAll("select.group")];
for (const p of pickers) { p.replaceChildren(...D.groups.map((g, i) => new Option(g.name, i))); p.closest("label").classList.toggle("hidden", D.groups.length < 2); p.onchange = () => { G = D.groups[+p.value]; range = null; for (const q of pickers) q.value = p.value; choices(); drawAll(); }; }

// ---- filter ----
if ($("filter")) $("filter").oninput = () => {
  let shown = 0, all = 0;
  for (const row of document.querySelectorAll("table.filtered tbody tr")) { const ok = wanted(row.dataset.method); row.classList.toggle("hidden", !ok); if (row.closest("[data-part=summary]")) { all++; shown += ok; } }
  $("filter-said").textContent = shown === all ? "" : `${shown} of ${all} rows`; drawAll();
};

// ---- gains ----
function gainPlot() {
  const svg = $("gain-plot"); if (!svg) return;
  const rows = Object.entries(G.gains).filter(([n]) => wanted(n)); if (!rows.length) { svg.replaceChildren(); return; }
  const W = Math.max(300, Math.min(1340, svg.clientWidth || 800)), narrow = W < 560, L = narrow ? 8 : 190, R = W - 14, step = narrow ? 58 : 44, H = rows.length * step + 52, T = 8;
  svg.setAttribute("viewBox", `0 0 ${W} ${H}`); svg.replaceChildren();
  const values = rows.flatMap(([, v]) => v.map(p => p[2])), lo = Math.min(0, ...values), hi = Math.max(0, ...values), pad = (hi - lo || 1) * .04, X = v => L + (v - lo + pad) / (hi - lo + 2 * pad || 1) * (R - L), end = T + rows.length * step;
  for (const t of ticks(lo, hi, W / 100)) svg.append(s("line", { x1: X(t), x2: X(t), y1: T, y2: end, stroke: "var(--line)" }), label(X(t), end + 16, t === 0 ? "0" : signed(t, G.metric.digits).replace(/\.?0+$/, ""), { "text-anchor": "middle" }));
  svg.append(s("line", { x1: X(0), x2: X(0), y1: T, y2: end, stroke: "var(--ink)" }), label((L + R) / 2, H - 6, `gain over ${G.local} (${G.metric.unit})`, { "text-anchor": "middle" }));
  rows.forEach(([name, points], k) => {
    const y = T + k * step + step / 2 + (narrow ? 9 : 0), up = points.filter(p => p[2] > 0).length, down = points.filter(p => p[2] < 0).length;
    const title = label(narrow ? L : L - 10, narrow ? y - 22 : y, name, { "text-anchor": narrow ? "start" : "end", fill: "var(--ink)" }), count = label(narrow ? R : L - 10, narrow ? y - 22 : y + 15, `${up} gain, ${down} lose`, { "text-anchor": "end", "font-size": 11 });
    svg.append(title, count); const lanes = {};
    for (const [seed, client, v] of [...points].sort((a, b) => a[2] - b[2])) {
      const slot = Math.round(X(v) / 7), n = lanes[slot] = (lanes[slot] ?? -1) + 1, dy = (n % 2 ? 1 : -1) * Math.ceil(n / 2) * Math.min(7, 14 / Math.max(1, Math.ceil(n / 2)));
      const dot = s("circle", { cx: X(v), cy: y + Math.max(-16, Math.min(16, dy)), r: 3.6, "fill-opacity": .75, fill: v > 0 ? "var(--c0)" : v < 0 ? "var(--c1)" : "var(--c7)", style: "cursor:pointer" }, s("title"));
      dot.firstChild.textContent = `${name}, ${called(seed, client)}` + (Object.keys(G.clients).length > 1 ? `, seed ${seed}` : "") + `: ${signed(v, G.metric.digits)}`; dot.onclick = () => openClient(String(seed), client); dot.onpointerenter = () => { $("gain-tip").textContent = dot.firstChild.textContent; }; svg.append(dot);
    }
  });
}

// ---- curves ----
let range = null; const zoomTo = to => { range = to; curves(); };
function curves() {
  if (!$("plot")) return; const found = G.curves[$("view").value] || {}, axis = $("axis").value, mine = G.methods.filter(n => found[n] && wanted(n));
  lineChart($("plot"), mine.filter(n => !off.has(n)).map(n => ({ name: n, i: at(n), x: found[n][axis], y: found[n].y, s: found[n].s, round: axis === "mb" ? found[n].x : null })), { percent: G.metric.percent, digits: G.metric.digits, integerX: axis === "x", xLabel: axis === "x" ? "round" : "sent so far, all links, up and down (MB)", yLabel: G.metric.label, empty: "no method is chosen", smooth: +$("smooth").value, range, zoom: zoomTo, direct: true }, $("tip"));
  legend($("legend"), mine, off, at, curves); $("unzoom").classList.toggle("hidden", !range);
}
if ($("view")) { $("view").onchange = $("smooth").oninput = curves; $("axis").onchange = $("unzoom").onclick = () => zoomTo(null); }

// ---- against controls ----
function forestPlots() { for (const svg of document.querySelectorAll("svg.forest")) { const A = JSON.parse(svg.dataset.rows).filter(r => wanted(r.method)); if (A.length) forestPlot(svg, A, { xLabel: svg.dataset.label, maxWidth: 1000 }); else svg.replaceChildren(); } }

// ---- the metric against bytes ----
function costPlot() {
  const svg = $("cost-plot"); if (!svg) return; const all = Object.entries(G.costs).filter(([n]) => wanted(n)), paid = all.filter(([, p]) => p.mb > 0), free = all.filter(([, p]) => !(p.mb > 0));
  if (!all.length) { svg.replaceChildren(); return; }
  const ys = all.flatMap(([, p]) => [p.y - p.s, p.y + p.s]), pad = Math.max(G.metric.percent ? 1 : 1e-9, (Math.max(...ys) - Math.min(...ys)) * .1), mb = paid.map(([, p]) => p.mb), lo = Math.min(...mb, 1e9), hi = Math.max(...mb, 1e-9);
  const x = paid.length ? [lo / 1.6, hi * 1.6] : [1, 10];
  const A = axes(svg, { x, y: [G.metric.percent ? Math.max(0, Math.min(...ys) - pad) : Math.min(...ys) - pad, Math.min(G.metric.percent ? 100 : Infinity, Math.max(...ys) + pad)], logX: true, xLabel: "sent in all, all links, up and down (MB, logarithmic)", yLabel: G.metric.label, xTicks: paid.length ? null : [] });
  for (const [n, p] of free) svg.append(s("line", { x1: A.L, x2: A.R, y1: A.Y(p.y), y2: A.Y(p.y), stroke: look(at(n)).colour, "stroke-width": 1.5, "stroke-dasharray": "2 4" }));
  const front = []; for (const [, p] of [...paid].sort((a, b) => a[1].mb - b[1].mb || G.metric.sign * (b[1].y - a[1].y))) if (!front.length || G.metric.sign * (p.y - front.at(-1).y) > 0) front.push(p);
  svg.append(s("polyline", { fill: "none", stroke: "var(--soft)", "stroke-dasharray": "4 3", points: front.map(p => `${A.X(p.mb)},${A.Y(p.y)}`).join(" ") }));
  const boxes = [...free.map(([, p]) => [A.L, A.R, A.Y(p.y) - 1, A.Y(p.y) + 1])];
  for (const [n, p] of paid) { const c = look(at(n)).colour; if (p.s) svg.append(s("line", { x1: A.X(p.mb), x2: A.X(p.mb), y1: A.Y(p.y - p.s), y2: A.Y(p.y + p.s), stroke: c })); svg.append(s("circle", { cx: A.X(p.mb), cy: A.Y(p.y), r: 5, fill: c })); boxes.push([A.X(p.mb) - 6, A.X(p.mb) + 6, A.Y(p.y) - 6, A.Y(p.y) + 6], [A.X(p.mb) - 2, A.X(p.mb) + 2, A.Y(p.y + p.s), A.Y(p.y - p.s)]); }
  const near = [[9, 4, 0], [-9, 4, 1], [0, -10, .5], [0, 20, .5], [9, 18, 0], [9, -10, 0], [-9, -10, 1], [-9, 18, 1], [14, 32, 0], [-14, 32, 1], [14, -24, 0], [-14, -24, 1]];
  // a name goes where it covers neither a point nor another name
  const place = (n, px, py, text, tries = near) => { const w = text.length * 7 + 4;
    const hits = ([dx, dy, a]) => { const b = [px + dx - a * w, px + dx + (1 - a) * w, py + dy - 11, py + dy + 3]; return b[0] < A.L ? 9 : b[1] > A.R + 8 ? 9 : b[2] < 2 || b[3] > A.B ? 5 : boxes.filter(o => b[0] < o[1] && b[1] > o[0] && b[2] < o[3] && b[3] > o[2]).length; };
    const best = tries.reduce((a, t) => { const k = hits(t); return k < a[1] ? [t, k] : a; }, [tries[0], 99])[0], [dx, dy, a] = best; boxes.push([px + dx - a * w, px + dx + (1 - a) * w, py + dy - 11, py + dy + 3]);
    svg.append(label(px + dx, py + dy, text, { "text-anchor": ["start", "middle", "end"][a * 2], fill: look(at(n)).colour, "font-weight": 600 })); };
  for (const [n, p] of free) { const R = A.R - A.L; place(n, A.L + 4, A.Y(p.y), `${n}: sends nothing`, [.98, 0, .5, .75, .25].flatMap(f => [[f * R, 15, f > .9 ? 1 : f ? .5 : 0], [f * R, -6, f > .9 ? 1 : f ? .5 : 0]])); }
  for (const [n, p] of paid) place(n, A.X(p.mb), A.Y(p.y), n);
}

// ---- clients ----
const called = (seed, id) => G.clients[seed]?.names?.[String(id)] ?? `client ${id}`;
const seedNow = () => $("seed")?.value || Object.keys(G.clients)[0];
let by = 0, way = "ascending";
function clientTable() {
  const table = $("clients-table"); if (!table) return; const S = G.clients[seedNow()]; if (!S) { table.tHead.replaceChildren(); table.tBodies[0].replaceChildren(); return; }
  const methods = Object.keys(S.values).filter(wanted), asGain = $("cells").value === "gain" && G.local in S.values, base = S.values[G.local];
  const heads = ["client", "test samples", ...methods]; if (by >= heads.length) by = 0;
  table.tHead.replaceChildren(h("tr", {}, ...heads.map((c, i) => h("th", { scope: "col", "aria-sort": i === by ? way : "none" }, h("button", { type: "button", onclick: () => { way = by === i ? (way === "ascending" ? "descending" : "ascending") : i ? "descending" : "ascending"; by = i; clientTable(); table.tHead.rows[0].cells[i].firstChild.focus(); } }, c)))));
  const rows = S.ids.map((id, k) => [id, S.samples[k], ...methods.map(m => { const v = S.values[m][k]; return v == null ? null : asGain ? (base[k] == null ? null : G.metric.sign * (v - base[k])) : v; })]);
  const find = $("which").value.trim(), kept = rows.filter(r => !find || String(r[0]) === find || String(r[0]).startsWith(find) || called(seedNow(), r[0]).includes(find)).sort((a, b) => (way === "ascending" ? 1 : -1) * ((a[by] ?? -1e9) - (b[by] ?? -1e9)) || a[0] - b[0]);
  table.tBodies[0].replaceChildren(...kept.map(r => h("tr", {}, ...r.map((v, i) => i === 0 ? h("th", { scope: "row" }, h("button", { type: "button", class: "open", onclick: () => openClient(seedNow(), v) }, called(seedNow(), v))) : h("td", { class: i > 1 && asGain ? (v > 0 ? "up" : v < 0 ? "down" : null) : null }, i === 1 ? String(v) : asGain ? signed(v, G.metric.digits) : number(v, G.metric.digits))))));
}
for (const id of ["seed", "which", "cells"]) if ($(id)) $(id).oninput = clientTable;

function openClient(seed, id) {
  const S = G.clients[seed], k = S?.ids.indexOf(id); if (S == null || k < 0) return; const base = S.values[G.local]?.[k], body = $("client-body");
  $("client-title").textContent = called(seed, id).replace(/^client/, "Client") + (Object.keys(G.clients).length > 1 ? `, seed ${seed}` : "") + `, ${G.name}`;
  const rows = Object.entries(S.values).filter(([, a]) => a[k] != null).sort((a, b) => G.metric.sign * (b[1][k] - a[1][k]));
  const inside = Object.entries(G.clusters).filter(([, c]) => c.seed === seed).flatMap(([m, c]) => Object.entries(c.groups).filter(([, ids]) => ids.includes(id)).map(([g, ids]) => `${m}: ${c.kind} ${g}, with ${ids.length - 1} others`));
  const bars = s("svg", { class: "chart", viewBox: "0 0 500 190", role: "img", "aria-label": "Test samples by label" }), plot = s("svg", { class: "chart", viewBox: "0 0 500 260", role: "img", "aria-label": `${G.metric.name} of this client over the rounds` }), tip = h("figcaption", { class: "tip" }), box = h("div", { class: "legend", role: "group", "aria-label": "Methods shown" });
  body.replaceChildren(h("p", {}, `${S.samples[k]} test samples` + (S.labels[k].length ? ` of ${S.labels[k].filter(n => n).length} labels.` : ".") + (G.metric.percent && S.samples[k] < 20 ? ` One sample is ${number(100 / S.samples[k])} points: read differences of this client with care.` : "")), ...inside.map(t => h("p", {}, t + ".")),
    h("div", { class: "two" }, h("div", {}, h("h3", {}, "Gain"), h("div", { class: "wide" }, h("table", {}, h("thead", {}, h("tr", {}, h("th", { scope: "col" }, "method"), h("th", { scope: "col" }, G.metric.name, h("small", {}, G.metric.percent ? "percent" : G.metric.sign < 0 ? "lower is better" : "")), h("th", { scope: "col" }, "gain", h("small", {}, `${G.metric.unit} over ${G.local || "Local-Only"}`)))), h("tbody", {}, ...rows.map(([m, a]) => { const g = base == null || m === G.local ? null : G.metric.sign * (a[k] - base); return h("tr", {}, h("th", { scope: "row" }, m), h("td", {}, number(a[k], G.metric.digits)), h("td", { class: g > 0 ? "up" : g < 0 ? "down" : null }, g == null ? "" : signed(g, G.metric.digits))); }))))),
      S.labels[k].length ? h("div", {}, h("h3", {}, "Test samples by label"), h("figure", {}, bars)) : null), h("h3", {}, `${G.metric.name} over the rounds`), h("figure", {}, plot, box, tip));
  $("client").showModal();
  const counts = S.labels[k], most = Math.max(...counts, 1), A = axes(bars, { height: 220, maxWidth: 620, x: [-.6, counts.length - .4], y: [0, most], xTicks: counts.map((_, i) => i), xLabel: "label", yLabel: "test samples" }), w = Math.max(2, Math.min(34, (A.R - A.L) / counts.length * .7));
  counts.forEach((n, i) => { if (n) bars.append(s("rect", { x: A.X(i) - w / 2, width: w, y: A.Y(n), height: A.B - A.Y(n), fill: "var(--c0)" }), ...(counts.length <= 20 ? [label(A.X(i), A.Y(n) - 3, String(n), { "text-anchor": "middle", "font-size": 11 })] : [])); });
  const hide = new Set(), draw = () => { lineChart(plot, Object.entries(S.course).filter(([m]) => !hide.has(m)).map(([m, c]) => ({ name: m, i: at(m), x: c.x, y: c.y.map(r => r[k]), thick: m === G.local })), { height: 280, percent: G.metric.percent, digits: G.metric.digits, integerX: true, xLabel: "round", yLabel: G.metric.label, empty: "too few evaluations for a curve" }, tip); legend(box, Object.keys(S.course), hide, at, draw); };
  draw();
}
$("client-close").onclick = () => $("client").close();
$("client").onclick = e => { if (e.target === $("client")) $("client").close(); };

// ---- clusters ----
function clusterPlot() {
  const svg = $("cluster-plot"); if (!svg) return; const name = $("clustered").value, C = G.clusters[name]; if (!C) { svg.replaceChildren(); svg.setAttribute("viewBox", "0 0 400 40"); svg.append(label(8, 24, "none of these methods groups its clients")); $("cluster-text").textContent = ""; return; }
  const S = G.clients[C.seed], W = Math.max(300, Math.min(1340, svg.clientWidth || 800)), groups = Object.entries(C.groups), total = groups.reduce((n, [, ids]) => n + ids.length, 0), pitch = total > 150 ? 15 : 25, r = pitch * .4, gap = 14, kind = C.kind;
  const gain = id => { const k = S?.ids.indexOf(id) ?? -1, a = S?.values[name]?.[k], b = S?.values[G.local]?.[k]; return a == null || b == null ? null : G.metric.sign * (a - b); };
  const blocks = groups.map(([g, ids]) => { const text = `${kind} ${g}`, most = Math.max(2, Math.floor((W - 50) / pitch)), cols = Math.min(most, Math.max(2, Math.ceil(Math.sqrt(ids.length * 1.8)))); return { g, ids, text, cols, w: Math.max(cols * pitch + 14, text.length * 7 + 20, 86), h: Math.ceil(ids.length / cols) * pitch + 46 }; });
  const lines = [[]]; let x = 30; for (const b of blocks) { if (x + b.w > W - 4 && lines.at(-1).length) { lines.push([]); x = 30; } b.x = x; lines.at(-1).push(b); x += b.w + gap; }
  svg.replaceChildren(); let y = 46; const trunk = 14; const back = s("g"), front = s("g");
  for (const line of lines) { const bus = y; for (const b of line) { b.y = y + 12; back.append(s("line", { x1: b.x + b.w / 2, x2: b.x + b.w / 2, y1: bus, y2: b.y, stroke: "var(--soft)" })); } back.append(s("line", { x1: trunk, x2: line.at(-1).x + line.at(-1).w / 2, y1: bus, y2: bus, stroke: "var(--soft)" })); y += Math.max(...line.map(b => b.h)) + 28; }
  back.append(s("line", { x1: trunk, x2: trunk, y1: 30, y2: lines.length > 1 ? lines.at(-1)[0].y - 12 : 46, stroke: "var(--soft)" }));
  front.append(s("rect", { x: 2, y: 4, width: 76, height: 26, rx: 6, fill: "var(--mark)", stroke: "var(--soft)" }), label(40, 21, C.edges ? "cloud" : "server", { "text-anchor": "middle", fill: "var(--ink)" }));
  for (const b of blocks) {
    front.append(s("rect", { x: b.x, y: b.y, width: b.w, height: b.h, rx: 6, fill: "var(--card)", stroke: "var(--line)" }), label(b.x + 8, b.y + 17, b.text, { fill: "var(--ink)", "font-weight": 600 }), label(b.x + 8, b.y + 31, `${b.ids.length} client${b.ids.length > 1 ? "s" : ""}`, { "font-size": 11 }));
    b.ids.forEach((id, k) => { const cx = b.x + 8 + pitch * (k % b.cols + .5), cy = b.y + 38 + pitch * (Math.floor(k / b.cols) + .4), v = gain(id), dot = s("g", { style: "cursor:pointer" }, s("title"), s("circle", { cx, cy, r, fill: v == null ? "var(--c7)" : v > 0 ? "var(--c0)" : v < 0 ? "var(--c1)" : "var(--c7)" }), pitch > 20 ? label(cx, cy + 4, String(id), { "text-anchor": "middle", "font-size": id > 99 ? 9 : 11, fill: "var(--back)" }) : null);
      dot.firstChild.textContent = called(C.seed, id) + (v == null ? "" : `: ${signed(v, G.metric.digits)}`); dot.onclick = () => openClient(C.seed, id); front.append(dot); });
  }
  svg.append(back, front); svg.setAttribute("viewBox", `0 0 ${W} ${y - 10}`);
  $("cluster-text").textContent = `${name}, seed ${C.seed}: ${groups.length} ${kind}${groups.length > 1 ? "s" : ""}, ${total} clients. Blue gains, orange loses, grey is equal or not known.`;
}
if ($("clustered")) $("clustered").onchange = clusterPlot;

// ---- downloads ----
const csv = {
  summary: () => partRows("summary"), bytes: () => partRows("bytes"),
  gains: () => [["clients", "method", "seed", "client", "gain"], ...D.groups.flatMap(g => Object.entries(g.gains).flatMap(([m, rows]) => rows.map(r => [g.name, m, ...r])))],
  curves: () => [["clients", "view", "method", "round", "metric", "value", "std over seeds", "MB so far"], ...D.groups.flatMap(g => Object.entries(g.curves).flatMap(([v, lines]) => Object.entries(lines).flatMap(([m, l]) => l.x.map((x, i) => [g.name, v, m, x, g.metric.name, l.y[i], l.s[i], l.mb[i]]))))],
  costs: () => [["clients", "method", "MB", "metric", "value", "std over seeds"], ...D.groups.flatMap(g => Object.entries(g.costs).map(([m, p]) => [g.name, m, p.mb, g.metric.name, p.y, p.s]))],
  clients: () => [["clients", "seed", "client", "test samples", "method", "metric", "value"], ...D.groups.flatMap(g => Object.entries(g.clients).flatMap(([seed, S]) => Object.entries(S.values).flatMap(([m, a]) => a.flatMap((v, k) => v == null ? [] : [[g.name, seed, S.names?.[S.ids[k]] ?? S.ids[k], S.samples[k], m, g.metric.name, v]]))))],
};
function partRows(part) { const out = []; for (const t of document.querySelectorAll(`table[data-part=${part}]`)) { const [head, ...rows] = tableRows(t); if (!out.length) out.push(["clients", ...[...t.tHead.rows[0].cells].map(c => c.querySelector("button").textContent)]); out.push(...rows.map(r => [t.dataset.group, ...r])); } return out; }
for (const b of document.querySelectorAll("[data-csv]")) if (b.tagName === "BUTTON") { b.setAttribute("aria-label", `download ${b.dataset.csv} as CSV`); b.onclick = () => saveCsv(b.dataset.csv + ".csv", csv[b.dataset.csv]()); }
for (const b of document.querySelectorAll("[data-svg]")) { b.setAttribute("aria-label", `download ${b.dataset.svg} as SVG`); b.onclick = () => saveSvg($(b.dataset.svg), b.dataset.svg); }
for (const b of document.querySelectorAll("[data-png]")) { b.setAttribute("aria-label", `download ${b.dataset.png} as PNG`); b.onclick = () => savePng($(b.dataset.png), b.dataset.png); }

// ---- all together ----
function choices() {
  if ($("view")) { const old = $("view").value; $("view").replaceChildren(...Object.entries(D.views).filter(([k]) => G.curves[k]).map(([k, t]) => new Option(t, k))); if (G.curves[old]) $("view").value = old; }
  if ($("seed")) { $("seed").replaceChildren(...Object.keys(G.clients).map(x => new Option(x, x))); $("seed-label").classList.toggle("hidden", Object.keys(G.clients).length < 2); }
  if ($("clustered")) $("clustered").replaceChildren(...Object.keys(G.clusters).sort((a, b) => Object.keys(G.clusters[b].groups).length - Object.keys(G.clusters[a].groups).length).map(x => new Option(x, x)));
}
function drawAll() { gainPlot(); forestPlots(); curves(); costPlot(); clientTable(); clusterPlot(); }
choices(); drawAll();
let wait; addEventListener("resize", () => { clearTimeout(wait); wait = setTimeout(drawAll, 120); });

// Charts and tables shared by the report and the board. All text goes through textContent: nothing is parsed as HTML.
const NS = document.getElementById("ns").namespaceURI;
const DASHES = ["", "7 4", "2 3", "9 3 2 3"];
const $ = id => document.getElementById(id);
function h(tag, attrs = {}, ...kids) { const e = document.createElement(tag); put(e, attrs); e.append(...kids.filter(k => k != null)); return e; }
function s(tag, attrs = {}, ...kids) { const e = document.createElementNS(NS, tag); put(e, attrs); e.append(...kids.filter(k => k != null)); return e; }
function put(e, attrs) { for (const [k, v] of Object.entries(attrs)) { if (k.startsWith("on")) e[k] = v; else if (v === true) e.setAttribute(k, ""); else if (v != null && v !== false) e.setAttribute(k, v); } }
const look = i => ({ colour: `var(--c${i % 8})`, dash: DASHES[Math.floor(i / 8) % DASHES.length] });
const number = (v, digits = 1) => v == null || !isFinite(v) ? "" : v.toFixed(digits);
const signed = (v, digits = 1) => { const half = .4999 * 10 ** -digits; return v == null ? "" : (v > half ? "+" : v < -half ? "−" : "") + Math.abs(v).toFixed(digits); };
function size(bytes) { const u = ["B", "kB", "MB", "GB", "TB"]; let i = 0; while (bytes >= 1000 && i < 4) { bytes /= 1000; i++; } return (i && bytes < 100 ? bytes.toPrecision(3) : Math.round(bytes)) + " " + u[i]; }

function ticks(a, b, most = 6, integer = false) {
  const span = b - a || 1, raw = span / most, p = 10 ** Math.floor(Math.log10(raw));
  let step = [1, 2, 5, 10].map(m => m * p).find(x => x >= raw * .999);
  if (integer) step = Math.max(1, Math.round(step));
  const out = []; for (let v = Math.ceil(a / step - 1e-9) * step; v <= b + step * 1e-6; v += step) out.push(+v.toFixed(8));
  return out;
}
function decades(a, b) { const out = []; for (let e = Math.floor(Math.log10(a)); e <= Math.ceil(Math.log10(b)); e++) for (const m of b / a > 300 ? [1] : b / a > 12 ? [1, 3] : [1, 2, 3, 5]) { const v = m * 10 ** e; if (v >= a * .999 && v <= b * 1.001) out.push(v); } return out; }
const short = v => Math.abs(v) >= 1e6 ? +(v / 1e6).toPrecision(3) + "M" : Math.abs(v) >= 1e4 ? +(v / 1e3).toPrecision(3) + "k" : String(+v.toPrecision(6));
const label = (x, y, text, more = {}) => { const t = s("text", { x, y, "font-size": 12, fill: "var(--soft)", ...more }); t.textContent = text; return t; };

// Axes of a chart: returns the two scales and draws grid, ticks and labels.
function axes(svg, o) {
  const W = Math.max(300, Math.min(o.maxWidth || 1340, svg.clientWidth || 800)), H = o.height || 360, marks = ticks(o.y[0], o.y[1], H / 50), L = Math.max(52, 26 + 7 * Math.max(...marks.map(t => short(t).length))), R = W - (o.right || 14), T = 12, B = H - 44;
  svg.setAttribute("viewBox", `0 0 ${W} ${H}`); svg.replaceChildren();
  const fx = o.logX ? Math.log10 : v => v, x0 = fx(o.x[0]), x1 = fx(o.x[1]), [y0, y1] = o.y;
  const X = v => L + (fx(v) - x0) / (x1 - x0 || 1) * (R - L), Y = v => B - (v - y0) / (y1 - y0 || 1) * (B - T);
  for (const t of marks) svg.append(s("line", { x1: L, x2: R, y1: Y(t), y2: Y(t), stroke: "var(--line)" }), label(L - 6, Y(t) + 4, short(t), { "text-anchor": "end" }));
  const xs = o.xTicks || (o.logX ? decades(o.x[0], o.x[1]) : ticks(o.x[0], o.x[1], W / 90, o.integerX)); let last = -99;
  for (const t of xs) { const at = X(t); svg.append(s("line", { x1: at, x2: at, y1: B, y2: B + 4, stroke: "var(--soft)" })); if (at - last > 34) { svg.append(label(at, B + 17, o.xText ? o.xText(t) : short(t), { "text-anchor": "middle" })); last = at; } }
  svg.append(s("line", { x1: L, x2: R, y1: B, y2: B, stroke: "var(--soft)" }));
  svg.append(label((L + R) / 2, H - 8, o.xLabel, { "text-anchor": "middle" }), label(14, (T + B) / 2, o.yLabel, { "text-anchor": "middle", transform: `rotate(-90 14 ${(T + B) / 2})` }));
  return { X, Y, W, H, L, R, T, B, at: px => { const v = x0 + (px - L) / (R - L) * (x1 - x0); return o.logX ? 10 ** v : v; } };
}

// Exponential smoothing without the pull towards the first value; empty values stay empty.
function smoothed(ys, weight) { let mean = 0, all = 0; return ys.map(v => { if (v == null) return v; mean = weight * mean + (1 - weight) * v; all = weight * all + 1 - weight; return mean / all; }); }

// series: [{name, i, x, y, s}], i is the index of the colour. The tip element gets the values under the pointer.
// o.smooth: weight of smoothing; o.range: [from, to] of x; o.zoom(range or null): called when a range is dragged, or on
// a double click; o.linked: a list that several charts share, whose rules and tips move together; o.direct: names at the lines.
function lineChart(svg, series, o, tip) {
  const within = (l, x) => !o.range || (x >= o.range[0] && x <= o.range[1]);
  const live = series.map(l => o.smooth ? { ...l, raw: l.y, y: smoothed(l.y, o.smooth) } : l).filter(l => l.y.some((v, k) => v != null && within(l, l.x[k])));
  svg.onpointermove = svg.onpointerleave = svg.onpointerdown = svg.ondblclick = null;
  if (o.zoom && o.range) svg.ondblclick = () => o.zoom(null);
  if (!live.length) { svg.replaceChildren(); svg.setAttribute("viewBox", "0 0 400 60"); svg.append(label(10, 34, o.empty || "nothing to draw yet")); return; }
  const cut = live.map(l => ({ ...l, pts: l.y.map((v, k) => [l.x[k], v, l.s?.[k] || 0, l.raw?.[k]]).filter(p => p[1] != null && within(l, p[0]) && (!o.logX || p[0] > 0)) })).filter(l => l.pts.length);
  const xs = cut.flatMap(l => l.pts.map(p => p[0])), ys = cut.flatMap(l => l.pts.flatMap(p => [p[1] + p[2], p[1] - p[2], ...(p[3] == null ? [] : [p[3]])]));
  const lo = Math.min(...ys), hi = Math.max(...ys), pad = Math.max((hi - lo) * .06, o.percent ? 1 : 1e-9);
  const x0 = o.range ? o.range[0] : o.logX ? Math.min(...xs.filter(v => v > 0)) : Math.min(o.fromX ?? 0, ...xs), x1 = o.range ? o.range[1] : Math.max(...xs, x0 + 1e-9);
  const wide = Math.min(o.maxWidth || 1340, svg.clientWidth || 800), room = Math.max(...cut.map(l => l.name.length)) * 7.3 + 14, direct = o.direct && cut.length <= 12 && room < wide * .3 && wide > 560;
  const A = axes(svg, { ...o, right: direct ? room : o.right, x: [x0, x1], y: [o.zero ? 0 : o.percent ? Math.max(0, lo - pad) : lo - pad, o.percent ? Math.min(100, hi + pad) : hi + pad] });
  const rule = s("line", { y1: A.T, y2: A.B, stroke: "var(--soft)", "stroke-dasharray": "2 3", visibility: "hidden" }); svg.append(rule);
  for (const l of cut) {
    const { colour, dash } = look(l.i), pts = l.pts, line = (of, more) => s("polyline", { fill: "none", stroke: colour, "stroke-linejoin": "round", points: of.map(p => `${A.X(p[0])},${A.Y(p[1])}`).join(" "), ...more });
    if (pts.some(p => p[2])) svg.append(s("polygon", { fill: colour, opacity: .13, points: [...pts.map(p => `${A.X(p[0])},${A.Y(p[1] + p[2])}`), ...pts.map(p => `${A.X(p[0])},${A.Y(p[1] - p[2])}`).reverse()].join(" ") }));
    if (l.raw) svg.append(line(pts.filter(p => p[3] != null).map(p => [p[0], p[3]]), { "stroke-width": 1, opacity: .3 }));
    svg.append(line(pts, { "stroke-width": l.thin ? 1 : l.thick ? 3 : 2, opacity: l.thin ? .55 : null, "stroke-dasharray": dash, "data-series": l.name }));
    if (pts.length < 40 && !l.thin) for (const p of pts) svg.append(s("circle", { cx: A.X(p[0]), cy: A.Y(p[1]), r: 2.6, fill: colour }));
  }
  if (direct) { // the names stand where the lines end, at least 13 pixels apart
    const ends = cut.map(l => ({ l, y: A.Y(l.pts.at(-1)[1]) })).sort((a, b) => a.y - b.y); let last = A.T - 9;
    for (const e of ends) last = e.y = Math.max(e.y, last + 13);
    for (let k = ends.length - 1, most = A.B; k >= 0; k--) most = (ends[k].y = Math.min(ends[k].y, most)) - 13;
    for (const { l, y } of ends) svg.append(label(A.R + 8, y + 4, l.name, { fill: look(l.i).colour, "font-weight": 600 }));
  }
  if (!tip && !o.zoom) return;
  const me = { // shows the values at x = v, or hides the rule
    show: v => { const px = A.X(v); rule.setAttribute("x1", px); rule.setAttribute("x2", px); rule.setAttribute("visibility", px > A.L - 1 && px < A.R + 1 ? "visible" : "hidden"); return cut.map(l => { const p = l.pts.reduce((a, b) => Math.abs(b[0] - v) < Math.abs(a[0] - v) ? b : a), round = l.round?.[l.x.indexOf(p[0])]; return `${l.name} ${number(p[1], o.digits ?? 1)}` + (round == null ? "" : ` (round ${round})`); }); },
    hide: () => rule.setAttribute("visibility", "hidden"),
  }, all = o.linked || []; all.push(me); if (!o.linked) all.splice(0, all.length, me);
  const where = e => { const r = svg.getBoundingClientRect(); return Math.max(A.L, Math.min(A.R, (e.clientX - r.left) / r.width * A.W)); };
  let from = null; const shade = s("rect", { y: A.T, height: A.B - A.T, fill: "var(--accent)", opacity: .15, visibility: "hidden" }); svg.append(shade);
  svg.onpointermove = e => { const px = where(e), v = A.at(px), words = all.flatMap(c => c.show(v)); if (tip) tip.textContent = words.slice(0, 12).join(" · ") + (words.length > 12 ? ` and ${words.length - 12} more` : ""); if (from != null) put(shade, { x: Math.min(from, px), width: Math.abs(px - from), visibility: "visible" }); };
  svg.onpointerleave = () => { all.forEach(c => c.hide()); from = null; shade.setAttribute("visibility", "hidden"); };
  if (o.zoom) svg.onpointerdown = e => { if (e.pointerType !== "mouse" || e.button) return; from = where(e); e.preventDefault(); svg.onpointerup = e2 => { const to = where(e2), begun = from; from = null; shade.setAttribute("visibility", "hidden"); if (begun != null && Math.abs(to - begun) > 8) o.zoom([A.at(Math.min(begun, to)), A.at(Math.max(begun, to))]); }; };
}

// A forest plot. rows: [{name, mean, low, high, note}]; blue is above 0, orange below, grey neither.
function forestPlot(svg, rows, o) {
  const W = Math.max(300, Math.min(o.maxWidth || 1340, svg.clientWidth || 800)), narrow = W < 640, step = narrow ? 56 : 26, L = narrow ? 12 : Math.min(W * .34, Math.max(...rows.map(r => r.name.length)) * 7 + 20), R = W - (narrow ? 12 : 150), H = rows.length * step + 50, T = 8, end = T + rows.length * step;
  svg.setAttribute("viewBox", `0 0 ${W} ${H}`); svg.replaceChildren();
  const ends = rows.flatMap(r => [r.low, r.high, r.mean]).filter(v => isFinite(v)), lo = Math.min(0, ...ends), hi = Math.max(0, ...ends), pad = (hi - lo || 1) * .04, X = v => L + (v - lo + pad) / (hi - lo + 2 * pad) * (R - L);
  for (const t of ticks(lo, hi, (R - L) / 70)) svg.append(s("line", { x1: X(t), x2: X(t), y1: T, y2: end, stroke: "var(--line)" }), label(X(t), end + 16, t === 0 ? "0" : (t > 0 ? "+" : "−") + short(Math.abs(t)), { "text-anchor": "middle" }));
  svg.append(s("line", { x1: X(0), x2: X(0), y1: T, y2: end, stroke: "var(--ink)" }), label((L + R) / 2, H - 6, o.xLabel, { "text-anchor": "middle" }));
  rows.forEach((r, k) => { const y = T + k * step + (narrow ? 42 : step / 2), c = r.low > 0 ? "var(--c0)" : r.high < 0 ? "var(--c1)" : "var(--c7)";
    svg.append(label(narrow ? L : L - 10, narrow ? y - 25 : y + 4, r.name, { "text-anchor": narrow ? "start" : "end", fill: "var(--ink)" }), label(narrow ? L : R + 12, narrow ? y - 11 : y + 4, r.note, { "text-anchor": "start", "font-size": 11 }));
    if (isFinite(r.low) && isFinite(r.high)) svg.append(s("line", { x1: X(r.low), x2: X(r.high), y1: y, y2: y, stroke: c, "stroke-width": 2 }), ...[r.low, r.high].map(v => s("line", { x1: X(v), x2: X(v), y1: y - 5, y2: y + 5, stroke: c, "stroke-width": 2 })));
    svg.append(s("circle", { cx: X(r.mean), cy: y, r: 4.5, fill: c, "data-row": r.name })); });
}

function key(i) { const { colour, dash } = look(i); return s("svg", { viewBox: "0 0 27 10", "aria-hidden": "true" }, s("line", { x1: 0, x2: 27, y1: 5, y2: 5, stroke: colour, "stroke-width": 3, "stroke-dasharray": dash })); }
function legend(box, names, off, index, changed) {
  const had = document.activeElement?.closest?.(".legend") === box ? document.activeElement.dataset.name : null;
  box.replaceChildren(...names.map(n => h("button", { type: "button", "aria-pressed": String(!off.has(n)), "data-name": n, onclick: () => { off.has(n) ? off.delete(n) : off.add(n); changed(); } }, key(index(n)), n)));
  if (had != null) [...box.children].find(b => b.dataset.name === had)?.focus();
}

// Sorting: every <th> with a button in a .sortable table; cells may carry data-v, the value behind the text.
function sortable(table) {
  table.tHead.querySelectorAll("th").forEach((th, i) => { const b = th.querySelector("button"); if (b) b.onclick = () => sortBy(table, i, th.getAttribute("aria-sort") === "descending" ? "ascending" : th.getAttribute("aria-sort") === "ascending" ? "descending" : th.dataset.first || "descending"); });
}
function sortBy(table, i, way) {
  const value = row => { const c = row.cells[i], v = c.dataset.v ?? c.textContent.trim(); return v === "" ? null : isNaN(v) ? v : +v; }, sign = way === "ascending" ? 1 : -1;
  const rows = [...table.tBodies[0].rows]; rows.sort((a, b) => { const x = value(a), y = value(b); if (x == null || y == null) return (x == null) - (y == null); return sign * (typeof x === "number" && typeof y === "number" ? x - y : String(x).localeCompare(String(y))); });
  table.tBodies[0].append(...rows); table.tHead.querySelectorAll("th").forEach((th, k) => { if (th.querySelector("button")) th.setAttribute("aria-sort", k === i ? way : "none"); });
}

// Downloads: CSV of rows, and a chart as SVG or PNG with its colours written out.
function save(name, blob) { const a = h("a", { download: name }); a.href = URL.createObjectURL(blob); document.body.append(a); a.click(); a.remove(); setTimeout(() => URL.revokeObjectURL(a.href), 5000); }
const csvCell = v => { let t = v == null ? "" : String(v); if (/^[=+@\t\r]|^-(?!\d)/.test(t)) t = "'" + t; return /[",\n]/.test(t) ? `"${t.replaceAll('"', '""')}"` : t; };
const saveCsv = (name, rows) => save(name, new Blob([rows.map(r => r.map(csvCell).join(",")).join("\n") + "\n"], { type: "text/csv" }));
function plainSvg(svg) {
  const css = getComputedStyle(document.documentElement), copy = svg.cloneNode(true), [, , W, H] = svg.getAttribute("viewBox").split(" ");
  copy.removeAttribute("class"); put(copy, { width: W, height: H, "font-family": "sans-serif" });
  for (const e of copy.querySelectorAll("*")) for (const a of e.attributes) if (a.value.startsWith("var(")) a.value = css.getPropertyValue(a.value.slice(4, -1)).trim();
  copy.prepend(s("rect", { width: W, height: H, fill: css.getPropertyValue("--back").trim() }));
  return [new XMLSerializer().serializeToString(copy), +W, +H];
}
function saveSvg(svg, name) { save(name + ".svg", new Blob([plainSvg(svg)[0]], { type: "image/svg+xml" })); }
function savePng(svg, name) {
  const [text, W, H] = plainSvg(svg), image = new Image();
  image.onload = () => { const c = h("canvas", { width: W * 3, height: H * 3 }), g = c.getContext("2d"); g.scale(3, 3); g.drawImage(image, 0, 0, W, H); c.toBlob(b => save(name + ".png", b)); };
  image.src = "data:image/svg+xml;charset=utf-8," + encodeURIComponent(text);
}
const tableRows = t => [...t.rows].filter(r => !r.classList.contains("hidden")).map(r => [...r.cells].map(c => c.dataset.csv ?? c.textContent.trim().replace(/\s+/g, " ")));

// Light and dark: the system's choice, until the switch says otherwise.
function themeSwitch(button) {
  const root = document.documentElement, dark = () => root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  const told = () => { button.textContent = dark() ? "Light" : "Dark"; button.setAttribute("aria-label", dark() ? "switch to light colours" : "switch to dark colours"); };
  try { const kept = localStorage.getItem("coterie-theme"); if (kept === "dark" || kept === "light") root.dataset.theme = kept; } catch { /* a page opened from a file may have no storage */ }
  button.onclick = () => { root.dataset.theme = dark() ? "light" : "dark"; try { localStorage.setItem("coterie-theme", root.dataset.theme); } catch { /* as above */ } told(); }; told();
}

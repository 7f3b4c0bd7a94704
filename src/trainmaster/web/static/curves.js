// Curves of a run: every metric over steps or time, zoom and smoothing for all of them, export. Data is downsampled by the server.
import { Plot, clock, show } from "./plot.js";
import { Strips } from "./timeline.js";

let box = document.getElementById("curves"); // until it is built, a swap of the page replaces it
const FIRST = ["loss", "lr", "grad_norm", "tokens_per_s", "mfu"];
const TITLES = { loss: "Loss", lr: "Learning rate", grad_norm: "Gradient norm", tokens_per_s: "Tokens per second", mfu: "MFU", memory_gib: "GPU memory, GiB", step_s: "Seconds per step" };
const state = { axis: "step", low: null, high: null, log: false, weight: 0, chosen: null, metrics: [], plots: new Map(), cursor: null, shift: 0, whole: null, held: null };
let asked = 0, timer = 0, strips = null;

const make = (tag, values = {}, ...inside) => { const e = Object.assign(document.createElement(tag), values); e.append(...inside); return e; };
const partners = (name) => [name, `eval_${name}`].filter((n) => state.metrics.includes(n));

const pull = async () => {
  const mine = ++asked;
  const names = [...new Set((state.chosen || FIRST).flatMap((n) => [n, `eval_${n}`]))];
  const query = new URLSearchParams(names.map((n) => ["metric", n]));
  query.set("axis", state.axis);
  query.set("points", String(Math.min(2000, Math.max(300, Math.round(box.clientWidth * 1.2)))));
  if (state.low !== null) { query.set("low", String(Math.max(0, state.low - state.shift))); query.set("high", String(Math.max(0, state.high - state.shift))); }
  clearTimeout(timer);
  let wait = box.dataset.final ? 0 : 3000;
  try {
    const answer = await fetch(`/v1/training/jobs/${box.dataset.job}/curves?${query}`);
    if (!answer.ok) throw new Error(String(answer.status));
    const page = await answer.json();
    if (mine !== asked) return;
    if (page.sampled) wait = 800;
    const points = align(page);
    if (state.low === null) state.whole = points;
    state.held = state.low === null ? null : [state.low, state.high];
    draw(points);
    box.dataset.drawn = page.sampled ? "sample" : "whole";
  } catch { wait = 5000; }
  if (wait) timer = setTimeout(() => (document.hidden || state.cursor !== null ? again() : pull()), wait);
};
const again = () => { timer = setTimeout(() => (document.hidden || state.cursor !== null ? again() : pull()), 2000); };

const zoom = (a, b) => {
  // within what there is: zooming out ends at the whole
  const inside = a !== null && state.ends && (a > state.ends[0] || b < state.ends[1]);
  const low = inside ? Math.max(a, state.ends[0]) : null, high = inside ? Math.min(b, state.ends[1]) : null;
  state.low = low; state.high = high; state.cursor = null;
  // At once, from the points that are here; finer ones come from the server.
  const covered = low !== null && (state.held === null || (low >= state.held[0] && high <= state.held[1]));
  if (covered) for (const plot of state.plots.values()) plot.set({ low, high, cursor: null });
  else if (state.whole) { state.held = null; draw(state.whole); }
  strips?.view(state.axis === "time" ? low : null, high);
  document.getElementById("curves-whole").hidden = low === null;
  pull();
};
const cursor = (x) => {
  state.cursor = x;
  for (const plot of state.plots.values()) plot.set({ cursor: x });
  if (state.axis === "time") strips?.point(x);
};

// Over time the axis of all charts is that of the job, from its submission on; the server's begins at the first point.
const align = (page) => {
  state.shift = page.axis === "time" && strips?.start && page.origin ? (new Date(page.origin) - strips.start) / 1000 : 0;
  if (!state.shift || page.low === null) return page;
  const move = (points) => points.map(([x, y]) => [x + state.shift, y]);
  return {
    ...page, low: 0, high: Math.max(page.high + state.shift, strips.end),
    marks: page.marks.map((m) => ({ ...m, x: m.x + state.shift })),
    segments: page.segments.map((s) => ({ ...s, repeated_from: s.repeated_from === null ? null : s.repeated_from + state.shift,
      curves: Object.fromEntries(Object.entries(s.curves).map(([n, points]) => [n, move(points)])) })),
  };
};

const addPlot = (name, grid) => {
  const out = make("span", { className: "readout" }), canvas = make("canvas", { tabIndex: 0 });
  canvas.setAttribute("role", "img");
  const legend = make("span", { className: "legend" });
  const figure = make("figure", { className: "chart" }, make("figcaption", {}, make("b", { textContent: TITLES[name] || name }), legend, out), canvas);
  figure.dataset.metric = name;
  grid.append(make("div", { className: `card${name === "loss" ? " wide" : ""}` }, figure));
  const plot = new Plot(canvas, out, { zoom, cursor });
  plot.legend = legend;
  state.plots.set(name, plot);
  return plot;
};

const draw = (page) => {
  state.metrics = page.metrics;
  if (page.low === null) return;
  state.ends = [page.low, page.high];
  if (!state.chosen) state.chosen = FIRST.filter((n) => page.metrics.includes(n));
  if (!state.chosen.length) state.chosen = page.metrics.filter((n) => !n.startsWith("eval_")).slice(0, 4);
  if (!document.getElementById("curves-grid")) build();
  menu();
  const grid = document.getElementById("curves-grid");
  for (const [name, plot] of state.plots) if (!state.chosen.includes(name)) { plot.canvas.closest(".card").remove(); state.plots.delete(name); }
  const low = state.low ?? page.low, high = state.high ?? page.high, attempts = new Set(page.segments.map((s) => s.attempt)).size;
  if (page.axis === "time" && state.shift) strips.view(low, high);
  for (const name of state.chosen) {
    const plot = state.plots.get(name) || addPlot(name, grid);
    const lines = partners(name).map((n) => ({
      name: n === name ? (n === "loss" ? "training" : n) : "held-out", color: n === name ? "--s0" : "--s1", dots: n !== name,
      segments: page.segments.filter((s) => s.curves[n]).map((s) => ({ attempt: s.attempt, repeatedFrom: s.repeated_from, points: s.curves[n] })),
    })).filter((l) => l.segments.length);
    plot.legend.replaceChildren(...(lines.length > 1 ? lines.map((l) => make("span", { className: `key ${l.dots ? "s1" : "s0"}`, textContent: l.name })) : []),
      ...(lines.some((l) => l.segments.some((s) => s.repeatedFrom !== null)) ? [make("span", { className: "key again", textContent: "done again later" })] : []),
      ...(name === "loss" && page.marks.some((m) => m.kind === "checkpoint") ? [make("span", { className: "key m", textContent: "checkpoint" })] : []));
    plot.set({ lines, marks: page.marks.filter((m) => m.kind !== "attempt" || m.attempt > 1), low, high: high > low ? high : low + 1, log: state.log, weight: state.weight, time: page.axis === "time", attempts, cursor: state.cursor });
    plot.canvas.setAttribute("aria-label", `${TITLES[name] || name}, ${plot.rest()}, over ${page.axis === "time" ? clock(page.high) : `${show(page.high)} steps`}. Arrows read values, plus and minus zoom, 0 shows all.`);
  }
  document.getElementById("curves-note").textContent = page.sampled ? "a sample; every step is being read" : "";
};

const png = () => {
  const cards = [...state.plots.values()], width = Math.max(...cards.map((p) => p.canvas.width)), ratio = window.devicePixelRatio || 1;
  const sheet = make("canvas", { width, height: cards.reduce((sum, p) => sum + p.canvas.height + 30 * ratio, 0) }), g = sheet.getContext("2d");
  const style = getComputedStyle(box);
  g.fillStyle = style.getPropertyValue("--paper"); g.fillRect(0, 0, sheet.width, sheet.height);
  let y = 0;
  for (const [name, plot] of state.plots) {
    g.fillStyle = style.getPropertyValue("--ink"); g.font = `600 ${14 * ratio}px sans-serif`;
    g.fillText(`${TITLES[name] || name}  ${plot.rest()}`, 10 * ratio, y + 20 * ratio);
    g.drawImage(plot.canvas, 0, y + 30 * ratio);
    y += plot.canvas.height + 30 * ratio;
  }
  sheet.toBlob((blob) => {
    const link = make("a", { href: URL.createObjectURL(blob), download: `${box.dataset.name}-curves.png` });
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 1000);
  });
};

const menu = () => {
  const list = document.getElementById("curves-metrics");
  if (list.dataset.names === page_names()) return;
  list.dataset.names = page_names();
  list.replaceChildren(...state.metrics.filter((n) => !(n.startsWith("eval_") && state.metrics.includes(n.slice(5)))).map((name) => {
    const input = make("input", { type: "checkbox", checked: state.chosen.includes(name) });
    input.addEventListener("change", () => {
      state.chosen = input.checked ? [...state.chosen, name] : state.chosen.filter((n) => n !== name);
      pull();
    });
    return make("label", {}, input, document.createTextNode(TITLES[name] || name));
  }));
};
const page_names = () => state.metrics.join("\n");

const build = () => {
  const axis = make("select", { id: "curves-axis" }, make("option", { value: "step", textContent: "steps" }), make("option", { value: "time", textContent: "time" }));
  axis.addEventListener("change", () => { state.axis = axis.value; state.whole = null; zoom(null, null); });
  const log = make("input", { type: "checkbox", id: "curves-log" });
  log.addEventListener("change", () => { state.log = log.checked; for (const p of state.plots.values()) p.set({ log: log.checked }); });
  const range = make("input", { type: "range", id: "curves-smooth", min: "0", max: "0.99", step: "0.01", value: "0" });
  range.addEventListener("input", () => { state.weight = Number(range.value); for (const p of state.plots.values()) p.set({ weight: state.weight }); });
  const whole = make("button", { id: "curves-whole", type: "button", className: "button", textContent: "Show all", hidden: true });
  whole.addEventListener("click", () => zoom(null, null));
  const picture = make("button", { id: "curves-png", type: "button", className: "button", textContent: "PNG" });
  picture.addEventListener("click", png);
  const tools = make("div", { className: "tools" },
    make("label", {}, "over ", axis), make("label", {}, "smooth ", range), make("label", {}, log, "log"), whole,
    make("details", { className: "menu" }, make("summary", { textContent: "Metrics" }), make("div", { id: "curves-metrics" })),
    make("span", { id: "curves-note", className: "quiet small-text" }), make("span", { className: "end" }),
    make("a", { className: "button", id: "curves-csv", href: `/jobs/${box.dataset.job}/curves.csv`, textContent: "CSV" }), picture);
  box.replaceChildren(make("h2", { className: "sr", textContent: "Curves" }), tools, make("div", { id: "curves-grid" }));
  box.dataset.keep = "1";
};

if (box) {
  const repaint = () => { for (const p of state.plots.values()) p.draw(); };
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", repaint);
  strips = Strips.open({ shared: () => state.axis === "time", cursor, zoom, ready: () => { if (state.axis === "time") pull(); } });
  document.addEventListener("trainmaster:swapped", () => { box = document.getElementById("curves") ?? box; const live = document.querySelector("[data-status-final]"); if (live && !box.dataset.final) { box.dataset.final = "1"; pull(); } });
  pull();
}

// Curves of many runs on one canvas. Points come from the server in parts; drag or + and - zoom, arrows read out.
(() => {
  "use strict";
  const box = document.getElementById("comparison"), canvas = document.getElementById("overlay");
  const hue = (n) => (n * 137.508) % 360; // the golden angle: neighbours never look alike
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const colour = (n) => `hsl(${hue(n).toFixed(0)} ${dark.matches ? "70% 65%" : "65% 42%"})`;
  const paint = () => document.querySelectorAll(".swatch rect").forEach((rect) => { rect.style.fill = colour(Number(rect.parentNode.dataset.colour)); });
  paint();
  if (!box || !canvas) return;
  const field = (id) => document.getElementById(id), out = field("readout"), pen = canvas.getContext("2d");
  const runs = JSON.parse(box.dataset.runs).map(([id, name, colour]) => ({ id, name, colour, points: [] }));
  const edge = { left: 62, right: 14, top: 12, bottom: 34 };
  let view = null, drag = null, cursor = null; // view: [low, high] on the x axis; null: all of it

  const show = (n) => {
    if (n === null || !Number.isFinite(n)) return "–";
    const size = Math.abs(n);
    return size && (size < 1e-3 || size >= 1e6) ? n.toExponential(2) : n.toLocaleString("en", { maximumSignificantDigits: 4 });
  };
  const lines = () => {
    const time = field("by-time").checked, width = Number(field("smooth").value), log = field("log-scale").checked;
    return runs.map((run) => {
      const kept = [];
      let sum = null;
      for (const [step, seconds, value] of run.points) {
        const x = time ? seconds : step;
        if (x === null || value === null || (log && value <= 0)) { kept.push(null); sum = null; continue; }
        sum = sum === null || !width ? value : sum + (value - sum) / (1 + width);
        kept.push([x, sum]);
      }
      return { run, kept };
    });
  };
  // Where the values reach a hundred times as far as those of half the runs: the part that can be read, and who leaves it.
  const middle = (drawn, left, right, low, high) => {
    const spans = [], all = [];
    for (const { run, kept } of drawn) {
      const ys = kept.filter((p) => p && p[0] >= left && p[0] <= right).map((p) => p[1]);
      if (ys.length) spans.push({ run, low: Math.min(...ys), high: Math.max(...ys) });
      if (drawn.length === 1) all.push(...ys);
    }
    const sorted = (list) => list.sort((a, b) => a - b), lows = sorted(spans.map((s) => s.low)), highs = sorted(spans.map((s) => s.high));
    let bottom = lows[Math.ceil((lows.length - 1) / 2)], top = highs[Math.floor((highs.length - 1) / 2)];
    if (all.length) { sorted(all); bottom = all[Math.floor(all.length * 0.01)]; top = all[Math.ceil(all.length * 0.99) - 1]; }
    const wide = top - bottom || Math.abs(top) / 10;
    if (!(wide > 0) || high - low <= 100 * wide) return null;
    const inside = (list, holds) => list.filter(holds);
    const cut = { low: Math.min(bottom, ...inside(lows, (y) => y >= bottom - 10 * wide)), high: Math.max(top, ...inside(highs, (y) => y <= top + 10 * wide)) };
    cut.names = spans.filter((s) => s.low < cut.low || s.high > cut.high).map((s) => s.run.name);
    cut.text = high > cut.high ? `up to ${show(high)}` : `down to ${show(low)}`;
    return cut;
  };
  const tell = (cut) => {
    const note = field("cut");
    note.hidden = !cut;
    if (cut) note.firstElementChild.textContent = `${cut.names.slice(0, 3).join(", ")}${cut.names.length > 3 ? ` and ${cut.names.length - 3} more` : ""} ${cut.names.length > 1 ? "go" : "goes"} beyond this axis, ${cut.text}.`;
  };
  const bounds = (drawn) => {
    let [left, right, low, high] = [Infinity, -Infinity, Infinity, -Infinity];
    for (const { kept } of drawn) for (const p of kept) if (p) { left = Math.min(left, p[0]); right = Math.max(right, p[0]); }
    if (view) [left, right] = view;
    for (const { kept } of drawn) for (const p of kept) if (p && p[0] >= left && p[0] <= right) { low = Math.min(low, p[1]); high = Math.max(high, p[1]); }
    if (!(high >= low)) return null;
    const cut = field("log-scale").checked ? null : middle(drawn, left, right, low, high);
    tell(cut);
    if (cut && !field("all-values").checked) [low, high] = [cut.low, cut.high];
    if (high === low) { low -= Math.abs(low) / 10 || 1; high += Math.abs(high) / 10 || 1; }
    return { left, right: right > left ? right : left + 1, low, high };
  };
  const ticks = (low, high, most) => {
    const raw = (high - low) / most, power = 10 ** Math.floor(Math.log10(raw));
    const step = [1, 2, 5, 10].map((f) => f * power).find((s) => (high - low) / s <= most);
    const list = [];
    for (let n = Math.ceil(low / step); n * step <= high; n += 1) list.push(n * step + 0); // a ceil of less than nothing is -0
    return list;
  };
  let scale = null;
  const draw = () => {
    const ratio = devicePixelRatio || 1, width = canvas.clientWidth, height = canvas.clientHeight, css = getComputedStyle(document.documentElement);
    canvas.width = width * ratio; canvas.height = height * ratio;
    pen.setTransform(ratio, 0, 0, ratio, 0, 0);
    pen.clearRect(0, 0, width, height);
    pen.font = `11.5px ${css.getPropertyValue("--sans")}`;
    const drawn = lines(), limits = bounds(drawn), log = field("log-scale").checked, f = log ? Math.log10 : (y) => y;
    scale = null;
    if (!limits) { pen.fillStyle = css.getPropertyValue("--faint"); pen.fillText("No points of this metric yet.", edge.left, height / 2); return; }
    const low = f(limits.low), high = f(limits.high), pad = (high - low) * 0.05 || 1;
    const across = (x) => edge.left + ((x - limits.left) / (limits.right - limits.left)) * (width - edge.left - edge.right);
    const down = (y) => edge.top + ((high + pad - f(y)) / (high - low + 2 * pad)) * (height - edge.top - edge.bottom);
    canvas.dataset.high = limits.high;
    scale = { ...limits, across, back: (px) => limits.left + ((px - edge.left) / (width - edge.left - edge.right)) * (limits.right - limits.left), drawn };
    pen.lineWidth = 1;
    for (const y of ticks(low - pad, high + pad, 5)) {
      const value = log ? 10 ** y : y, place = down(value);
      pen.strokeStyle = css.getPropertyValue("--grid"); pen.beginPath(); pen.moveTo(edge.left, place); pen.lineTo(width - edge.right, place); pen.stroke();
      pen.fillStyle = css.getPropertyValue("--faint"); pen.textAlign = "right"; pen.textBaseline = "middle"; pen.fillText(show(value), edge.left - 8, place);
    }
    pen.textAlign = "center"; pen.textBaseline = "top";
    for (const x of ticks(limits.left, limits.right, Math.max(2, Math.floor(width / 110)))) pen.fillText(show(x), across(x), height - edge.bottom + 8);
    pen.textAlign = "right"; pen.fillText(field("by-time").checked ? "seconds" : "step", width - edge.right, height - 13);
    pen.save(); pen.beginPath(); pen.rect(edge.left, 0, width - edge.left - edge.right, height - edge.bottom + 1); pen.clip();
    pen.lineWidth = runs.length > 40 ? 1 : 1.6; pen.globalAlpha = runs.length > 40 ? 0.6 : 1; pen.lineJoin = "round";
    for (const { run, kept } of drawn) {
      pen.strokeStyle = colour(run.colour); pen.beginPath();
      let last = null; // a gap, or a step back (another attempt), lifts the pen
      for (const p of kept) {
        if (p) { if (last !== null && p[0] > last) pen.lineTo(across(p[0]), down(p[1])); else { pen.moveTo(across(p[0]), down(p[1])); pen.lineTo(across(p[0]) + 0.1, down(p[1])); } }
        last = p ? p[0] : null;
      }
      pen.stroke();
    }
    pen.globalAlpha = 1;
    if (cursor !== null) { pen.strokeStyle = css.getPropertyValue("--soft"); pen.beginPath(); pen.moveTo(across(cursor), edge.top); pen.lineTo(across(cursor), height - edge.bottom); pen.stroke(); }
    if (drag) { pen.fillStyle = css.getPropertyValue("--live"); pen.globalAlpha = 0.15; pen.fillRect(Math.min(drag[0], drag[1]), edge.top, Math.abs(drag[1] - drag[0]), height - edge.top - edge.bottom); }
    pen.restore();
  };
  let waiting = false;
  const later = () => { if (!waiting) { waiting = true; requestAnimationFrame(() => { waiting = false; draw(); }); } };
  const near = (kept, x) => kept.reduce((best, p) => (p && (!best || Math.abs(p[0] - x) < Math.abs(best[0] - x)) ? p : best), null);
  const read = (x) => {
    if (!scale) return;
    const time = field("by-time").checked;
    cursor = Math.max(scale.left, Math.min(scale.right, time ? x : Math.round(x))); // runs have whole steps
    const found = scale.drawn.map(({ run, kept }) => [run.name, near(kept, cursor)]).filter(([, p]) => p).sort((a, b) => a[1][1] - b[1][1]);
    const some = found.length > 6 ? [...found.slice(0, 3), null, ...found.slice(-3)] : found;
    // Of a long run not every point is here: one of another step says so.
    const of = ([name, [at, value]]) => `${name} ${show(value)}${time || at === cursor ? "" : ` (at ${show(at)})`}`;
    out.textContent = `${time ? "at" : "step"} ${show(cursor)}${Number(field("smooth").value) ? ", smoothed" : ""}: ${some.map((item) => (item ? of(item) : "…")).join(" · ")}`;
    later();
  };
  const zoom = (low, high) => { view = high > low ? [low, high] : null; later(); };
  const zoomBy = (factor) => {
    if (!scale) return;
    const middle = cursor ?? (scale.left + scale.right) / 2, half = ((scale.right - scale.left) * factor) / 2;
    zoom(middle - half, middle + half);
  };
  canvas.addEventListener("pointerdown", (e) => { drag = [e.offsetX, e.offsetX]; canvas.setPointerCapture(e.pointerId); });
  canvas.addEventListener("pointermove", (e) => { if (drag) { drag[1] = e.offsetX; later(); } else if (scale) read(scale.back(e.offsetX)); });
  canvas.addEventListener("pointerup", () => {
    if (drag && scale && Math.abs(drag[1] - drag[0]) > 6) { const [a, b] = drag.map(scale.back).sort((x, y) => x - y); drag = null; zoom(a, b); } else { drag = null; later(); }
  });
  canvas.addEventListener("pointerleave", () => { cursor = null; out.textContent = ""; later(); });
  canvas.addEventListener("dblclick", () => zoom(0, 0));
  canvas.addEventListener("keydown", (e) => {
    if (!scale) return;
    const step = (scale.right - scale.left) / 50, at = cursor ?? scale.left;
    const act = { ArrowLeft: () => read(at - step), ArrowRight: () => read(at + step), "+": () => zoomBy(0.5), "=": () => zoomBy(0.5), "-": () => zoomBy(2), "0": () => zoom(0, 0) }[e.key];
    if (act) { e.preventDefault(); act(); }
  });
  const keep = () => { // in the link that is passed on
    const link = field("permalink"), address = new URL(link.href);
    for (const [id, name] of [["by-time", "time"], ["log-scale", "log"]]) if (field(id).checked) address.searchParams.set(name, "1"); else address.searchParams.delete(name);
    link.href = address.pathname + address.search;
  };
  for (const id of ["by-time", "log-scale", "smooth", "all-values"]) field(id).addEventListener("input", () => { if (id === "by-time") view = null; keep(); later(); });
  field("whole").addEventListener("click", () => zoom(0, 0));
  dark.addEventListener("change", () => { paint(); later(); });
  new ResizeObserver(later).observe(canvas);
  (async () => {
    for (let first = 0; first < runs.length; first += 20) {
      const part = runs.slice(first, first + 20), ids = part.map((run) => run.id).join(",");
      try {
        const answer = await fetch(`/compare/curves?jobs=${ids}&metric=${encodeURIComponent(box.dataset.metric)}&of=${runs.length}`);
        if (!answer.ok) throw new Error(String(answer.status));
        const found = new Map((await answer.json()).curves.map((curve) => [curve.id, curve.points]));
        for (const run of part) run.points = found.get(run.id) ?? [];
        out.textContent = "";
      } catch {
        out.textContent = "The server does not answer; load the page again.";
      }
      later();
    }
    box.dataset.drawn = "1";
  })();
})();

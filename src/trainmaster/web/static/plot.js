// One chart on a canvas: lines in segments, work that was repeated in grey, marks, read-out, zoom by pointer and keys.
export const show = (n) => {
  if (n === null || n === undefined || Number.isNaN(n)) return "not a number";
  const size = Math.abs(n);
  if (size && (size < 1e-4 || size >= 1e15)) return n.toExponential(2);
  return n.toLocaleString("en", { maximumSignificantDigits: size >= 1000 ? Math.ceil(Math.log10(size + 1)) : 4 });
};
export const clock = (s) => {
  const t = Math.max(0, Math.round(s)), h = Math.floor(t / 3600), m = Math.floor((t % 3600) / 60);
  return h ? `${h} h ${String(m).padStart(2, "0")} min` : m ? `${m} min ${String(t % 60).padStart(2, "0")} s` : `${t} s`;
};
const short = (n) => {
  const size = Math.abs(n);
  if (size >= 1e13) return n.toExponential(1);
  for (const [limit, letter] of [[1e9, "G"], [1e6, "M"], [1e3, "k"]]) if (size >= limit) return `${+(n / limit).toPrecision(4)}${letter}`;
  return size && size < 1e-3 ? n.toExponential(1) : String(+n.toPrecision(4));
};
const STEPS = [1, 2, 2.5, 5, 10], TIMES = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200, 86400];
const ticks = (low, high, most, time) => {
  const rough = (high - low) / most;
  if (!(rough > 0)) return [low];
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = (time && TIMES.find((s) => s >= rough)) || STEPS.map((s) => s * power).find((s) => s >= rough * 0.999);
  const list = [];
  for (let v = Math.ceil(low / step) * step; v <= high + step * 1e-9; v += step) list.push(Math.abs(v) < step * 1e-9 ? 0 : v);
  return list;
};
const smooth = (points, weight) => {
  if (!weight) return points;
  let kept = null;
  return points.map(([x, y]) => [x, y === null ? null : (kept = kept === null ? y : weight * kept + (1 - weight) * y)]);
};

// Of points in order those between two places, and one beyond on each side so that the line goes to the edge.
const between = (points, low, high) => {
  const first = (holds) => { let a = 0, b = points.length; while (a < b) { const middle = (a + b) >> 1; if (holds(points[middle][0])) b = middle; else a = middle + 1; } return a; };
  return points.slice(Math.max(0, first((x) => x >= low) - 1), first((x) => x > high) + 1);
};
// Computed styles are asked for once in a drawing: each question may lay out the page again.
export const palette = (style) => { const known = new Map(); return (name) => { if (!known.has(name)) known.set(name, style.getPropertyValue(name).trim()); return known.get(name); }; };
export const say = (element, text) => { if (element.textContent !== text) element.textContent = text; };

export class Plot {
  // lines: [{name, color, dots, segments: [{attempt, repeatedFrom, points}]}]; on: {zoom(low, high), cursor(x)}
  constructor(canvas, out, on) {
    Object.assign(this, { canvas, out, on, lines: [], marks: [], low: 0, high: 1, log: false, weight: 0, time: false, cursor: null, drag: null });
    const at = (e) => this.toX(e.clientX - canvas.getBoundingClientRect().left);
    canvas.addEventListener("pointerdown", (e) => { if (e.button === 0) { this.drag = [at(e), at(e)]; canvas.setPointerCapture(e.pointerId); } });
    canvas.addEventListener("pointermove", (e) => { if (this.drag) this.drag[1] = at(e); on.cursor(at(e)); });
    canvas.addEventListener("pointerup", () => {
      const [a, b] = this.drag || [0, 0], wide = Math.abs(this.fromX(a) - this.fromX(b));
      this.drag = null;
      if (wide > 6) on.zoom(Math.min(a, b), Math.max(a, b)); else this.draw();
    });
    canvas.addEventListener("pointerleave", () => { if (!this.drag) on.cursor(null); });
    canvas.addEventListener("blur", () => on.cursor(null));
    canvas.addEventListener("dblclick", () => on.zoom(null, null));
    canvas.addEventListener("keydown", (e) => {
      const wide = this.high - this.low, x = this.cursor ?? this.low + wide / 2;
      const act = {
        ArrowLeft: () => on.cursor(this.next(x, -1)), ArrowRight: () => on.cursor(this.next(x, 1)),
        "+": () => on.zoom(x - wide / 4, x + wide / 4), "-": () => on.zoom(x - wide, x + wide), 0: () => on.zoom(null, null),
      }[e.key];
      if (!act || e.ctrlKey || e.metaKey) return;
      e.preventDefault();
      act();
    });
    new ResizeObserver(() => { this.measure(); this.draw(); }).observe(canvas);
  }
  measure() { this.width = this.canvas.clientWidth; this.height = this.canvas.clientHeight; }
  toX(px) { return this.low + (this.high - this.low) * Math.min(1, Math.max(0, (px - 52) / Math.max(1, this.width - 62))); }
  fromX(x) { return 52 + ((x - this.low) / (this.high - this.low || 1)) * (this.width - 62); }
  next(x, way) {
    const xs = [...new Set(this.lines.slice(0, 1).flatMap((l) => l.segments.flatMap((s) => s.points.map((p) => p[0]))))].filter((v) => v >= this.low && v <= this.high).sort((a, b) => a - b);
    if (this.cursor === null) return way > 0 ? xs[0] : xs[xs.length - 1];
    const place = xs.findIndex((v) => v >= x);
    return xs[Math.min(xs.length - 1, Math.max(0, (place < 0 ? xs.length - 1 : place) + way))] ?? x;
  }
  set(values) { Object.assign(this, values); this.draw(); }
  range() {
    let low = Infinity, high = -Infinity;
    for (const line of this.lines) for (const segment of line.segments) for (const [x, y] of segment.shown)
      if (y !== null && x >= this.low && x <= this.high && (!this.log || y > 0)) { low = Math.min(low, y); high = Math.max(high, y); }
    if (low > high) return [0, 1];
    if (this.log) return [low / 1.1, high * 1.1];
    const room = (high - low || Math.abs(high) || 1) * 0.06;
    return [low >= 0 && low < (high - low) * 0.4 ? 0 : low - room, high + room];
  }
  draw() {
    if (!this.width || !this.height) this.measure();
    const { canvas, height } = this, ratio = window.devicePixelRatio || 1, bottom = height - 24, top = 6;
    if (!this.width || !height) return;
    const style = getComputedStyle(canvas), color = palette(style), g = canvas.getContext("2d");
    const [wide, high] = [Math.floor(this.width * ratio), Math.floor(height * ratio)];
    if (canvas.width !== wide || canvas.height !== high) Object.assign(canvas, { width: wide, height: high });
    g.setTransform(1, 0, 0, 1, 0, 0);
    g.clearRect(0, 0, wide, high);
    g.scale(ratio, ratio);
    g.lineWidth = 1;
    g.font = `11.5px ${style.fontFamily}`;
    for (const line of this.lines) for (const segment of line.segments) {
      if (segment.weight !== this.weight) Object.assign(segment, { weight: this.weight, smoothed: line.dots ? segment.points : smooth(segment.points, this.weight) });
      segment.shown = between(segment.smoothed, this.low, this.high);
    }
    const [y0, y1] = this.range(), scale = this.log ? Math.log : (v) => v;
    const fromY = (y) => bottom - ((scale(y) - scale(y0)) / (scale(y1) - scale(y0) || 1)) * (bottom - top);
    g.strokeStyle = color("--grid");
    g.fillStyle = color("--faint");
    g.textBaseline = "middle";
    g.textAlign = "right";
    const rows = this.log ? ticks(Math.log10(y0), Math.log10(y1), 5).map((v) => 10 ** v) : ticks(y0, y1, Math.max(2, height / 55));
    for (const y of rows) {
      const at = Math.round(fromY(y)) + 0.5;
      g.beginPath(); g.moveTo(52, at); g.lineTo(this.width - 10, at); g.stroke();
      g.fillText(short(y), 46, at);
    }
    g.textBaseline = "top";
    g.textAlign = "center";
    for (const x of ticks(this.low, this.high, Math.max(2, this.width / 110), this.time)) g.fillText(this.time ? clock(x) : short(x), Math.min(this.width - 24, this.fromX(x)), bottom + 8);
    g.save();
    g.beginPath(); g.rect(52, 0, this.width - 62, bottom + 1); g.clip();
    for (const mark of this.marks) {
      if (mark.x < this.low || mark.x > this.high) continue;
      const at = Math.round(this.fromX(mark.x)) + 0.5, begun = mark.kind === "attempt";
      g.strokeStyle = begun ? color("--soft") : color("--mark");
      g.setLineDash(begun ? [5, 4] : []);
      g.beginPath(); g.moveTo(at, begun ? top : bottom - 7); g.lineTo(at, bottom); g.stroke();
      g.setLineDash([]);
    }
    const drawLine = (points, stroke, dots) => {
      g.strokeStyle = g.fillStyle = stroke;
      g.lineWidth = 1.6;
      g.lineJoin = "round";
      g.beginPath();
      let pen = false;
      const gap = (p) => !p || p[1] === null || (this.log && p[1] <= 0);
      for (const [place, [x, y]] of points.entries()) {
        if (gap(points[place])) { pen = false; continue; }
        const px = this.fromX(x), py = fromY(y);
        if (pen) g.lineTo(px, py); else g.moveTo(px, py);
        pen = true;
        if (dots || (gap(points[place - 1]) && gap(points[place + 1]))) g.rect(px - 1.5, py - 1.5, 3, 3); // alone: no line shows it
      }
      g.stroke();
      g.lineWidth = 1;
    };
    for (const line of this.lines) for (const segment of line.segments) {
      const cut = segment.repeatedFrom;
      const kept = cut === null ? segment.shown : segment.shown.filter(([x]) => x < cut);
      if (cut !== null) drawLine(segment.shown.filter(([x]) => x >= cut), color("--mark"), false);
      drawLine(kept, color(line.color), line.dots);
    }
    if (this.drag) {
      const [a, b] = this.drag.map((x) => this.fromX(x));
      g.fillStyle = color("--live");
      g.globalAlpha = 0.15;
      g.fillRect(Math.min(a, b), top, Math.abs(a - b), bottom - top);
      g.globalAlpha = 1;
    }
    if (this.cursor !== null && this.cursor >= this.low && this.cursor <= this.high) {
      g.strokeStyle = color("--soft");
      const at = Math.round(this.fromX(this.cursor)) + 0.5;
      g.beginPath(); g.moveTo(at, top); g.lineTo(at, bottom); g.stroke();
    }
    g.restore();
    say(this.out, this.cursor === null ? this.rest() : this.read(this.cursor));
  }
  near(x) {
    // the last segment that has the place: what was done again counts
    return this.lines.map((line) => {
      let best = null;
      for (const segment of line.segments) for (const p of segment.points) if (best === null || Math.abs(p[0] - x) <= Math.abs(best.x - x)) best = { x: p[0], y: p[1], attempt: segment.attempt };
      return { line, best };
    }).filter((r) => r.best);
  }
  read(x) {
    const found = this.near(x);
    if (!found.length) return "";
    const where = this.time ? clock(found[0].best.x) : `step ${show(found[0].best.x)}`, attempt = this.attempts > 1 ? ` · attempt ${found[0].best.attempt}` : "";
    return `${where}${attempt} · ${found.map((r) => `${r.line.name} ${show(r.best.y)}`).join(" · ")}`;
  }
  rest() {
    const points = (this.lines[0]?.segments || []).flatMap((s) => s.points).filter((p) => p[1] !== null);
    return points.length ? `${show(points[0][1])} → ${show(points[points.length - 1][1])}` : "";
  }
}

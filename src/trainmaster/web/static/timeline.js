// Strips along the time of a run: what its GPUs did and what that cost, and a row for each node. Over time they share the curves' axis.
import { clock, palette, say } from "./plot.js";

const LEFT = 52, RIGHT = 10; // as plot.js has them
const STAGES = { queued: "idle", provisioning: "warn", checking: "warn", starting: "warn", working: "good", stalled: "bad", idle: "idle", unknown: "idle" };
const KEYS = [["good", "the run comes nearer to its end"], ["warn", "provisioning, checks, starts"], ["bad", "lost: repeated, stalled, saving, idle"], ["idle", "waiting, or unknown"]];
const make = (tag, values = {}, ...inside) => { const e = Object.assign(document.createElement(tag), values); e.append(...inside); return e; };
const dollars = (cents) => (cents > 0 && cents < 1 ? "under $0.01" : `$${(cents / 100).toFixed(2)}`);
const percent = (share) => (share >= 0.995 ? "" : ` ${share < 0.01 ? "under 1" : Math.round(100 * share)}%`);

export class Strips {
  // on: {shared(): whether the curves are over time, cursor(x), zoom(low, high), ready()}
  static open(on) {
    const box = document.getElementById("strips");
    return box ? new Strips(box, on) : null;
  }
  constructor(box, on) {
    Object.assign(this, { box, on, page: null, low: null, high: null, at: null, drag: null, rows: [], words: JSON.parse(box.dataset.bins) });
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.draw());
    this.pull();
  }
  get start() { return this.page ? new Date(this.page.start) : null; }
  get end() { return this.page ? (new Date(this.page.end) - this.start) / 1000 : 0; }
  async pull() {
    const over = document.querySelector("[data-status-final]") !== null; // asked before: the end may come during the answer
    let wait = 10000;
    try {
      const answer = await fetch(`/v1/training/jobs/${this.box.dataset.job}/timeline`);
      if (!answer.ok) throw new Error(String(answer.status));
      const page = await answer.json(), first = this.page === null;
      this.box = document.getElementById("strips") ?? this.box; // until it is built, a swap of the page replaces it
      if (!page.whole) wait = 2000;
      else {
        this.page = page;
        this.build();
        if (first) this.on.ready();
        if (over) wait = 0;
      }
    } catch { wait = 10000; }
    if (wait) setTimeout(() => this.pull(), wait);
  }
  build() {
    const { box, page } = this, names = JSON.stringify(page.nodes.map((n) => n.node));
    if (!page.cells.length) return;
    box.hidden = false;
    box.dataset.keep = "1"; // a swap of the page leaves it
    if (this.names !== names) {
      this.names = names;
      this.rows = [];
      for (const old of [...box.children].slice(1)) old.remove();
      box.append(this.canvas("bins", null));
      for (const node of page.nodes) {
        const note = make("span", { className: "quiet" });
        const canvas = this.canvas("", node.node);
        box.append(make("div", { className: "row" }, make("p", {}, make("b", { textContent: node.node }), note), canvas));
        this.rows.at(-1).note = note;
      }
      if (page.more_nodes) box.append(make("p", { className: "quiet small-text", textContent: `and ${page.more_nodes} more nodes of which nothing bad was said` }));
      box.append(make("ul", { className: "keys" }, ...KEYS.map(([tone, text]) => make("li", {}, make("i", { className: tone }), text))));
    }
    this.draw();
    box.dataset.drawn = "1";
  }
  canvas(kind, node) {
    const canvas = make("canvas", { className: kind, tabIndex: node === null ? 0 : -1 }), at = (e) => this.toX(e.clientX - canvas.getBoundingClientRect().left);
    canvas.setAttribute("role", "img");
    canvas.addEventListener("pointerdown", (e) => { if (e.button === 0 && this.on.shared()) { this.drag = [at(e), at(e)]; canvas.setPointerCapture(e.pointerId); } });
    canvas.addEventListener("pointermove", (e) => { if (this.drag) this.drag[1] = at(e); this.move(at(e)); });
    canvas.addEventListener("pointerup", () => {
      const [a, b] = this.drag || [0, 0];
      this.drag = null;
      if (Math.abs(a - b) > (this.right - this.left) / 100) this.on.zoom(Math.min(a, b), Math.max(a, b));
    });
    canvas.addEventListener("pointerleave", () => { if (!this.drag) this.move(null); });
    canvas.addEventListener("blur", () => this.move(null));
    canvas.addEventListener("keydown", (e) => {
      const wide = this.right - this.left, x = this.at ?? this.left, cells = this.page.cells, place = cells.findIndex((c) => c.end_s > x);
      const go = (way) => { const next = cells[Math.max(0, Math.min(cells.length - 1, (place < 0 ? cells.length - 1 : place) + way))]; this.move((next.start_s + next.end_s) / 2); };
      const zoom = (low, high) => { if (this.on.shared()) this.on.zoom(low, high); };
      const act = { ArrowLeft: () => go(-1), ArrowRight: () => go(this.at === null ? 0 : 1), "+": () => zoom(x - wide / 4, x + wide / 4), "-": () => zoom(x - wide, x + wide), 0: () => zoom(null, null) }[e.key];
      if (!act || e.ctrlKey || e.metaKey) return;
      e.preventDefault();
      act();
    });
    new ResizeObserver(() => this.draw()).observe(canvas);
    this.rows.push({ canvas, node, note: null });
    return canvas;
  }
  get left() { return this.low ?? 0; }
  get right() { return Math.max(this.high ?? this.end, this.left + 1e-3); }
  toX(px) { return this.left + (this.right - this.left) * Math.min(1, Math.max(0, (px - LEFT) / Math.max(1, this.rows[0].canvas.clientWidth - LEFT - RIGHT))); }
  fromX(x, width) { return LEFT + ((x - this.left) / (this.right - this.left)) * (width - LEFT - RIGHT); }
  view(low, high) { this.low = low; this.high = low === null ? null : high; this.draw(); }
  move(x) { if (this.on.shared()) this.on.cursor(x); else this.point(x); }
  point(x) { this.at = x; this.draw(); }
  draw() {
    if (!this.page || !this.rows.length || !this.rows[0].canvas.isConnected) return;
    const style = getComputedStyle(this.box), known = palette(style), color = (name) => known(`--${name}`), ratio = window.devicePixelRatio || 1;
    const sizes = this.rows.map(({ canvas }) => [canvas.clientWidth, canvas.clientHeight]); // all before the first change: one layout
    const family = getComputedStyle(this.rows[0].canvas).fontFamily;
    for (const [place, row] of this.rows.entries()) {
      const { canvas, node } = row, [width, height] = sizes[place];
      if (!width) continue;
      const [wide, high] = [Math.floor(width * ratio), Math.floor(height * ratio)];
      if (canvas.width !== wide || canvas.height !== high) Object.assign(canvas, { width: wide, height: high });
      const g = canvas.getContext("2d");
      g.setTransform(1, 0, 0, 1, 0, 0);
      g.clearRect(0, 0, wide, high);
      g.scale(ratio, ratio);
      g.save();
      g.beginPath(); g.rect(LEFT, 0, width - LEFT - RIGHT, height); g.clip();
      if (node === null) this.drawBins(g, width, height - 18, color); else this.drawNode(g, row, width, height, color);
      if (this.at !== null) { g.fillStyle = color("ink"); g.fillRect(Math.round(this.fromX(this.at, width)), 0, 1, height); }
      g.restore();
      if (node === null) this.drawAxis(g, width, height, color, family);
    }
    say(this.box.querySelector("output"), this.read());
  }
  drawBins(g, width, height, color) {
    for (const cell of this.page.cells) {
      const a = this.fromX(cell.start_s, width), b = this.fromX(cell.end_s, width);
      if (b < LEFT || a > width) continue;
      let top = 0;
      // the good at the foot, as in a chart of shares
      for (const tone of ["bad", "warn", "idle", "good"]) for (const [name, share] of Object.entries(cell.shares)) if (this.words[name]?.[1] === tone) {
        g.fillStyle = color(tone);
        g.fillRect(a, top * height, Math.max(b - a, 0.75), share * height);
        top += share;
      }
    }
  }
  drawAxis(g, width, height, color, family) {
    g.font = `11.5px ${family}`;
    g.fillStyle = color("faint");
    g.textBaseline = "bottom";
    // Labels are whole seconds: none stands twice.
    const most = Math.max(1, Math.min(Math.max(2, Math.floor(width / 160)), Math.floor(this.right - this.left)));
    for (let n = 0; n <= most; n += 1) {
      g.textAlign = n === 0 ? "left" : n === most ? "right" : "center";
      const x = this.left + ((this.right - this.left) * n) / most;
      g.fillText(clock(x), this.fromX(x, width), height);
    }
  }
  drawNode(g, row, width, height, color) {
    const node = this.page.nodes.find((n) => n.node === row.node), parts = this.partsOf(node);
    g.fillStyle = color("sunken");
    g.fillRect(LEFT, 3, width, height - 6);
    for (const part of parts) {
      g.fillStyle = color(STAGES[part.stage] || "idle");
      const a = this.fromX(part.start_s, width);
      g.fillRect(a, 3, Math.max(this.fromX(part.end_s, width) - a, 0.75), height - 6);
    }
    for (const mark of node.marks) {
      if (mark.tone === "good") continue;
      const x = this.fromX(mark.at_s, width);
      g.fillStyle = color(mark.tone);
      g.strokeStyle = color("paper");
      g.beginPath(); g.moveTo(x, 0); g.lineTo(x + 7, height / 2); g.lineTo(x, height); g.lineTo(x - 7, height / 2); g.closePath(); g.fill(); g.stroke();
    }
    const said = this.say(node, parts);
    if (row.note.textContent === said) return;
    row.note.textContent = said;
    row.canvas.setAttribute("aria-label", `${node.node}: ${said}`);
  }
  partsOf(node) { return this.page.attempts.filter((a) => node.attempts.includes(a.attempt)).flatMap((a) => a.parts); }
  say(node, parts) {
    if (this.at !== null) {
      const part = parts.find((p) => p.start_s <= this.at && this.at < p.end_s), near = (this.right - this.left) / 60;
      const said = node.marks.filter((m) => Math.abs(m.at_s - this.at) < near).map((m) => m.text);
      return [part ? part.stage : "not part of the run", ...said].join(" · ");
    }
    const slow = node.marks.filter((m) => m.kind === "straggler").length, bad = node.marks.filter((m) => m.kind !== "straggler" && m.tone !== "good");
    const attempts = node.attempts.length > 1 ? `attempts ${node.attempts.join(", ")}` : `attempt ${node.attempts[0]}`;
    return [attempts, ...(slow ? [`straggler ${slow === 1 ? "once" : `${slow} times`}`] : []), ...bad.slice(-2).map((m) => m.text)].join(" · ");
  }
  read() {
    const cells = this.page.cells;
    const [canvas] = this.rows.map((r) => r.canvas);
    if (this.at === null) {
      const cents = cells.reduce((sum, c) => (c.cents === null ? null : sum + c.cents), 0);
      canvas.setAttribute("aria-label", `What the GPUs did over ${clock(this.end)}. The table below has the sums. Arrows read, ${this.on.shared() ? "plus and minus zoom, 0 shows all." : "over steps above."}`);
      return `${clock(this.end)} from submission${cents === null || !cents ? "" : `, ${dollars(cents)}`}${this.on.shared() || !document.querySelector("#curves figure, #curves-axis") ? "" : "; choose time above for one axis with the curves"}`;
    }
    const cell = cells.find((c) => c.start_s <= this.at && this.at < c.end_s) || cells[cells.length - 1];
    const bins = Object.entries(cell.shares).sort((a, b) => b[1] - a[1]).map(([name, share]) => `${this.words[name]?.[0] ?? name}${percent(share)}`);
    const parts = [clock(this.at), cell.attempt ? `attempt ${cell.attempt}` : null, bins.join(", "), `${clock(cell.end_s - cell.start_s)}${cell.cents === null ? "" : ` for ${dollars(cell.cents)}`}`];
    return parts.filter(Boolean).join(" · ");
  }
}

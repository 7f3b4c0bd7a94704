// The read-out of a chart: values under the pointer, or under the arrow keys. Charts are whole without it.
// Boxes of last lines are scrolled to their end, where the error is.
(() => {
  "use strict";
  const near = (points, x) => points.reduce((best, p, i) => (Math.abs(p[0] - x) <= Math.abs(points[best][0] - x) ? i : best), 0);
  const show = (n) => {
    const size = Math.abs(n);
    if (size && (size < 1e-4 || size >= 1e15)) return n.toExponential(2);
    return n.toLocaleString("en", { maximumSignificantDigits: size >= 1000 ? Math.ceil(Math.log10(size + 1)) : 4 });
  };
  const wire = (figure) => {
    const axes = figure.querySelector(".axes"), out = figure.querySelector(".readout"), data = figure.querySelector(".data");
    if (!axes || axes.dataset.wired) return;
    axes.dataset.wired = "1";
    const rest = out.textContent, left = Number(data.dataset.left), width = Number(data.dataset.width);
    const lines = [...data.querySelectorAll("path")].map((path) => ({
      name: path.dataset.name,
      points: [...path.dataset.points.matchAll(/(\S+) (\S+)/g)].map((m) => [Number(m[1]), Number(m[2])]),
    }));
    const guide = document.createElementNS("http://www.w3.org/2000/svg", "line");
    guide.setAttribute("class", "guide");
    guide.setAttribute("y2", "100%");
    let now = null; // index of the point that is read out
    const at = (index) => {
      now = index;
      const step = lines[0].points[index][0], place = `${(100 * (step - left)) / width}%`;
      guide.setAttribute("x1", place);
      guide.setAttribute("x2", place);
      axes.append(guide);
      out.textContent = [`step ${show(step)}`, ...lines.map((line, order) => {
        const [px, py] = line.points[order ? near(line.points, step) : index];
        return `${line.name} ${show(py)}${px === step ? "" : ` (step ${show(px)})`}`;
      })].join(" · ");
    };
    const leave = () => { guide.remove(); out.textContent = rest; now = null; };
    axes.addEventListener("pointermove", (e) => {
      const box = axes.getBoundingClientRect();
      at(near(lines[0].points, left + (width * (e.clientX - box.left)) / box.width));
    });
    axes.addEventListener("pointerleave", leave);
    axes.addEventListener("blur", leave);
    axes.addEventListener("keydown", (e) => {
      const way = { ArrowLeft: -1, ArrowRight: 1 }[e.key];
      if (!way) return;
      e.preventDefault();
      const last = lines[0].points.length - 1;
      at(now === null ? (way > 0 ? 0 : last) : Math.max(0, Math.min(last, now + way)));
    });
  };
  const all = () => {
    document.querySelectorAll("figure.chart").forEach(wire);
    document.querySelectorAll("pre[data-end]").forEach((box) => { box.scrollTop = box.scrollHeight; });
  };
  document.addEventListener("trainmaster:swapped", all);
  all();
})();

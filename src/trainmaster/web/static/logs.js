// A log that follows its run: new lines come as server-sent events, already rendered; the oldest leave the page.
const MOST = 5000; // lines kept in the page
const log = document.getElementById("log"), button = document.getElementById("follow");
let source = null, offsets = log?.dataset.offsets || "{}";

// Twice: lines of several rows have their height once they are near.
const toEnd = () => {
  log.scrollTop = log.scrollHeight;
  requestAnimationFrame(() => requestAnimationFrame(() => { log.scrollTop = log.scrollHeight; }));
};
const show = () => {
  const line = location.hash.startsWith("#L") && document.getElementById(location.hash.slice(1));
  for (const old of document.querySelectorAll(".line.chosen")) old.classList.remove("chosen");
  if (line) { line.classList.add("chosen"); line.scrollIntoView({ block: "center" }); } else if (log.dataset.tail !== undefined) toEnd();
};
// The page has half of its lines at first, which is painted sooner. The others are those before them, or behind them.
const grow = async () => {
  const earlier = !new URLSearchParams(location.search).has("at"), end = earlier ? "from" : "to";
  const link = document.getElementById(earlier ? "log-earlier" : "log-later"), shown = document.getElementById(`log-${end}`);
  const answer = link && await fetch(link.href).catch(() => null);
  if (!answer?.ok) return;
  const next = new DOMParser().parseFromString(await answer.text(), "text/html");
  const lines = [...next.querySelectorAll("#log .line")].filter((line) => !document.getElementById(line.id));
  const below = log.scrollHeight - log.scrollTop;
  if (earlier) { log.prepend(...lines); log.scrollTop = log.scrollHeight - below; } else log.append(...lines);
  shown.textContent = next.getElementById(`log-${end}`)?.textContent ?? shown.textContent;
  const further = next.getElementById(link.id);
  if (further) link.href = further.href; else link.remove();
};
const stop = () => {
  source?.close();
  source = null;
  if (button) { button.textContent = "Follow"; button.setAttribute("aria-pressed", "false"); }
};
const follow = () => {
  if (!log || log.dataset.live === undefined || source) return;
  const address = new URL(log.dataset.follow, location.href);
  address.searchParams.set("offsets", offsets);
  source = new EventSource(address);
  button.textContent = "Following";
  button.setAttribute("aria-pressed", "true");
  source.addEventListener("lines", (e) => {
    const news = JSON.parse(e.data), atEnd = log.scrollHeight - log.scrollTop - log.clientHeight < 40;
    offsets = JSON.stringify(news.offsets);
    log.insertAdjacentHTML("beforeend", news.html);
    while (log.childElementCount > MOST) log.firstElementChild.remove();
    if (atEnd) toEnd();
  });
  source.addEventListener("end", () => { stop(); button.hidden = true; delete log.dataset.live; });
  // Opened again from where it stopped, not from where the page began.
  source.addEventListener("error", () => { source?.close(); source = null; setTimeout(() => button.getAttribute("aria-pressed") === "true" && !document.hidden && follow(), 3000); });
};
if (log) {
  if (button) {
    button.hidden = false;
    button.addEventListener("click", () => (source ? stop() : follow()));
    document.addEventListener("visibilitychange", () => { if (document.hidden) { source?.close(); source = null; } else if (button.getAttribute("aria-pressed") === "true") follow(); });
    follow();
  }
  for (const choice of document.querySelectorAll("#log-form select")) choice.addEventListener("change", () => choice.form.requestSubmit());
  document.addEventListener("keydown", (e) => {
    if (e.ctrlKey || e.metaKey || e.altKey || e.target.closest?.("input, textarea, select, dialog")) return;
    if (e.key === "e") document.getElementById("first-error")?.click();
    if (e.key === "f") button?.click();
  });
  window.addEventListener("hashchange", show);
  show();
  requestAnimationFrame(() => setTimeout(() => grow().finally(() => { log.dataset.grown = ""; }), 200));
}

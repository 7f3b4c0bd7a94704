// Keeps an open page current: fetches its changing part again and swaps it in. Scroll, open sections and focus stay.
(() => {
  "use strict";
  const box = document.getElementById("live"), link = document.getElementById("link");
  document.addEventListener("submit", (e) => {
    const question = e.target.dataset.confirm;
    if (question && !window.confirm(question)) e.preventDefault();
  });
  if (!box || !box.dataset.from) return;
  let shown = null;

  const busy = () => {
    const selection = window.getSelection();
    const marked = selection && !selection.isCollapsed && box.contains(selection.anchorNode);
    return marked || box.querySelector(".axes:hover, .axes:focus, .inline:focus-within") !== null;
  };
  const swap = (text) => {
    const changed = new Set([...box.querySelectorAll("details[id]")].map((d) => `${d.id}:${d.open}`));
    const focus = box.contains(document.activeElement) ? document.activeElement.id : "";
    const kept = [...box.querySelectorAll("[data-keep]")]; // drawn by a script of its own
    box.innerHTML = text;
    for (const part of kept) document.getElementById(part.id)?.replaceWith(part);
    for (const section of box.querySelectorAll("details[id]")) {
      if (changed.has(`${section.id}:true`)) section.open = true;
      if (changed.has(`${section.id}:false`)) section.open = false;
    }
    if (focus) document.getElementById(focus)?.focus({ preventScroll: true });
    const title = box.querySelector("[data-title]");
    if (title) document.title = title.dataset.title;
    document.dispatchEvent(new Event("trainmaster:swapped"));
  };
  const look = async () => {
    let over = false;
    try {
      if (!document.hidden && !busy()) {
        const answer = await fetch(box.dataset.from, { headers: { Accept: "text/html" } });
        if (answer.status === 401 || (answer.redirected && new URL(answer.url).pathname === "/login")) {
          location.assign(`/login?next=${encodeURIComponent(location.pathname + location.search)}`); // signed out meanwhile
          return;
        }
        if (!answer.ok) throw new Error(String(answer.status));
        const text = await answer.text();
        if (text !== shown) swap(text);
        shown = text;
        over = answer.headers.get("Trainmaster-Final") === "1";
        link.textContent = "";
      }
    } catch {
      link.textContent = "The server does not answer; trying again. What you see may be old.";
    }
    if (!over) setTimeout(look, Number(box.dataset.every));
  };
  setTimeout(look, Number(box.dataset.every));
})();

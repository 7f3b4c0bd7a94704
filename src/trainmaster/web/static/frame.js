// Keys of every page: / searches, g and a letter goes to a section, ? lists the keys.
(() => {
  "use strict";
  const keys = document.getElementById("keys"), search = document.getElementById("search"), show = document.getElementById("show-keys");
  if (!keys) return;
  let going = -Infinity; // when g was pressed
  const open = () => { if (!keys.open) keys.showModal(); };
  show.hidden = false;
  show.addEventListener("click", open);
  document.addEventListener("keydown", (e) => {
    const field = e.target.closest?.("input, textarea, select");
    if (e.key === "Escape" && field) field.blur();
    if (e.ctrlKey || e.metaKey || e.altKey || field || keys.open) return;
    const gone = e.timeStamp - going < 1500;
    going = e.key === "g" && !gone ? e.timeStamp : -Infinity;
    if (gone) {
      const link = document.querySelector(`.sections a[data-key="${CSS.escape(e.key)}"]`);
      if (!link) return;
      e.preventDefault();
      link.click();
    } else if (e.key === "/") {
      e.preventDefault();
      search.focus();
      search.select();
    } else if (e.key === "?") open();
  });
})();

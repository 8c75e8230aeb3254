// `/` finds, `?` helps, `g` and a letter goes somewhere, others are the page's. Never while somebody types.
import { keepRows, pressed } from "./rows.js";

const CHORD_MS = 1200;

function typing(target) {
  return target.closest("input:not([type=checkbox], [type=radio]), select, textarea, [contenteditable]") !== null;
}

export function startKeys() {
  const help = document.querySelector("dialog.help");
  const opener = document.querySelector("[data-help]");
  opener.hidden = false;
  opener.addEventListener("click", () => help.showModal());
  let chordUntil = 0;
  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || typing(event.target) || help.open) return;
    if (event.key === "?") {
      help.showModal();
    } else if (event.key === "/") {
      const search = document.querySelector("[data-find]");
      if (!search) return;
      event.preventDefault();
      search.focus();
    } else if (event.key === "g") {
      chordUntil = event.timeStamp + CHORD_MS;
    } else if (event.timeStamp < chordUntil) {
      chordUntil = 0;
      document.querySelector(`.rail a[data-key="${CSS.escape(event.key)}"]`)?.click();
    } else if (pressed(event.key)) {
      event.preventDefault();
    }
  });
  keepRows();
}

// Times in the viewer's zone, and ages that go on counting and turn grey when stale.
import { age } from "./figures.js";

const local = new Intl.DateTimeFormat("sv-SE", {
  year: "numeric", month: "2-digit", day: "2-digit",
  hour: "2-digit", minute: "2-digit", second: "2-digit", timeZoneName: "shortOffset",
});

function tick() {
  const now = Date.now();
  for (const element of document.querySelectorAll("time[data-age]")) {
    const seconds = Math.round((now - Date.parse(element.dateTime)) / 1000);
    element.textContent = age(seconds);
    const limit = Number(element.dataset.stale);
    element.classList.toggle("stale", limit > 0 && seconds > limit);
  }
  for (const element of document.querySelectorAll("time[data-moment]:not([title])")) {
    element.title = element.textContent;
    element.textContent = local.format(new Date(element.dateTime)).replace(/GMT(?:\+0)?$/, "UTC");
  }
}

export function startClock() {
  tick();
  setInterval(() => { if (!document.hidden) tick(); }, 1000);
  document.addEventListener("htmx:afterSwap", tick);
  document.addEventListener("visibilitychange", () => { if (!document.hidden) tick(); });
}

// What every page does beyond its HTML. Without it, everything still works.
import { startClock } from "./clock.js";
import { startFind } from "./find.js";
import { startKeeping } from "./keep.js";
import { startKeys } from "./keys.js";
import { startLive } from "./live.js";

const THEME_SECONDS = 365 * 24 * 3600;

function startTheme() {
  const choice = document.querySelector("[data-theme-choice]");
  const root = document.documentElement;
  choice.value = root.dataset.theme || "auto";
  choice.disabled = false;
  choice.addEventListener("change", () => {
    root.dataset.theme = choice.value;
    document.cookie = `tidegate_theme=${choice.value}; path=/; max-age=${THEME_SECONDS}; samesite=lax`;
  });
}

function startCopy() {
  for (const button of document.querySelectorAll("[data-copy]")) {
    button.hidden = !navigator.clipboard;
    button.addEventListener("click", async () => {
      await navigator.clipboard.writeText(document.getElementById(button.dataset.copy).textContent);
      button.textContent = "Copied";
    });
  }
}

function startConfirm() {
  document.addEventListener("click", (event) => {
    const button = event.target.closest("[data-confirm]");
    if (button && !window.confirm(button.dataset.confirm)) event.preventDefault();
  });
}

// A plan is of what was typed before it: what is sent right after typing is not held to it.
function startPlans() {
  document.addEventListener("input", (event) => {
    const form = event.target.form;
    if (form?.id !== "planned") return;
    form.dispatchEvent(new CustomEvent("htmx:abort", { bubbles: true, detail: { elt: form } }));
    for (const token of document.querySelectorAll("#plan [name=plan_token]")) token.remove();
  });
}

// On a narrow screen the strip of pages is wider than the screen: where one is has to be seen.
function showHere() {
  const strip = document.querySelector(".rail nav ul");
  const here = strip?.querySelector("[aria-current]");
  if (here) strip.scrollLeft = here.offsetLeft - (strip.clientWidth - here.offsetWidth) / 2;
}

// After a refusal, who types goes on where the first fault is.
function focusFault() {
  document.querySelector("main [aria-invalid=true]")?.focus();
}

function startPrint() {
  for (const button of document.querySelectorAll("[data-print]")) {
    button.hidden = false;
    button.addEventListener("click", () => window.print());
  }
}

startTheme();
startPrint();
showHere();
focusFault();
startCopy();
startConfirm();
startPlans();
startClock();
startFind();
startKeeping();
startKeys();
startLive();

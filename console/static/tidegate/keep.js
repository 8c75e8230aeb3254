// What somebody does goes on while parts of the page are fetched anew: where the focus is, how far things are
// scrolled, what is folded out, and a click that has begun.
const KEPT = ".scroll, pre.log, details[open]";
const SAYS_WHICH = ["id", "href", "name", "value", "aria-label", "aria-labelledby"];
let kept = [];
let isPressed = false;
const waiting = new Set(); // parts to fetch when it is no longer

// What an element is in every rendering. Its row is a part of that: a button of another row does something else.
function markOf(element) {
  const own = SAYS_WHICH.map((name) => element.getAttribute(name) ?? "");
  const text = own.some(Boolean) ? "" : (element.querySelector("summary") ?? element).textContent.trim();
  const row = element.closest("tr, li")?.querySelector("a")?.getAttribute("href");
  return JSON.stringify([element.localName, ...own, text, element.form?.getAttribute("action"), row]);
}

const equalsOf = (element, mark) => [...document.querySelectorAll(element.localName)].filter((one) => markOf(one) === mark);

function note(element, restore) {
  const mark = markOf(element);
  kept.push({ element, mark, place: equalsOf(element, mark).indexOf(element), restore });
}

function noteScroll(element) {
  const { scrollLeft, scrollTop, scrollHeight } = element;
  if (!scrollLeft && !scrollTop) return;
  note(element, (now) => {
    now.scrollLeft = scrollLeft;
    // A log is scrolled from its end, to which lines have been added.
    now.scrollTop = scrollTop < 0 ? scrollTop - (now.scrollHeight - scrollHeight) : scrollTop;
  });
}

function noteAll() {
  kept = [];
  for (const element of document.querySelectorAll(KEPT)) {
    if (element.open) note(element, (now) => { now.open = true; });
    else noteScroll(element);
  }
  // htmx itself keeps the focus of what has an id.
  if (document.activeElement !== document.body) {
    note(document.activeElement, (now) => {
      if (document.activeElement === document.body) now.focus({ preventScroll: true });
    });
  }
}

function restoreAll() {
  for (const { element, mark, place, restore } of kept) {
    const now = element.isConnected ? element : equalsOf(element, mark)[place];
    if (now) restore(now);
  }
  kept = [];
}

function release() {
  isPressed = false;
  for (const part of waiting) if (part.isConnected) htmx.trigger(part, "live");
  waiting.clear();
}

export function startKeeping() {
  document.addEventListener("htmx:beforeSwap", (event) => {
    const { elt: part } = event.detail.requestConfig;
    if (isPressed && /^(live|every)\b/.test(part.getAttribute("hx-trigger"))) {
      event.detail.shouldSwap = false;
      waiting.add(part);
    }
    if (event.detail.shouldSwap) noteAll();
  });
  document.addEventListener("htmx:afterSwap", restoreAll);
  document.addEventListener("pointerdown", (event) => { isPressed = event.button === 0; });
  for (const end of ["pointerup", "pointercancel"]) document.addEventListener(end, release);
  document.addEventListener("pointermove", (event) => { // it may have been let go elsewhere
    if (isPressed && !event.buttons) release();
  });
}

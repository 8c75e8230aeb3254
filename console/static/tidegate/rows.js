// Keys for lists and their pages: j and k go through the rows of `[data-rows]`, x chooses one, and a letter
// presses what has it in `data-press`: in the row, or else on the page. Fields are focused instead.
const rowsOf = () => [...document.querySelectorAll("[data-rows] tbody tr")];
const boxOf = (row) => row?.querySelector("input[type=checkbox]");
let current = ""; // the address that the row leads to; it outlives the row, which is fetched anew

const addressOf = (row) => row.querySelector("a")?.getAttribute("href");
const rowNow = () => rowsOf().find((row) => addressOf(row) === current);

function go(row, isFocused = true) {
  for (const one of rowsOf()) one.classList.toggle("here", one === row);
  if (!row) return;
  current = addressOf(row);
  if (isFocused) row.querySelector("a").focus();
}

function step(distance) {
  const rows = rowsOf();
  if (!rows.length) return;
  const place = rows.indexOf(rowNow());
  const next = place < 0 ? (distance > 0 ? 0 : rows.length - 1) : place + distance;
  go(rows[Math.min(rows.length - 1, Math.max(0, next))]);
}

function press(letter) {
  const name = `[data-press="${CSS.escape(letter)}"]`;
  const row = rowNow();
  const onPage = [...document.querySelectorAll(name)].find((one) => !one.closest("[data-rows]"));
  const target = row?.querySelector(name) ?? onPage;
  if (!target) return false;
  const chosen = document.querySelector("[data-rows] input[type=checkbox]:checked");
  if (target.form?.id === "bulk" && !chosen) {
    if (!boxOf(row)) return false;
    boxOf(row).checked = true;
  }
  if (target.matches("input, textarea, select")) target.focus();
  else target.click();
  return true;
}

// Whether the key meant something here.
export function pressed(key) {
  if (key === "j" || key === "k") {
    step(key === "j" ? 1 : -1);
    return true;
  }
  if (key === "x") {
    boxOf(rowNow())?.click();
    return true;
  }
  return /^[a-z]$/.test(key) && press(key);
}

// What was chosen stays chosen when the rows are fetched anew.
export function keepRows() {
  let chosen = new Set();
  document.addEventListener("htmx:beforeSwap", () => {
    chosen = new Set([...document.querySelectorAll("[data-rows] input:checked")].map((box) => box.value));
  });
  document.addEventListener("htmx:afterSwap", () => {
    for (const row of rowsOf()) if (boxOf(row)) boxOf(row).checked = chosen.has(boxOf(row).value);
    go(rowNow(), false);
  });
}

// What is found while somebody types: arrow keys go through it, Enter opens, Escape leaves it. htmx fetches it.
export function startFind() {
  const input = document.querySelector("[data-find]");
  if (!input) return;
  const found = document.getElementById(input.dataset.find);
  const stops = () => [input, ...found.querySelectorAll("a")];
  const leave = () => found.replaceChildren();

  input.form.addEventListener("keydown", (event) => {
    const place = stops().indexOf(event.target);
    const step = { ArrowDown: 1, ArrowUp: -1 }[event.key];
    if (event.key === "Escape") {
      leave();
      input.value = "";
      input.blur();
    } else if (step && place >= 0) {
      event.preventDefault();
      stops()[place + step]?.focus();
    }
  });
  input.form.addEventListener("focusout", (event) => {
    if (event.relatedTarget && !input.form.contains(event.relatedTarget)) leave();
  });
  document.addEventListener("click", (event) => {
    if (!input.form.contains(event.target)) leave();
  });
}

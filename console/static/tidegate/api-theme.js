// The page of the API is dark where all others are.
const { theme } = document.currentScript.dataset;
const system = matchMedia("(prefers-color-scheme: dark)");

function paint() {
  const isDark = theme === "dark" || (theme === "auto" && system.matches);
  document.documentElement.classList.toggle("dark-mode", isDark);
}

system.addEventListener("change", paint);
paint();

// Numbers as people read them, for figures on pages and for charts: the same as telemetry/units.py, which
// says why. Both are held to tests/telemetry/units.json.
const SIZES = ["B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"].map((name, power) => [1024 ** power, name]);
const COUNTS = ["", "k", "M", "G", "T", "P"].map((letter, power) => [1000 ** power, letter]);
const MOMENTS = [[1, "µs"], [1e3, "ms"], [1e6, "s"]];
const SPANS = [[1, "s"], [60, "min"], [3600, "h"], [86400, "d"]];
const MINUTE_SHOWN = 59.95;

// Three significant digits, or all before the point; halves go up.
function three(amount) {
  if (amount < 1e-6) return "0";
  return amount >= 100 ? BigInt(Math.round(amount)).toString() : Number(amount.toPrecision(3)).toString();
}

function scaled(value, steps) {
  const amount = Math.abs(value);
  const at = Math.max(0, steps.findLastIndex(([unit]) => amount >= unit));
  let [unit, name] = steps[at];
  let digits = three(amount / unit);
  if (at + 1 < steps.length && Number(digits) * unit >= steps[at + 1][0]) [digits, name] = ["1", steps[at + 1][1]];
  return `${value < 0 && digits !== "0" ? "-" : ""}${digits} ${name}`;
}

function span(seconds) {
  for (let at = 1; ; at += 1) {
    const [[small, smallName], [unit, name], following] = SPANS.slice(at - 1, at + 2);
    const whole = Math.floor(seconds / small + 0.5) * small, rest = whole % unit;
    if (following && whole >= following[0]) continue;
    return `${Math.floor(whole / unit)} ${name}${rest ? ` ${rest / small} ${smallName}` : ""}`;
  }
}

function duration(seconds) {
  if (Math.abs(seconds) < MINUTE_SHOWN) return seconds ? scaled(seconds * 1e6, MOMENTS) : "0 s";
  return `${seconds < 0 ? "-" : ""}${span(Math.abs(seconds))}`;
}

export function age(seconds) {
  const distance = Math.abs(seconds);
  const [unit, name] = SPANS.findLast(([unit]) => distance >= unit) ?? SPANS[0];
  const amount = `${Math.floor(distance / unit)} ${name}`;
  return seconds >= 0 ? `${amount} ago` : `in ${amount}`;
}

const UNITS = {
  seconds: duration,
  share: (value) => scaled(value * 100, [[1, "%"]]),
  bytes: (value) => scaled(value, SIZES),
  "bytes/s": (value) => `${scaled(value, SIZES)}/s`,
};

export function show(value, unit) {
  if (value === null || value === undefined) return "no traffic";
  return unit in UNITS ? UNITS[unit](value) : `${scaled(value, COUNTS)}${unit}`.trim();
}

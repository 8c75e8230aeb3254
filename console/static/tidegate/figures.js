// Numbers as people read them. The same for figures on pages and for charts.
const whole = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const three = new Intl.NumberFormat("en", { maximumSignificantDigits: 3 });
const POWERS = [[1e15, "P"], [1e12, "T"], [1e9, "G"], [1e6, "M"], [1e3, "k"]];
const SIZES = ["EiB", "PiB", "TiB", "GiB", "MiB", "KiB"].map((name, place) => [1024 ** (6 - place), name]);
const TIMES = [[1, "s"], [1e-3, "ms"], [0, "µs"]];
const FACTORS = { s: 1, ms: 1e3, "µs": 1e6 };

// Bytes as console/sizes.py writes them.
function bytes(value) {
  const [size, name] = SIZES.find(([size]) => Math.abs(value) >= size) ?? [1, "B"];
  const amount = value / size;
  return `${Math.abs(amount) < 100 ? three.format(amount) : whole.format(amount)} ${name}`;
}

function count(value) {
  const [power, letter] = POWERS.find(([power]) => Math.abs(value) >= power) ?? [1, ""];
  return `${three.format(value / power)} ${letter}`.trim();
}

export const UNITS = {
  seconds(value) {
    const [, unit] = TIMES.find(([least]) => value >= least);
    return `${three.format(value * FACTORS[unit])} ${unit}`;
  },
  share: (value) => `${three.format(value * 100)} %`,
  bytes,
  "bytes/s": (value) => `${bytes(value)}/s`,
  "/s": (value) => `${Math.abs(value) < 1000 ? three.format(value) : whole.format(value)} /s`,
  "": (value) => (Math.abs(value) < 1e6 ? three.format(value) : count(value)),
};

export function show(value, unit) {
  return value === null || value === undefined ? "no traffic" : (UNITS[unit] ?? UNITS[""])(value);
}

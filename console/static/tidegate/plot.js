// What Plotly is told to draw: colours from tokens.css, units as in figures.js.
import { show } from "./figures.js";

const HUES = ["--accent", "--warn", "--series-3", "--series-4", "--series-5", "--bad"];
const DASHES = ["solid", "dash", "dot", "dashdot"];
const POWERS = Array.from({ length: 9 }, (_, power) => 10 ** (power - 6)); // of a heat map, in seconds
// Plotly takes text for HTML, and what people and peers have named is none.
const plain = (text) => text.replaceAll("&", "&amp;").replaceAll("<", "&lt;");
const dates = (times) => times.map((seconds) => new Date(seconds * 1000));

// As the page shows it now; a token alone would still say light-dark(…).
function colour(token) {
  const probe = document.createElement("span");
  probe.style.color = `var(${token})`;
  document.body.append(probe);
  const { color } = getComputedStyle(probe);
  probe.remove();
  return color;
}

export function tracesOf(data, times) {
  if (data.isHeatMap) return [heatMap(data, times), markers(data, times)];
  const lines = data.series.map((series, place) => line(data, times, series, place));
  return [...lines, ...data.earlier.map((series, place) => before(data, series, place)), markers(data, times)];
}

// A day or a week before, moved to where it is held against. It goes on ahead of what is told by now.
function before(data, series, place) {
  const times = series.values.map((_, step) => data.start + step * data.step);
  const trace = line(data, times, series, place);
  return { ...trace, mode: "lines", opacity: 0.55, line: { ...trace.line, width: 1.2, dash: "4px,4px" } };
}

function line(data, times, series, place) {
  return {
    type: "scatter",
    mode: times.length > 90 ? "lines" : "lines+markers", // a step alone is a point, and no line
    name: plain(series.name),
    x: dates(times),
    y: series.values,
    text: series.values.map((value) => show(value, data.unit)),
    hovertemplate: "%{text}",
    connectgaps: false,
    line: { color: colour(HUES[place % HUES.length]), width: 1.6, dash: DASHES[place % DASHES.length], simplify: false },
  };
}

// Buckets in use only, one row each; how many in colour, by their logarithm: one slow refill is to be seen.
function heatMap(data, times) {
  const [series] = data.series;
  const { bounds } = data;
  const all = Array.from({ length: bounds.length + 1 }, (_, bucket) => bucket);
  const used = all.filter((bucket) => series.values.some((counts) => counts?.[bucket]));
  const buckets = used.length ? all.slice(used[0], used.at(-1) + 1) : [];
  const words = (bucket) => (bucket < bounds.length ? `up to ${show(bounds[bucket], "seconds")}` : `more than ${show(bounds.at(-1), "seconds")}`);
  return {
    type: "heatmap",
    // Edges of cells, one more than there are: a cell is its step, and its bucket.
    x: dates([...times, ...times.slice(-1).map((last) => last + data.step)]),
    y: [...buckets.slice(0, 1).map((first) => first - 1), ...buckets].map((bucket) => edge(bounds, bucket)),
    z: buckets.map((bucket) => series.values.map((counts) => (counts?.[bucket] ? Math.log10(counts[bucket]) : null))),
    text: buckets.map((bucket) => series.values.map((counts) => `${counts?.[bucket] ?? 0} times, ${words(bucket)}`)),
    customdata: buckets,
    hovertemplate: "%{text}<extra></extra>",
    colorscale: [[0, colour("--heat-low")], [1, colour("--heat-high")]],
    showscale: false,
  };
}

// The upper one of a bucket. The first bucket has no lower one and the last no upper: they look like others.
function edge(bounds, bucket) {
  const factor = bounds[1] / bounds[0];
  return bounds[bucket] ?? (bucket < 0 ? bounds[0] / factor : bounds.at(-1) * factor);
}

// Events as triangles at the upper edge; their lines are shapes of the layout.
function markers(data, times) {
  const shown = data.markers.filter((marker) => times.length && marker.at >= times[0]);
  return {
    type: "scatter",
    mode: "markers",
    name: "events",
    yaxis: "y2",
    x: dates(shown.map((marker) => marker.at)),
    y: shown.map(() => 1),
    text: shown.map((marker) => plain(marker.sentence)),
    hovertemplate: "%{text}<extra></extra>",
    marker: { symbol: "triangle-down", size: 9, color: colour("--quiet") },
    showlegend: false,
    cliponaxis: false,
  };
}

export function layoutOf(data, times, element) {
  const [quiet, grid, text, panel] = ["--quiet", "--line", "--text", "--panel"].map(colour);
  const axis = { gridcolor: grid, linecolor: grid, tickcolor: grid, zerolinecolor: grid, tickfont: { color: quiet, size: 11 }, automargin: true, fixedrange: true };
  const now = Date.now();
  const range = data.span === null || !times.length ? dates([data.start, data.end]) : [new Date(now - data.span * 1000), new Date(now)];
  return {
    autosize: true,
    height: 240,
    margin: { l: 8, r: 8, t: 14, b: 8 },
    paper_bgcolor: "rgba(0,0,0,0)",
    plot_bgcolor: "rgba(0,0,0,0)",
    font: { family: getComputedStyle(element).fontFamily, color: text, size: 12 },
    hovermode: data.isHeatMap ? "closest" : "x unified",
    hoverlabel: { bgcolor: panel, bordercolor: grid, font: { color: text } },
    showlegend: !data.isHeatMap && data.series.length + data.earlier.length > 1,
    legend: { orientation: "h", x: 0, yref: "container", y: 0, yanchor: "bottom", font: { size: 11, color: quiet } },
    dragmode: false, // choosing.js has its own
    xaxis: { ...axis, type: "date", range },
    yaxis: yAxis(data, axis),
    yaxis2: { overlaying: "y", range: [0, 1], visible: false, fixedrange: true },
    shapes: data.markers.map((marker) => ({
      type: "line", xref: "x", yref: "paper", x0: new Date(marker.at * 1000), x1: new Date(marker.at * 1000), y0: 0, y1: 1,
      line: { color: quiet, width: 1, dash: "dot" },
    })),
  };
}

// Labels in our own words: Plotly would write 5m for five milliseconds.
function yAxis(data, axis) {
  if (data.isHeatMap) return { ...axis, type: "log", ...ticks(POWERS, data.unit) };
  const values = [...data.series, ...data.earlier].flatMap((series) => series.values).filter((value) => value !== null);
  const most = data.unit === "share" ? 1 : Math.max(...values, 0) || 1;
  const step = data.unit.startsWith("bytes") ? binaryStep(most / 4) : roundStep(most / 4);
  const count = Math.ceil(most / step);
  const steps = Array.from({ length: count + 1 }, (_, place) => place * step);
  return { ...axis, range: [0, count * step], ...ticks(steps, data.unit) };
}

function binaryStep(least) {
  return 2 ** Math.max(0, Math.ceil(Math.log2(least)));
}

function roundStep(least) {
  const power = 10 ** Math.floor(Math.log10(least));
  return [1, 2, 2.5, 5, 10].find((factor) => factor * power >= least * 0.999) * power;
}

function ticks(steps, unit) {
  return { tickmode: "array", tickvals: steps, ticktext: steps.map((value) => (value === 0 ? "0" : show(value, unit))) };
}

// Charts: what the server drew as a table, with Plotly; and then what comes live. Each element with
// `data-chart` names the JSON beside it. Redrawn once a second at most, and not while nobody looks.
import { saveImage } from "./image.js";
import { layoutOf, tracesOf } from "./plot.js";

const POINTS_MAX = 600;
const REDRAW_MS = 1_000;
const ASK_MS_MIN = 10_000;
const MARKERS_MAX = 50;
const ZOOM_MS_MIN = 60_000; // as long as a range is at least
const OPTIONS = { displayModeBar: false, responsive: true, doubleClick: false };

class Chart {
  constructor(element, data) {
    this.element = element;
    this.data = data;
    this.isDirty = true;
    this.times = Array.from({ length: Math.max(0, (data.end - data.start) / data.step) }, (_, place) => data.start + place * data.step);
    this.known = data.series.every((series) => series.figure) && data.series.length > 0 && data.step === 10;
  }

  get isToDraw() {
    return this.isDirty && !this.isHeld && !document.hidden && this.data.series.length > 0;
  }

  draw() {
    this.isDirty = false;
    const figure = this.element.closest("figure");
    figure.querySelector(".empty")?.remove();
    figure.querySelector("[data-chart-image]").hidden = false;
    this.element.classList.remove("plot--empty");
    Plotly.react(this.element, tracesOf(this.data, this.times), layoutOf(this.data, this.times, this.element), OPTIONS);
    if (!this.isHeard) this.hear();
  }

  // What people do with it: Plotly tells when there is a first drawing.
  hear() {
    this.isHeard = true;
    this.element.addEventListener("pointerdown", () => (this.isHeld = true)); // a drawing would end what is drawn over
    document.addEventListener("pointerup", () => (this.isHeld = false));
    this.element.on("plotly_relayout", (changed) => zoomTo(changed["xaxis.range[0]"], changed["xaxis.range[1]"]));
    this.element.addEventListener("pointermove", ({ clientX }) => this.sayCursor(clientX));
    this.element.addEventListener("pointerleave", () => this.sayCursor(null));
    if (this.data.slowest) this.leadOn();
  }

  // To the other charts, also where nothing was told.
  sayCursor(clientX) {
    const { xaxis } = this.element._fullLayout;
    const place = clientX - this.element.getBoundingClientRect().left - xaxis._offset;
    const detail = clientX === null || place < 0 || place > xaxis._length ? null : xaxis.p2d(place);
    this.element.dispatchEvent(new CustomEvent("tidegate:cursor", { bubbles: true, detail }));
  }

  // Where the cursor is in another chart of the page; null: nowhere.
  point(at) {
    if (!this.isHeard) return;
    const { xaxis } = this.element._fullLayout;
    const place = at === null ? -1 : xaxis.d2p(at);
    this.cursor ??= this.element.appendChild(Object.assign(document.createElement("div"), { className: "plot__cursor" }));
    this.cursor.hidden = place < 0 || place > xaxis._length;
    this.cursor.style.left = `${xaxis._offset + place}px`;
  }

  // A cell of a heat map leads to the slowest transfers behind it. By keyboard that is in the table.
  leadOn() {
    this.element.classList.add("plot--leads-on");
    this.element.on("plotly_click", ({ points: [{ x, y, data: { type } }] }) => {
      if (type !== "heatmap") return;
      const from = new Date(x);
      const until = new Date(from.getTime() + this.data.step * 1000);
      const cell = new URLSearchParams({ from: from.toISOString(), until: until.toISOString(), most: y });
      location.assign(`${this.data.slowest}&${cell}`);
    });
  }

  // A step's values, in the order of the series; undefined leaves what is there.
  put(time, values) {
    const { times, data } = this;
    let place = times.lastIndexOf(time);
    if (place < 0) {
      if (times.length && time < times[times.length - 1]) return;
      place = times.push(time) - 1;
      for (const series of data.series) series.values.push(null);
    }
    data.series.forEach((series, index) => {
      if (values[index] !== undefined) series.values[place] = values[index];
    });
    const first = Math.max(times.length - POINTS_MAX, times.findIndex((at) => at >= time - data.span));
    if (first > 0) {
      times.splice(0, first);
      for (const series of data.series) series.values.splice(0, first);
    }
    this.isDirty = true;
  }

  mark(events) {
    const known = new Set(this.data.markers.map((marker) => marker.id));
    for (const { id, at, sentence, kind } of events) {
      if (!known.has(id)) this.data.markers.push({ id, at: Date.parse(at) / 1000, sentence, kind });
    }
    this.data.markers.splice(0, this.data.markers.length - MARKERS_MAX);
    this.isDirty ||= events.length > 0;
  }

  takeLive({ numbers, events }) {
    this.mark(events);
    if (!this.known) return;
    for (const { at, figures } of numbers?.points ?? []) {
      this.put(at, this.data.series.map((series) => figures[series.figure] ?? null));
    }
  }

  // What frames do not tell is asked for, when a step is over.
  async ask() {
    const last = this.times.length > 1 ? this.times[this.times.length - 2] : this.data.start;
    for (const query of this.data.queries) {
      const address = new URL(query, location.href);
      address.searchParams.set("start", new Date(last * 1000).toISOString());
      address.searchParams.set("end", new Date().toISOString());
      address.searchParams.set("step", this.data.step);
      const answer = await fetch(address);
      if (answer.ok) this.take(await answer.json());
    }
  }

  take(answer) {
    const several = this.data.queries.length > 1;
    const start = Date.parse(answer.start) / 1000;
    for (const line of answer.series) {
      const parts = Object.values(line.labels).map((value) => value || "none");
      if (several || !parts.length) parts.push(answer.fold);
      const place = this.seriesNamed(parts.join(" "));
      line.values.forEach((value, step) => {
        const values = [];
        values[place] = value;
        this.put(start + step * answer.step_seconds, values);
      });
    }
  }

  seriesNamed(name) {
    const { series } = this.data;
    const place = series.findIndex((one) => one.name === name);
    if (place >= 0) return place;
    this.known = false;
    return series.push({ name, figure: "", values: this.times.map(() => null) }) - 1;
  }

  // Without frames that tell it: now and then, each chart at a moment of its own.
  keepAsking() {
    const wait = Math.max(ASK_MS_MIN, this.data.step * 1000);
    setTimeout(async () => {
      try {
        if (!document.hidden && !this.known) await this.ask();
      } finally {
        this.keepAsking();
      }
    }, wait * (0.8 + 0.4 * Math.random()));
  }
}

// What is drawn over with the mouse is the range from then on, for the whole page, and stands in the address.
function zoomTo(from, until) {
  if (from === undefined || until === undefined) return;
  const [first, last] = [new Date(from).getTime(), new Date(until).getTime()];
  const more = Math.max(0, ZOOM_MS_MIN - (last - first)) / 2;
  const address = new URL(location.href);
  address.searchParams.delete("range");
  address.searchParams.set("from", new Date(first - more).toISOString());
  address.searchParams.set("until", new Date(last + more).toISOString());
  location.assign(address);
}

function start() {
  const charts = [];
  for (const element of document.querySelectorAll("[data-chart]")) {
    const data = JSON.parse(document.getElementById(element.dataset.chart).textContent);
    const chart = new Chart(element, data);
    charts.push(chart);
    if (data.span !== null) chart.keepAsking();
    const image = element.closest("figure").querySelector("[data-chart-image]");
    image.addEventListener("click", () => saveImage(element, element.dataset.chart));
  }
  // One after another, and in between the page listens to whoever uses it.
  let isDrawing = false;
  const redraw = async () => {
    if (isDrawing) return;
    isDrawing = true;
    try {
      for (const chart of charts) {
        if (!chart.isToDraw) continue;
        chart.draw();
        await new Promise((resolve) => setTimeout(resolve));
      }
    } finally {
      isDrawing = false;
    }
  };
  const restyle = () => {
    for (const chart of charts) chart.isDirty = true;
    redraw();
  };
  redraw();
  setInterval(redraw, REDRAW_MS);
  document.addEventListener("visibilitychange", redraw);
  document.addEventListener("tidegate:cursor", ({ target, detail }) => {
    for (const chart of charts) chart.point(chart.element === target ? null : detail);
  });
  document.addEventListener("tidegate:live", ({ detail }) => {
    for (const chart of charts) {
      if (chart.data.span !== null && chart.data.topic === detail.topic) chart.takeLive(detail);
    }
  });
  new MutationObserver(restyle).observe(document.documentElement, { attributeFilter: ["data-theme"] });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", restyle);
}

start();

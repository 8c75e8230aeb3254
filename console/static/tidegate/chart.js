// Charts: what the server drew as a table, with Plotly; and then what comes live. Each element with
// `data-chart` names the JSON beside it. Redrawn once a second at most, and not while nobody looks.
import { Choosing, lay, placeOf, timeAt } from "./choosing.js";
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
    this.isUpToDate = true; // as far as was asked
    this.times = Array.from({ length: Math.max(0, (data.end - data.start) / data.step) }, (_, place) => data.start + place * data.step);
    this.known = data.series.every((series) => series.figure) && data.series.length > 0 && data.step === 10;
  }

  get isToDraw() {
    return (this.isDirty || this.isBehind) && !document.hidden && this.data.series.length > 0;
  }

  // Where time goes on, so does what is shown, though nothing is told.
  get isBehind() {
    return this.data.span !== null && Date.now() - this.drawnAt > ASK_MS_MIN;
  }

  draw() {
    this.isDirty = false;
    this.drawnAt = Date.now();
    const figure = this.element.closest("figure");
    figure.querySelector(".empty")?.remove();
    figure.querySelector("[data-chart-image]").hidden = false;
    this.element.classList.remove("plot--empty");
    Plotly.react(this.element, tracesOf(this.data, this.times), layoutOf(this.data, this.times, this.element), OPTIONS);
    if (!this.isHeard) this.hear();
  }

  // What people do with it: Plotly has axes when there is a first drawing.
  hear() {
    this.isHeard = true;
    this.choosing = new Choosing(this.element, this.data.step * 1000, {
      pointed: (time) => this.showCursor(time),
      chosen: zoomTo,
    });
    this.element.addEventListener("pointermove", ({ clientX }) => {
      const { axis } = this.choosing;
      const place = this.choosing.placeIn(clientX);
      this.sayCursor(place < 0 || place > axis._length ? null : timeAt(axis, place));
    });
    this.element.addEventListener("pointerleave", () => this.sayCursor(null));
    if (this.data.slowest) this.leadOn();
  }

  // To the other charts, also where nothing was told.
  sayCursor(time) {
    this.element.dispatchEvent(new CustomEvent("tidegate:cursor", { bubbles: true, detail: time }));
  }

  // The keys' own, which no mouse shows: in all charts, and here with the values.
  showCursor(time) {
    this.sayCursor(time);
    this.point(time);
    if (time === null) Plotly.Fx.unhover(this.element);
    else Plotly.Fx.hover(this.element, { xpx: placeOf(this.choosing.axis, time), ypx: 0 }, "xy");
  }

  // Where the cursor is; null: nowhere.
  point(time) {
    if (!this.isHeard) return;
    const { axis } = this.choosing;
    const place = time === null ? -1 : placeOf(axis, time);
    this.cursor ??= this.element.appendChild(Object.assign(document.createElement("div"), { className: "plot__cursor" }));
    if (place < 0 || place > axis._length) this.cursor.hidden = true;
    else lay(this.cursor, this.element._fullLayout, place, place);
  }

  // A cell of a heat map leads to the slowest transfers behind it. By keyboard that is in the table.
  leadOn() {
    this.element.classList.add("plot--leads-on");
    this.element.on("plotly_click", ({ points: [{ pointNumber, data }] }) => {
      if (data.type !== "heatmap" || this.choosing.hasChosen) return;
      const [row, column] = pointNumber;
      const begun = this.times[column];
      const [from, until] = [begun - this.data.late, begun + this.data.step].map((at) => new Date(at * 1000).toISOString());
      const cell = new URLSearchParams({ from, until });
      const most = this.data.bounds[data.customdata[row]];
      if (most) cell.set("most", most);
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
    const points = numbers?.points ?? [];
    if (points.length && points[0].at > this.times.at(-1) + this.data.step) {
      // What was told meanwhile, while nobody was connected or looked. An answer may lack it, too.
      if (Date.now() - (this.askedAt ?? 0) >= ASK_MS_MIN) this.ask();
      return;
    }
    for (const { at, figures } of points) {
      this.put(at, this.data.series.map((series) => figures[series.figure] ?? null));
    }
  }

  // What frames do not tell is asked for, when a step is over.
  async ask() {
    if (this.isAsking) return;
    this.isAsking = true;
    this.askedAt = Date.now();
    this.isUpToDate = false;
    try {
      this.isUpToDate = await this.askEach();
    } finally {
      this.isAsking = false;
      this.element.closest("figure").querySelector("[data-chart-behind]").hidden = this.isUpToDate;
    }
  }

  // Whether all of it was answered. Of what is no longer shown nothing is asked: a page may have been hidden for days.
  async askEach() {
    const { step, span } = this.data;
    const now = Date.now() / 1000;
    const last = this.times.length > 1 ? this.times[this.times.length - 2] : this.data.start;
    const since = Math.max(last, Math.floor((now - span) / step) * step);
    for (const query of this.data.queries) {
      const address = new URL(query, location.href);
      address.searchParams.set("start", new Date(since * 1000).toISOString());
      address.searchParams.set("end", new Date(now * 1000).toISOString());
      address.searchParams.set("step", step);
      const answer = await fetch(address).catch(() => null); // nobody answers
      if (!answer?.ok) return false;
      this.take(await answer.json());
    }
    return true;
  }

  take(answer) {
    const several = this.data.queries.length > 1;
    const start = Date.parse(answer.start) / 1000;
    for (const line of answer.series) {
      const parts = Object.entries(line.labels).map(([name, value]) => value || `no ${name}`);
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

  // Without frames that tell it, or an answer to the last question: now and then, each chart at a moment of its own.
  keepAsking() {
    const wait = Math.max(ASK_MS_MIN, this.data.step * 1000);
    setTimeout(async () => {
      try {
        if (!document.hidden && !(this.known && this.isUpToDate)) await this.ask();
      } finally {
        this.keepAsking();
      }
    }, wait * (0.8 + 0.4 * Math.random()));
  }
}

// What is chosen is the range from then on, for the whole page, and stands in the address.
function zoomTo(from, until) {
  const more = Math.max(0, ZOOM_MS_MIN - (until - from)) / 2;
  const address = new URL(location.href);
  address.searchParams.delete("range");
  address.searchParams.set("from", new Date(from - more).toISOString());
  address.searchParams.set("until", new Date(until + more).toISOString());
  location.assign(address);
}

function start() {
  const charts = [];
  for (const element of document.querySelectorAll("[data-chart]")) {
    const data = JSON.parse(document.getElementById(element.dataset.chart).textContent);
    const chart = new Chart(element, data);
    charts.push(chart);
    if (data.span !== null) chart.keepAsking();
    const figure = element.closest("figure");
    const title = `${figure.querySelector("h2").textContent} · ${data.topic}`;
    const image = figure.querySelector("[data-chart-image]");
    image.addEventListener("click", () => saveImage(element, element.dataset.chart, title));
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
      if (chart.data.span === null) continue;
      if (chart.data.topic === detail.topic) chart.takeLive(detail);
      else if (chart.data.moreTopics.includes(detail.topic)) chart.mark(detail.events);
    }
  });
  new MutationObserver(restyle).observe(document.documentElement, { attributeFilter: ["data-theme"] });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", restyle);
}

start();

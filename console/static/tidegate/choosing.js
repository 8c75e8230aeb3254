// A part of a chart's time is chosen: drawn over by mouse or finger, or with keys. Times are in ms.
const PIXELS_MIN = 8; // less is a click, or a finger that trembles

// Plotly's axes have times as text, in the viewer's zone. A day alone would be read as one of UTC.
const read = (text) => Date.parse(text.length > 10 ? text : `${text} 00:00`);
export const timeAt = (axis, place) => read(axis.p2d(Math.min(axis._length, Math.max(0, place))));
export const placeOf = (axis, time) => axis.d2p(new Date(time));

// Upon a drawing, from so many pixels of its width to so many.
export function lay(overlay, { xaxis, yaxis }, left, right) {
  overlay.hidden = false;
  const pixels = { left: xaxis._offset + left, width: right - left, top: yaxis._offset, height: yaxis._length };
  for (const [side, length] of Object.entries(pixels)) overlay.style[side] = `${length}px`;
}

export class Choosing {
  // `step` in ms. Whoever listens hears of `pointed`, where the keys' cursor is, and of `chosen`.
  constructor(element, step, { pointed, chosen }) {
    Object.assign(this, { element, step, pointed, chosen });
    this.band = element.appendChild(Object.assign(document.createElement("div"), { className: "plot__band", hidden: true }));
    element.tabIndex = 0;
    element.addEventListener("pointerdown", (event) => this.begin(event));
    element.addEventListener("keydown", (event) => this.press(event));
    element.addEventListener("blur", () => this.letGo());
  }

  get axis() {
    return this.element._fullLayout.xaxis;
  }

  placeIn(clientX) {
    return clientX - this.element.getBoundingClientRect().left - this.axis._offset;
  }

  show(from, until) {
    const places = [from, until].map((time) => placeOf(this.axis, time));
    lay(this.band, this.element._fullLayout, Math.min(...places), Math.max(...places));
  }

  // A finger that goes up or down scrolls the page, and the browser cancels what it draws (chart.css).
  begin({ clientX, button, isPrimary }) {
    this.hasChosen = false; // until its end, which is a click as well
    const place = this.placeIn(clientX);
    if (button !== 0 || !isPrimary || place < 0 || place > this.axis._length) return;
    const from = timeAt(this.axis, place);
    const isFar = (event) => Math.abs(event.clientX - clientX) >= PIXELS_MIN;
    const timeOf = (event) => timeAt(this.axis, this.placeIn(event.clientX));
    const ending = new AbortController();
    const listen = (kind, hear) => document.addEventListener(kind, hear, { signal: ending.signal });
    const end = () => {
      ending.abort();
      this.band.hidden = true;
    };
    listen("pointermove", (event) => isFar(event) && this.show(from, timeOf(event)));
    listen("pointercancel", end);
    listen("pointerup", (event) => {
      end();
      if (isFar(event)) this.choose(from, timeOf(event));
    });
  }

  choose(one, other) {
    this.hasChosen = true;
    this.chosen(Math.min(one, other), Math.max(one, other));
  }

  // Arrows move a cursor by a step, and with Shift choose what it goes over; Enter takes that.
  press(event) {
    const way = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (way) this.move(way * this.step, event.shiftKey);
    else if (event.key === "Enter" && this.from !== undefined) this.choose(this.from, this.at);
    else if (event.key === "Escape") this.letGo();
    else return;
    event.preventDefault();
  }

  move(by, isChoosing) {
    const [first, last] = [0, this.axis._length].map((place) => timeAt(this.axis, place));
    const here = this.at ?? last;
    this.from = isChoosing ? (this.from ?? here) : undefined;
    this.at = Math.min(last, Math.max(first, here + by));
    this.pointed(this.at);
    if (isChoosing) this.show(this.from, this.at);
    else this.band.hidden = true;
  }

  letGo() {
    this.from = this.at = undefined;
    this.band.hidden = true;
    this.pointed(null);
  }
}

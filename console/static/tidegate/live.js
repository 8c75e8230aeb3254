// What changes on a page, while it is looked at. An element with `data-live-topic` says what it is about, which may be
// several topics with blanks between them:
//   with hx-get and hx-trigger="live" it is fetched anew when that changed, once a second at most;
//   inside it, `data-live-figure="refill.p99" data-unit="seconds"` shows the newest number,
//   and `<time data-live-age data-stale="15">` how old it is.
// Charts and others listen to the event `tidegate:live` of the document.
import { Feed } from "./feed.js";
import { show } from "./figures.js";
import { Wire } from "./wire.js";

const STALE_MS = 15_000;
const REFRESH_MS = 1_000;
const NO_ROOM_MS = 30_000;
const STATES = {
  live: ["ok", "live"],
  polling: ["warn", "polling every 5 s"],
  away: ["bad", "not connected"],
  forbidden: ["bad", "access removed"],
};

const feeds = new Map();
const heardAt = new Map(); // by topic, when it was last known to be as it is
const numbersAt = new Map();
const toldAt = new Map(); // by topic, as of when its figures are, as the console writes it
const refreshing = new WeakSet();
const refused = new Set();
const wire = new Wire(feeds, take, showState);

const topicsOf = (element) => element.dataset.liveTopic.split(" ").filter((topic) => feeds.has(topic));
const elementsOf = (topic) => document.querySelectorAll(`[data-live-topic~="${CSS.escape(topic)}"]`);

function take(frame) {
  const feed = feeds.get(frame.topic);
  if (!feed) return;
  if (frame.kind === "error") {
    refuse(frame.topic, frame.data?.reason);
    return;
  }
  const told = feed.take(frame);
  if (frame.data.read_at && Date.parse(frame.ts) - Date.parse(frame.data.read_at) < STALE_MS) {
    heardAt.set(frame.topic, Date.now());
  }
  if (told.again) wire.subscribe(frame.topic);
  if (told.gap) refresh(frame.topic);
  if (told.news) apply(frame.topic, told.news);
}

// Not theirs to see: the page does without. Who watches nothing needs no connection, and is told where it was theirs.
// Room there may be later, and until then the figures grey.
function refuse(topic, reason) {
  if (reason === "TooManyTopics") {
    setTimeout(() => feeds.has(topic) && wire.subscribe(topic), NO_ROOM_MS);
    return;
  }
  refused.add(topic);
  const wasTheirs = feeds.get(topic).event !== null;
  feeds.delete(topic);
  if (feeds.size) return;
  wire.rest();
  if (wasTheirs) wire.tell("forbidden");
  else document.querySelector("[data-live-state]").hidden = true;
}

function apply(topic, news) {
  heardAt.set(topic, Date.now());
  if (news.numbers) {
    numbersAt.set(topic, Date.now());
    showFigures(topic, news.numbers);
  }
  if (news.changed.length) refresh(topic);
  document.dispatchEvent(new CustomEvent("tidegate:live", { detail: { topic, ...news } }));
}

function showFigures(topic, { figures, at }) {
  if (at) toldAt.set(topic, at);
  for (const element of elementsOf(topic)) {
    const [oldest] = topicsOf(element).flatMap((one) => toldAt.get(one) ?? []).sort();
    for (const time of oldest ? element.querySelectorAll("time[data-live-age]") : []) {
      time.dateTime = oldest;
      time.dataset.age = ""; // from now on the clock counts it
    }
    for (const figure of element.querySelectorAll("[data-live-figure]")) {
      const value = figures?.[figure.dataset.liveFigure];
      figure.textContent = figures ? show(value, figure.dataset.unit) : "no data";
      figure.classList.toggle("absent", value === undefined);
    }
  }
}

// Fetch partials anew, a little later: what changes often is fetched once, and not by all at once.
function refresh(topic) {
  for (const element of elementsOf(topic)) {
    if (!element.hasAttribute("hx-get") || refreshing.has(element)) continue;
    refreshing.add(element);
    setTimeout(() => {
      refreshing.delete(element);
      if (element.isConnected) htmx.trigger(element, "live");
    }, Math.random() * REFRESH_MS);
  }
}

function showState(state) {
  const element = document.querySelector("[data-live-state]");
  const [kind, text] = STATES[state];
  element.className = `status status--${kind}`;
  element.textContent = text;
  element.hidden = false;
}

// Figures grey when nothing is heard of them, or of one topic of several.
function age() {
  if (document.hidden) return;
  const now = Date.now();
  for (const element of document.querySelectorAll("[data-live-topic]")) {
    const topics = topicsOf(element);
    if (!topics.length) continue;
    const isOld = (times) => topics.some((topic) => now - (times.get(topic) ?? now) > STALE_MS);
    const isStale = isOld(heardAt);
    element.classList.toggle("stale", isStale);
    for (const figure of element.querySelectorAll("[data-live-figure]")) {
      figure.classList.toggle("stale", isStale || isOld(numbersAt));
    }
  }
}

// Follow what the page is about, which partials may change.
function follow() {
  const all = [...document.querySelectorAll("[data-live-topic]")];
  const wanted = new Set(all.flatMap((one) => one.dataset.liveTopic.split(" ")));
  for (const topic of feeds.keys()) {
    if (wanted.has(topic)) continue;
    feeds.delete(topic);
    wire.unsubscribe(topic);
  }
  for (const topic of wanted) {
    if (feeds.has(topic) || refused.has(topic)) continue;
    feeds.set(topic, new Feed(topic));
    heardAt.set(topic, Date.now());
    wire.subscribe(topic);
  }
  return feeds.size > 0;
}

export function startLive() {
  let started = false;
  const begin = () => {
    if (!follow()) return;
    if (started) {
      wire.look(); // it may be resting for want of topics
      return;
    }
    started = true;
    wire.start();
    setInterval(age, 1000);
  };
  begin();
  document.addEventListener("htmx:afterSwap", begin);
}

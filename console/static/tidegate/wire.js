// How frames get here: over a WebSocket, and where that does not get through by asking every few seconds.
// Comes back by itself, later and later and never all browsers at once; rests while nobody looks.
const ADDRESS = "/ws/v1/live";
const SUBPROTOCOL = "tidegate.v1";
const SILENCE_MS = 12_000; // heartbeats come every five seconds
const OPENING_MS = 8_000;
const POLL_MS = 5_000;
const WAIT_MS = 500;
const WAIT_MS_MAX = 30_000;
const FAILURES_BEFORE_POLLING = 2;
const HIDDEN_MS = 30_000;
const AGAIN_MS = 1_000;
const NOT_KNOWN = 4401;
const FORBIDDEN = 4403;

const jittered = (milliseconds) => milliseconds * (0.5 + Math.random());

export class Wire {
  // `feeds`: of each topic, a Feed. `onFrame(frame)`, `onState(state)` with live, polling, away or forbidden.
  constructor(feeds, onFrame, onState) {
    Object.assign(this, { feeds, onFrame, onState });
    this.socket = null;
    this.failures = 0; // since something came in
    this.timers = {};
    this.askedAt = new Map();
    document.addEventListener("visibilitychange", () => this.look());
  }

  start() {
    this.connect();
  }

  subscribe(topic) {
    const now = Date.now();
    if (now - (this.askedAt.get(topic) ?? 0) < AGAIN_MS) return;
    this.askedAt.set(topic, now);
    this.say({ type: "subscribe", topic, since: this.feeds.get(topic)?.event ?? null });
  }

  unsubscribe(topic) {
    this.askedAt.delete(topic);
    this.say({ type: "unsubscribe", topic });
  }

  say(message) {
    if (this.socket?.readyState === WebSocket.OPEN) this.socket.send(JSON.stringify(message));
  }

  // A WebSocket

  connect() {
    if (this.socket || this.isResting) return;
    const address = new URL(ADDRESS, location.href);
    address.protocol = address.protocol.replace("http", "ws");
    const socket = new WebSocket(address, [SUBPROTOCOL]);
    this.socket = socket;
    this.watch(OPENING_MS);
    socket.onopen = () => {
      this.askedAt.clear();
      for (const [topic, feed] of this.feeds) {
        feed.seq = null; // sequences are of one connection
        this.subscribe(topic);
      }
    };
    socket.onmessage = (message) => {
      this.failures = 0;
      this.after("poll", 0);
      this.watch(SILENCE_MS);
      this.tell("live");
      this.onFrame(JSON.parse(message.data));
    };
    socket.onclose = (event) => this.closed(socket, event.code);
  }

  // Whether it is silent for too long. A socket that hangs does not say so.
  watch(milliseconds) {
    const { socket } = this;
    this.after("silence", milliseconds, () => {
      socket.close();
      this.closed(socket, 0);
    });
  }

  closed(socket, code) {
    if (socket !== this.socket) return;
    this.socket = null;
    this.after("silence", 0);
    if (code === NOT_KNOWN) {
      location.reload(); // to the log-in page, and then back
    } else if (code === FORBIDDEN && this.feeds.size === 1) { // of several, those that are lost are refused anew
      this.isResting = true;
      this.tell("forbidden");
    } else if (!this.isResting) {
      this.failures += 1;
      const wait = Math.min(WAIT_MS_MAX, WAIT_MS * 2 ** this.failures);
      this.after("connect", jittered(wait), () => this.connect());
      if (this.failures < FAILURES_BEFORE_POLLING) this.tell("away");
      else if (!this.timers.poll) this.poll();
    }
  }

  // Asking

  async poll() {
    const began = Date.now();
    const isThere = await this.askAll();
    if (this.failures < FAILURES_BEFORE_POLLING || this.isResting) return;
    this.tell(isThere ? "polling" : "away");
    // A server that takes long is asked less often.
    const wait = Math.min(WAIT_MS_MAX, Math.max(POLL_MS, 4 * (Date.now() - began)));
    this.after("poll", isThere ? wait : jittered(2 * wait), () => this.poll());
  }

  async askAll() {
    try {
      for (const [topic, feed] of this.feeds) {
        const since = feed.event === null ? "" : `&since=${feed.event}`;
        const answer = await fetch(`/api/v1/live?topic=${encodeURIComponent(topic)}${since}`);
        if (answer.status === 401) location.reload();
        if (answer.status >= 500) return false;
        if (answer.status === 404) this.onFrame({ topic, kind: "error" });
        if (answer.ok) for (const frame of (await answer.json()).frames) this.onFrame(frame);
      }
      return true;
    } catch (error) {
      if (error instanceof TypeError) return false; // fetch's way to say that nobody answers
      throw error;
    }
  }

  // Resting

  look() {
    if (document.hidden) {
      this.after("rest", HIDDEN_MS, () => this.rest());
      return;
    }
    this.after("rest", 0);
    if (this.isResting && this.state !== "forbidden" && this.feeds.size) {
      this.isResting = false;
      this.failures = 0;
      this.connect();
    }
  }

  rest() {
    this.isResting = true;
    for (const name of ["connect", "poll", "silence"]) this.after(name, 0);
    this.socket?.close();
    this.socket = null;
    if (this.state !== "forbidden") this.tell("away"); // what is seen first when somebody looks again
  }

  tell(state) {
    if (state === this.state) return;
    this.state = state;
    this.onState(state);
  }

  // One timer of each name; without work it is only stopped.
  after(name, milliseconds, work) {
    clearTimeout(this.timers[name]);
    this.timers[name] = work && setTimeout(() => {
      this.timers[name] = undefined;
      work();
    }, milliseconds);
  }
}

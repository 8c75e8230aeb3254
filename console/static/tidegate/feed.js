// What is known of one topic, and what a frame means for it. No page and no network: docs/live.md in code.
export class Feed {
  constructor(topic) {
    this.topic = topic;
    this.seq = null; // of the last frame
    this.event = null; // the last one that is known; from there on we want to be told again
  }

  // "again": a frame is missing, ask for a snapshot. "news": { changed, events, numbers, state } is true now.
  take(frame) {
    if (frame.kind === "gap") return { gap: true };
    if (frame.kind === "heartbeat") return { again: frame.seq !== this.seq };
    if (frame.kind === "delta" && (this.seq === null || frame.seq !== this.seq + 1)) return { again: true };
    const { data } = frame;
    const known = this.event ?? 0;
    this.seq = frame.seq;
    this.event = Math.max(known, data.event);
    return {
      news: {
        // Whatever has changed before a snapshot: it was not told what.
        changed: frame.kind === "snapshot" ? ["snapshot"] : data.changed ?? [],
        events: (data.events ?? []).filter((event) => event.id > known),
        numbers: data.numbers,
        state: data.state,
      },
    };
  }
}

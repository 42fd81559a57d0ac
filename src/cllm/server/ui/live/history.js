// The snapshots of the last five minutes, and the phases of each sequence in that time.

export const SECONDS = 300;
const SLACK = 1.5; // seconds between two snapshots of a server that computes nothing, and more

export class History {
  snapshots = [];
  #tracks = new Map(); // sequence name -> { name, first, last, segments: [{ phase, from, to }] }

  add(snapshot) {
    this.snapshots.push(snapshot);
    const oldest = snapshot.at - SECONDS;
    while (this.snapshots[0].at < oldest) this.snapshots.shift();
    for (const sequence of listSequences(snapshot)) this.#extend(sequence, snapshot.at);
    for (const [name, track] of this.#tracks) if (track.last < oldest) this.#tracks.delete(name);
  }

  #extend(sequence, at) {
    let track = this.#tracks.get(sequence.name);
    if (!track) {
      track = { name: sequence.name, first: at - sequence.age, last: at, segments: [] };
      this.#tracks.set(sequence.name, track);
      addPast(track, sequence);
    }
    const latest = track.segments.at(-1);
    if (latest?.phase === sequence.phase) {
      latest.to = at;
    } else {
      const from = Math.max(at - sequence.phase_seconds, latest ? latest.from : track.first);
      if (latest) latest.to = from;
      track.segments.push({ phase: sequence.phase, from, to: at });
    }
    track.last = at;
  }

  /** Return the latest snapshot that is not after a time; undefined if there is none. */
  find(time) {
    return this.snapshots.findLast((snapshot) => snapshot.at <= time) ?? this.snapshots[0];
  }

  track(name) {
    return this.#tracks.get(name);
  }

  /** Return the last state of a sequence before a time, with the time of that snapshot. */
  findState(name, time) {
    for (let i = this.snapshots.length - 1; i >= 0; i--) {
      const snapshot = this.snapshots[i];
      if (snapshot.at > time) continue;
      const sequence = listSequences(snapshot).find((one) => one.name === name);
      if (sequence) return { sequence, at: snapshot.at, hasEnded: time - snapshot.at > SLACK };
    }
    return undefined;
  }
}

/** Add the phases that a sequence has had before it was seen first. */
function addPast(track, sequence) {
  if (sequence.queued === null) return;
  const admitted = track.first + sequence.queued;
  track.segments.push({ phase: "queued", from: track.first, to: admitted });
  if (sequence.prefill === null) return;
  track.segments.push({ phase: "prefill", from: admitted, to: admitted + sequence.prefill });
}

export function listSequences(snapshot) {
  return snapshot.models.flatMap((model) => model.engines.flatMap((engine) => engine.sequences));
}

// The snapshots of the last five minutes, and the phases of each sequence in that time.

export const SECONDS = 300;
const SLACK = 1.5; // seconds between two snapshots of a server that computes nothing, and more

const MAX_KEPT = 100_000; // states of sequences in all snapshots; a large cluster has fewer minutes

export class History {
  snapshots = [];
  #numKept = 0;
  #tracks = new Map(); // sequence name -> { name, first, last, segments: [{ phase, from, to }] }

  add(snapshot) {
    nameReplicas(snapshot);
    const sequences = listSequences(snapshot);
    this.snapshots.push(snapshot);
    this.#numKept += sequences.length;
    const oldest = snapshot.at - SECONDS;
    while (this.snapshots[0].at < oldest || (this.#numKept > MAX_KEPT && this.snapshots[1])) {
      this.#numKept -= listSequences(this.snapshots.shift()).length;
    }
    for (const sequence of sequences) this.#extend(sequence, snapshot.at);
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
      if (!sequence) continue;
      const journey = snapshot.journeys?.[name.replace(/-\d+\.\d+$/, "")];
      return { sequence, journey, at: snapshot.at, hasEnded: time - snapshot.at > SLACK };
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

/** Note in each sequence which server of a cluster has it. */
function nameReplicas(snapshot) {
  for (const { replica, engines } of snapshot.models) {
    for (const { sequences } of engines) for (const one of sequences) one.replica = replica;
  }
  for (const one of snapshot.at_front ?? []) one.replica = "front";
}

/** Return the sequences of all engines, and those that the front of a cluster has itself. */
export function listSequences(snapshot) {
  const ofModels = snapshot.models.flatMap((model) => [
    ...(model.waiting ?? []),
    ...model.engines.flatMap((engine) => engine.sequences),
  ]);
  return [...(snapshot.at_front ?? []), ...ofModels];
}

// Says in sentences what a sequence does and why it waits.

export const seconds = (value) =>
  value < 1 ? `${Math.round(1000 * value)} ms` : `${value.toFixed(1)} s`;

/** Return the part of a sequence's name that tells it from others. */
export const shorten = (name) => name.replace(/^[a-z]+[-_]/, "").replace(/^([0-9a-f]{8})[0-9a-f]+/, "$1");

const shortenAll = (text) => text.replace(/\b[a-z]+[-_]([0-9a-f]{8})[0-9a-f]{8,}/g, "$1");

/** Return a few words on what a sequence does. */
export function describeShortly(sequence) {
  const past = seconds(sequence.phase_seconds);
  switch (sequence.phase) {
    case "queued":
      return `waits ${past}: ${shortenAll(sequence.reason)}`;
    case "parked":
      return `parked for ${past}: ${shortenAll(sequence.reason)}`;
    case "prefill":
      return `prompt ${sequence.num_computed_tokens} of ${countPrompt(sequence)} tokens`;
    default:
      return `${sequence.num_output_tokens} tokens${rate(sequence)}`;
  }
}

const countPrompt = (sequence) => sequence.num_prompt_tokens + sequence.num_output_tokens;
const rate = (sequence) =>
  sequence.tokens_per_second === null ? "" : `, ${sequence.tokens_per_second.toFixed(1)} tokens/s`;

/** Return in sentences what a sequence does now and why it waits or has waited. */
export function describe(sequence) {
  const past = seconds(sequence.phase_seconds);
  const output = `${sequence.num_output_tokens} output tokens`;
  if (sequence.phase === "queued") {
    const wait = sequence.expected_wait;
    const begin = wait === null ? "" : ` It begins in about ${seconds(wait)}.`;
    return `It has waited for ${past}, because ${sequence.reason}.${begin}`;
  }
  if (sequence.phase === "parked") {
    return `It gave up its cells ${past} ago, after ${output}. It continues later, because ${sequence.reason}.`;
  }
  const waited =
    sequence.queued && sequence.reason
      ? ` It waited ${seconds(sequence.queued)} before, because ${sequence.reason}.`
      : "";
  if (sequence.phase === "prefill") {
    const done = `${sequence.num_computed_tokens} of ${countPrompt(sequence)}`;
    return `It has computed ${done} tokens of its prompt in ${past}.${waited}`;
  }
  return `It has written ${output} in ${past}${rate(sequence)}.${waited}`;
}

/** Return the status of a replica and, if there is a reason for it, the reason. */
export function describeReplica(replica) {
  const old = replica.seconds_old > 3 ? ` (shown as it was ${seconds(replica.seconds_old)} ago)` : "";
  return `${replica.status}${replica.trouble && `: ${replica.trouble}`}${old}`;
}

// Writes the model's answer into a message while it arrives.

import { streamAnswer } from "./server.js";

const MAX_RETRIES = 10;

/**
 * Fill message with the answer to a request: its content, reasoning, calls, finish and stats. Until
 * the first token, status says what the answer waits for. answerId is the server's id of the answer.
 * onChange is called after each change.
 *
 * If the server is full, the request is repeated at the time that the server names. Throws
 * ServerError, and AbortError after signal.
 */
export async function fillAnswer(message, body, signal, onChange) {
  const sent = performance.now();
  const { position, seconds, chunks } = await claimPlace(message, body, signal, onChange);
  message.status = position ? describePlace(position, seconds) : "";
  onChange();
  let first = 0;
  for await (const chunk of chunks) {
    message.answerId = chunk.id;
    const choice = chunk.choices[0];
    if (choice) {
      const grew = addDelta(message, choice.delta ?? { content: choice.text });
      if (grew && !first) {
        first = performance.now();
        message.status = "";
      }
      if (choice.finish_reason) message.finish = choice.finish_reason;
    }
    // also before the last chunk, so that a stopped answer has figures
    if (chunk.usage) message.stats = makeStats(chunk, sent, first || performance.now());
    onChange();
  }
}

async function claimPlace(message, body, signal, onChange) {
  let ticket = "";
  for (let tries = 0; ; tries++) {
    try {
      return await streamAnswer(body, signal, ticket);
    } catch (error) {
      if (!error.retryAfter || tries === MAX_RETRIES) throw error;
      ticket = error.ticket;
      message.status = `${error.message} Next try in ${error.retryAfter} s.`;
      onChange();
      await wait(error.retryAfter, signal);
    }
  }
}

function wait(seconds, signal) {
  return new Promise((resolve, reject) => {
    const timer = setTimeout(resolve, seconds * 1000);
    signal.addEventListener("abort", () => {
      clearTimeout(timer);
      reject(signal.reason);
    });
  });
}

function describePlace(position, seconds) {
  const estimate = seconds >= 1 ? `, about ${Math.round(seconds)} s` : "";
  return `Number ${position} in the queue${estimate}`;
}

/** Add a delta to a message, and return whether it had any text. */
function addDelta(message, { content, reasoning_content: reasoning, tool_calls: calls }) {
  message.content += content ?? "";
  message.reasoning += reasoning ?? "";
  for (const part of calls ?? []) {
    const call = (message.calls[part.index] ??= { id: "", name: "", arguments: "" });
    call.id ||= part.id ?? "";
    call.name += part.function?.name ?? "";
    call.arguments += part.function?.arguments ?? "";
  }
  return Boolean(content || reasoning || calls);
}

/**
 * Return the figures of an answer. seconds is the time until the user saw the first token, and rate
 * the tokens per second, 0 if unknown.
 */
function makeStats({ usage, timings }, sent, first) {
  const details = usage.prompt_tokens_details ?? {};
  const elapsed = (performance.now() - first) / 1000;
  return {
    seconds: (first - sent) / 1000,
    rate: timings?.predicted_per_second ?? (elapsed ? usage.completion_tokens / elapsed : 0),
    prompt: usage.prompt_tokens,
    cached: details.cached_tokens ?? 0,
    completion: usage.completion_tokens,
  };
}

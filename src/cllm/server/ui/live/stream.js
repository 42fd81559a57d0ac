// Reads the snapshots of the server. EventSource cannot send a key, so this uses fetch.

import { readKey } from "../server.js";

const RETRY = 2000; // milliseconds

/**
 * Call onSnapshot with each snapshot, and onState with a text about the connection, until the key is
 * missing or wrong; then call onKey with the reason.
 */
export async function watch({ onSnapshot, onState, onKey }) {
  for (;;) {
    try {
      const key = readKey();
      const headers = key ? { authorization: `Bearer ${key}` } : {};
      const response = await fetch("live/events", { headers });
      if (response.status === 401 || response.status === 403) {
        const fault = (await response.json().catch(() => ({}))).error ?? {};
        onKey(fault.message ?? "The server needs the key of an administrator.");
        return;
      }
      if (!response.ok) throw new Error(`The server answered ${response.status}.`);
      await read(response.body, onSnapshot);
      onState("The server has stopped. Connecting again.");
    } catch (error) {
      onState(`The connection is lost: ${error.message}. Connecting again.`);
    }
    await new Promise((resolve) => setTimeout(resolve, RETRY));
  }
}

async function read(body, onSnapshot) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    text += value;
    const events = text.split("\n\n");
    text = events.pop();
    for (const event of events) {
      if (event.startsWith("data: ")) onSnapshot(JSON.parse(event.slice("data: ".length)));
    }
  }
}

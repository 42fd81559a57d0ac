// The conversations in this browser's IndexedDB. Other tabs are notified of changes.

import { restore } from "./conversation.js";
import { createStore, del, get, promisifyRequest, values } from "./vendor/idb-keyval.js";

const store = createStore("cllm", "conversations");
const channel = new BroadcastChannel("cllm-conversations");

/** Return all conversations, the latest first. Throws if the browser stores nothing. */
export async function loadAll() {
  const all = await values(store);
  return all.map(restore).sort((one, other) => other.updated - one.updated);
}

export async function save(conversation) {
  // the conversation may get a model's answer while it is stored
  const copy = structuredClone(conversation);
  await store("readwrite", (stored) => {
    stored.put(copy, conversation.id);
    stored.transaction.commit(); // otherwise, leaving the page now would lose the conversation
    return promisifyRequest(stored.transaction);
  });
  channel.postMessage(conversation.id);
}

export async function remove(id) {
  await del(id, store);
  channel.postMessage(id);
}

/**
 * Call onChange whenever another tab has changed a conversation, with its id and its new state
 * (undefined: it was removed). Return a function that stops this.
 */
export function watch(onChange) {
  channel.onmessage = async ({ data: id }) => {
    const stored = await get(id, store);
    onChange(id, stored && restore(stored));
  };
  return () => (channel.onmessage = null);
}

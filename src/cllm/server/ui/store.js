// The conversations in this browser's IndexedDB. Other tabs are told what changes.

import { addMissing, restore } from "./conversation.js";
import { createStore, del, get, update, values } from "./vendor/idb-keyval.js";

const store = createStore("cllm", "conversations");
const channel = new BroadcastChannel("cllm-conversations");

/** Return all conversations, the latest first. Throws if the browser stores nothing. */
export async function loadAll() {
  const all = await values(store);
  return all.map(restore).sort((one, other) => other.updated - one.updated);
}

/** Store a conversation, and add to it the messages that another tab has stored meanwhile. */
export async function save(conversation) {
  const merge = (stored) => {
    if (stored) addMissing(conversation, restore(stored));
    return conversation;
  };
  await update(conversation.id, merge, store);
  channel.postMessage(conversation.id);
}

export async function remove(id) {
  await del(id, store);
  channel.postMessage(id);
}

/** Call onChange with the id of a conversation that another tab has changed, and its new state
 * (undefined: it was removed). Return a function that ends this. */
export function watch(onChange) {
  channel.onmessage = async ({ data: id }) => {
    const stored = await get(id, store);
    onChange(id, stored && restore(stored));
  };
  return () => (channel.onmessage = null);
}

// A conversation: a tree of messages, of which one path is shown. Editing a message or
// regenerating an answer adds a branch. Messages are in the order in which they were made, so a
// parent comes before its children.

export const FORMAT = "cllm-conversations";
const STATS = ["seconds", "rate", "prompt", "cached", "completion"]; // see answer.js
const ROLES = ["user", "assistant", "tool"];

/** Return a new id. crypto.randomUUID would need TLS. */
function makeId() {
  const bytes = crypto.getRandomValues(new Uint8Array(8));
  return "c" + Array.from(bytes, (byte) => byte.toString(16).padStart(2, "0")).join("");
}

export function makeConversation(settings) {
  const now = Date.now();
  return { id: makeId(), title: "", updated: now, settings, messages: [], leaf: null };
}

function makeMessage(role, content) {
  return { id: makeId(), parent: null, role, content, reasoning: "", calls: [], callId: "" };
}

/** Add a message below parent (null: as the first one), show it, and return it. */
export function addMessage(conversation, parent, role, content = "") {
  const message = makeMessage(role, content);
  message.parent = parent;
  conversation.messages.push(message);
  conversation.leaf = message.id;
  conversation.updated = Date.now();
  if (!conversation.title && role === "user") conversation.title = makeTitle(content);
  return message;
}

const makeTitle = (text) => text.trim().replace(/\s+/g, " ").slice(0, 60);

/** Return the messages from the first one down to leaf, by default those that are shown. */
export function listPath(conversation, leaf = conversation.leaf) {
  const found = new Map(conversation.messages.map((message) => [message.id, message]));
  const path = [];
  for (let one = found.get(leaf); one; one = found.get(one.parent)) path.push(one);
  return path.reverse();
}

const listChildren = (conversation, id) =>
  conversation.messages.filter((message) => message.parent === id);

/** Return all versions of a message, including itself. */
export const listVersions = (conversation, message) => listChildren(conversation, message.parent);

/** Show the path through a message down to its latest answer. */
export function showVersion(conversation, message) {
  let leaf = message.id;
  for (let below; (below = listChildren(conversation, leaf)).length;) leaf = below.at(-1).id;
  conversation.leaf = leaf;
}

/** Return the path down to a message as messages of the API, without empty answers. */
export function toApi(conversation, leaf) {
  const messages = [];
  const { system } = conversation.settings;
  if (system) messages.push({ role: "system", content: system });
  for (const { role, content, calls, callId } of listPath(conversation, leaf)) {
    if (role === "tool") messages.push({ role, content, tool_call_id: callId });
    else if (role === "user") messages.push({ role, content });
    else if (calls.length) messages.push({ role, content, tool_calls: calls.map(toApiCall) });
    else if (content) messages.push({ role, content });
  }
  return messages;
}

/** Return the path down to a message as one text that a base model can continue. */
export const toText = (conversation, leaf) =>
  listPath(conversation, leaf)
    .map(({ content }) => content)
    .join("");

const toApiCall = ({ id, name, arguments: text }) => ({
  id,
  type: "function",
  function: { name, arguments: text },
});

/** Add the messages of another state of a conversation that this one does not have. */
export function addMissing(conversation, other) {
  const known = new Set(conversation.messages.map(({ id }) => id));
  conversation.messages.push(...other.messages.filter(({ id }) => !known.has(id)));
}

export const exportAll = (conversations) => ({ format: FORMAT, version: 1, conversations });

/** Return the conversations of an exported file, with new ids. Throws for any other file. */
export function importAll(value) {
  if (value?.format !== FORMAT || !Array.isArray(value.conversations)) {
    throw new Error("The file contains no cLLM conversations.");
  }
  return value.conversations.map((one) => ({ ...restore(one), id: makeId() }));
}

const text = (value) => (typeof value === "string" ? value : "");
const number = (value) => (Number.isFinite(value) ? value : 0);
const list = (value) => (Array.isArray(value) ? value : []);

/** Return a stored conversation, without anything that does not belong in it. */
export function restore(value) {
  const messages = [];
  const known = new Set([null]);
  for (const one of list(value?.messages)) {
    if (!ROLES.includes(one?.role) || !known.has(one.parent) || known.has(one.id)) continue;
    if (typeof one.id !== "string") continue;
    known.add(one.id);
    messages.push(restoreMessage(one));
  }
  const settings = Object.entries(value?.settings ?? {});
  return {
    id: text(value?.id) || makeId(),
    title: text(value?.title).slice(0, 200),
    updated: number(value?.updated),
    settings: Object.fromEntries(settings.filter(([, set]) => typeof set === "string")),
    messages,
    leaf: known.has(value?.leaf) ? value.leaf : (messages.at(-1)?.id ?? null),
  };
}

function restoreMessage(one) {
  const hasStats = STATS.every((name) => Number.isFinite(one.stats?.[name]));
  return {
    ...makeMessage(one.role, text(one.content)),
    id: one.id,
    parent: one.parent,
    reasoning: text(one.reasoning),
    calls: list(one.calls).map((call) => ({
      id: text(call?.id),
      name: text(call?.name),
      arguments: text(call?.arguments),
    })),
    callId: text(one.callId),
    model: text(one.model),
    finish: text(one.finish) || (one.role === "assistant" ? "stopped" : ""),
    error: text(one.error),
    isJson: one.isJson === true,
    stats: hasStats ? one.stats : null,
  };
}

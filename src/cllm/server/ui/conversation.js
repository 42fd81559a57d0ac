// A conversation: a tree of messages, of which one path is shown. Editing a message or
// regenerating an answer adds a branch. Messages are in the order in which they were made, so a
// parent comes before its children.

export const FORMAT = "cllm-conversations";
const STATS = ["seconds", "rate", "prompt", "cached", "completion"]; // see answer.js
const ROLES = ["user", "assistant", "tool"];
export const AUTHORS = { user: "You", assistant: "Answer", tool: "Tool result" };

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
  return { id: makeId(), parent: null, role, content, files: [], reasoning: "", calls: [], callId: "" };
}

/**
 * Add a message below parent (null: as the first one), show it, and return it. files are attached
 * texts with a name and their content.
 */
export function addMessage(conversation, parent, role, content = "", files = []) {
  const message = { ...makeMessage(role, content), parent, files };
  conversation.messages.push(message);
  conversation.leaf = message.id;
  conversation.updated = Date.now();
  if (!conversation.title && role === "user") {
    conversation.title = makeTitle(content) || makeTitle(files[0]?.name ?? "");
  }
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

/** Return all messages by their parents: those with the same parent are versions of each other. */
export function groupVersions(conversation) {
  const versions = new Map();
  for (const message of conversation.messages) {
    const { parent } = message;
    if (versions.has(parent)) versions.get(parent).push(message);
    else versions.set(parent, [message]);
  }
  return versions;
}

/** Show the path through a message down to its latest answer. */
export function showVersion(conversation, message) {
  const versions = groupVersions(conversation);
  let leaf = message.id;
  while (versions.has(leaf)) leaf = versions.get(leaf).at(-1).id;
  conversation.leaf = leaf;
}

/** Return the path down to a message as messages of the API, without empty answers. */
export function toApi(conversation, leaf) {
  const messages = [];
  const { system } = conversation.settings;
  if (system) messages.push({ role: "system", content: system });
  for (const { role, content, files, calls, callId } of listPath(conversation, leaf)) {
    if (role === "tool") messages.push({ role, content, tool_call_id: callId });
    else if (role === "user") messages.push({ role, content: joinFiles(files, content) });
    else if (calls.length) messages.push({ role, content, tool_calls: calls.map(toApiCall) });
    else if (content) messages.push({ role, content });
  }
  return messages;
}

/** Return a fence of Markdown that is longer than any in a text. */
const makeFence = (text) =>
  "`".repeat(1 + Math.max(2, ...(text.match(/`+/g) ?? []).map((run) => run.length)));

/** Return attached texts as blocks of code, followed by the user's text. */
const joinFiles = (files, content) =>
  [
    ...files.map(({ name, content: text }) => {
      const fence = makeFence(text);
      return `${name}:\n${fence}\n${text}\n${fence}`;
    }),
    content,
  ]
    .filter(Boolean)
    .join("\n\n");

/** Return the shown messages of a conversation as Markdown. */
export function toMarkdown(conversation) {
  const parts = [`# ${conversation.title || "Conversation"}`];
  const { system } = conversation.settings;
  if (system) parts.push(`## System prompt\n\n${system}`);
  for (const { role, content, files, calls, model } of listPath(conversation)) {
    const name = role === "assistant" && model ? model : AUTHORS[role];
    const made = calls.map((call) => `Calls \`${call.name}\`:\n\n\`\`\`json\n${call.arguments}\n\`\`\``);
    parts.push([`## ${name}`, joinFiles(files, content), ...made].filter(Boolean).join("\n\n"));
  }
  return parts.join("\n\n") + "\n";
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

/** Return conversations as the text of a file that importAll reads. */
export const exportAll = (conversations) =>
  JSON.stringify({ format: FORMAT, version: 1, conversations }, null, 2);

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
    files: list(one.files).map((file) => ({ name: text(file?.name), content: text(file?.content) })),
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

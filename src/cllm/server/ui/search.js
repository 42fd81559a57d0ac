// The search in all conversations.

import { Dialog } from "./dialog.js";
import { html, useLayoutEffect, useMemo, useRef, useState } from "./view.js";

const MAX_RESULTS = 50;
const AROUND = 60; // characters before and after the word that was found

/** Return a pattern for each word of a query. */
const makePatterns = (query) =>
  query
    .split(/\s+/)
    .filter(Boolean)
    .map((word) => new RegExp(word.replace(/[.*+?^${}()|[\]\\/-]/g, "\\$&"), "iu"));

/**
 * Return the results of a query, which have a conversation and perhaps a message that contains all
 * words of the query. Of each conversation, the latest such message is found.
 */
export function find(conversations, query) {
  const patterns = makePatterns(query);
  const results = [];
  for (const conversation of conversations) {
    if (results.length === MAX_RESULTS) break;
    const hasAll = (text) => patterns.every((pattern) => pattern.test(text));
    const message =
      patterns.length && conversation.messages.findLast(({ content }) => hasAll(content));
    if (message) results.push({ conversation, message, parts: cut(message.content, patterns[0]) });
    else if (hasAll(conversation.title)) results.push({ conversation, message: null, parts: null });
  }
  return results;
}

/** Return the text before a match, the match, and the text after it. */
function cut(text, pattern) {
  const { index, 0: found } = pattern.exec(text);
  const begin = Math.max(0, index - AROUND);
  const end = index + found.length;
  const before = (begin ? "… " : "") + text.slice(begin, index);
  const after = text.slice(end, end + AROUND) + (end + AROUND < text.length ? " …" : "");
  return [before, found, after];
}

/** onOpen gets the conversation and the message (null: only the title was found) of a result. */
export function Search({ conversations, onOpen, onClose }) {
  const [query, setQuery] = useState("");
  const [at, setAt] = useState(0);
  const list = useRef();
  const results = useMemo(() => find(conversations, query), [conversations, query]);
  useLayoutEffect(() => {
    list.current?.querySelector("[aria-selected=true]")?.scrollIntoView({ block: "nearest" });
  });
  const open = ({ conversation, message }) => {
    list.current.closest("dialog").close();
    onOpen(conversation, message);
  };
  const onKeyDown = (event) => {
    const step = { ArrowDown: 1, ArrowUp: -1 }[event.key];
    if (event.isComposing) return;
    if (step) setAt(Math.max(0, Math.min(results.length - 1, at + step)));
    else if (event.key === "Enter" && results[at]) open(results[at]);
    else if (event.key === "Escape") event.target.closest("dialog").close(); // not only clear the box
    else return;
    event.preventDefault();
  };
  return html`<${Dialog} title="Search" kind="search" onClose=${onClose}>
    <input
      type="search"
      role="combobox"
      aria-label="Search in conversations"
      aria-expanded=${results.length > 0}
      aria-controls=${results.length ? "results" : null}
      aria-activedescendant=${results.length ? `result-${at}` : null}
      placeholder="Words of a title or a message"
      autofocus
      value=${query}
      onInput=${(event) => {
        setQuery(event.target.value);
        setAt(0);
      }}
      onKeyDown=${onKeyDown}
    />
    ${
      results.length > 0 &&
      html`<ul id="results" role="listbox" aria-label="Results" ref=${list}>
          ${results.map(
            (result, i) =>
              html`<li
                key=${result.conversation.id}
                id=${`result-${i}`}
                role="option"
                aria-selected=${i === at}
                onClick=${() => open(result)}
              >
                <strong>${result.conversation.title || "Untitled"}</strong>
                ${
                  result.parts &&
                  html`<span>${result.parts[0]}<mark>${result.parts[1]}</mark>${result.parts[2]}</span>`
                }
              </li>`,
          )}
        </ul>`
    }
    ${!results.length && html`<p class="soft" role="status">Nothing was found.</p>`}
  </${Dialog}>`;
}

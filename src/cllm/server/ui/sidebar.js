// The list of conversations, and the buttons for the open one.

import { isRunning } from "./chat.js";
import { exportAll, importAll } from "./conversation.js";
import { classes, download, html, useRef, useState } from "./view.js";

/**
 * Lists conversations. actions are functions by name: open, startNew, rename, remove, add (for
 * imported conversations) and report.
 */
export function Sidebar({ conversations, current, isOpen, actions }) {
  const [filter, setFilter] = useState("");
  const file = useRef();
  const shown = conversations.filter(({ title }) =>
    title.toLowerCase().includes(filter.trim().toLowerCase()),
  );
  const importFile = async ({ target }) => {
    try {
      actions.add(importAll(JSON.parse(await target.files[0].text())));
    } catch (error) {
      actions.report(`The file cannot be imported: ${error.message}`);
    }
    target.value = "";
  };
  return html`<nav
    id="sidebar"
    class=${classes("sidebar", isOpen && "open")}
    aria-label="Conversations"
  >
    <button type="button" class="main" onClick=${actions.startNew}>New conversation</button>
    ${
      conversations.length > 5 &&
      html`<input
        type="search"
        aria-label="Find a conversation"
        placeholder="Find"
        value=${filter}
        onInput=${(event) => setFilter(event.target.value)}
      />`
    }
    <ul>
      ${shown.map(
        (one) =>
          html`<${Entry}
            key=${one.id}
            conversation=${one}
            isCurrent=${one === current}
            actions=${actions}
          />`,
      )}
    </ul>
    <footer>
      <button type="button" onClick=${() => file.current.click()}>Import</button>
      <input
        type="file"
        accept=".json,application/json"
        hidden
        ref=${file}
        onChange=${importFile}
      />
      <button
        type="button"
        disabled=${!conversations.length}
        onClick=${() => download("conversations.json", exportAll(conversations))}
      >
        Export all
      </button>
    </footer>
  </nav>`;
}

function Entry({ conversation, isCurrent, actions }) {
  const [isNaming, setNaming] = useState(false);
  const rename = (event) => {
    event.preventDefault();
    setNaming(false);
    actions.rename(conversation, new FormData(event.target).get("title").trim());
  };
  const title = conversation.title || "Untitled";
  return html`<li class=${isCurrent && "current"}>
    ${
      isNaming
        ? html`<form onSubmit=${rename}>
            <input
              name="title"
              aria-label="Title"
              required
              maxlength="200"
              value=${conversation.title}
              ref=${(box) => box?.focus()}
              onKeyDown=${(event) => {
                if (event.key !== "Escape") return;
                event.stopPropagation();
                setNaming(false);
              }}
            />
            <button>Save</button>
          </form>`
        : html`<button
            type="button"
            class="title"
            aria-current=${isCurrent ? "page" : null}
            onClick=${() => actions.open(conversation)}
          >
            ${title}${isRunning(conversation) ? " …" : ""}
          </button>`
    }
    ${
      isCurrent &&
      !isNaming &&
      html`<div class="tools">
        <button type="button" onClick=${() => setNaming(true)}>Rename</button>
        <button
          type="button"
          onClick=${() => download("conversation.json", exportAll([conversation]))}
        >
          Export
        </button>
        <button type="button" onClick=${() => actions.remove(conversation)}>Delete</button>
      </div>`
    }
  </li>`;
}

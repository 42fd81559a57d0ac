// One message of a conversation, and the buttons for it.

import { Markdown } from "./markdown.js";
import {
  classes,
  copyText,
  html,
  isSendKey,
  useLayoutEffect,
  useRef,
  useState,
} from "./view.js";

const MIN_TOKENS = 8; // the rate of a shorter answer says nothing
const AUTHORS = { user: "You", assistant: "Answer", tool: "Tool result" };

/**
 * Shows a message. versions are the message and its siblings, isBusy is true while the message is
 * generated, and actions are functions by name (edit, regenerate, resume, show, sendResults). The
 * message offers only the actions that are given.
 */
export function Message({ message, versions, isBusy, actions }) {
  const { role, content, model } = message;
  const [isEditing, setEditing] = useState(false);
  const name = role === "assistant" && model ? model : AUTHORS[role];
  return html`<article class=${classes("message", role)} aria-busy=${isBusy}>
    <h2>${name}</h2>
    ${
      isEditing
        ? html`<${Editor}
            text=${content}
            onCancel=${() => setEditing(false)}
            onSave=${(text) => {
              setEditing(false);
              actions.edit(message, text);
            }}
          />`
        : html`<${Content} message=${message} isBusy=${isBusy} />`
    }
    ${!isBusy && actions.sendResults && html`<${Results} message=${message} actions=${actions} />`}
    ${
      !isBusy &&
      !isEditing &&
      html`<${Footer}
        message=${message}
        versions=${versions}
        actions=${actions}
        onEdit=${() => setEditing(true)}
      />`
    }
  </article>`;
}

function Content({ message, isBusy }) {
  const { role, content, reasoning, calls, isJson, status, error } = message;
  if (role !== "assistant") return html`<div class="text" dir="auto">${content}</div>`;
  const isThinking = isBusy && !content && !calls.length;
  return html`
    ${
      reasoning &&
      html`<details class="reasoning">
        <summary>${isThinking ? "Reasoning …" : "Reasoning"}</summary>
        <${Markdown} text=${reasoning} isBusy=${isThinking} />
      </details>`
    }
    ${content && html`<${Markdown} text=${isJson ? fenceJson(content) : content} isBusy=${isBusy} />`}
    ${calls.map((call, i) => html`<${Call} key=${i} call=${call} />`)}
    ${isThinking && html`<p class="status">${status || (reasoning ? "" : "Waiting for the first token …")}</p>`}
    ${error && html`<p class="fault" role="alert">${error}</p>`}
  `;
}

function fenceJson(text) {
  let shown = text;
  try {
    shown = JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    // the JSON is not complete yet
  }
  return "```json\n" + shown + "\n```";
}

function Call({ call }) {
  return html`<div class="call">
    <p>Calls <code>${call.name}</code></p>
    <${Markdown} text=${fenceJson(call.arguments)} />
  </div>`;
}

/** Lets the user enter what the called tools have returned. */
function Results({ message, actions }) {
  const [texts, setTexts] = useState(() => message.calls.map(() => ""));
  const send = (event) => {
    event.preventDefault();
    actions.sendResults(message, texts);
  };
  return html`<form class="results" onSubmit=${send}>
    ${message.calls.map(
      (call, i) =>
        html`<label key=${i}>
          <span>Result of ${call.name}</span>
          <textarea
            rows="1"
            required
            value=${texts[i]}
            onInput=${(event) => setTexts(texts.with(i, event.target.value))}
          />
        </label>`,
    )}
    <button>Send ${message.calls.length > 1 ? "results" : "result"}</button>
  </form>`;
}

function Footer({ message, versions, actions, onEdit }) {
  const { role, content } = message;
  const [hasCopied, setCopied] = useState(false);
  const copy = async () => {
    await copyText(content);
    setCopied(true);
    setTimeout(() => setCopied(false), 2000);
  };
  const isCut = message.finish === "length" || message.finish === "stopped";
  return html`<footer>
    ${versions.length > 1 && html`<${Versions} ...${{ message, versions, actions }} />`}
    ${content && html`<button type="button" onClick=${copy}>${hasCopied ? "Copied" : "Copy"}</button>`}
    ${actions.edit && role === "user" && html`<button type="button" class="edit" onClick=${onEdit}>Edit</button>`}
    ${
      actions.regenerate &&
      role === "assistant" &&
      html`<button type="button" onClick=${() => actions.regenerate(message)}>Regenerate</button>`
    }
    ${
      actions.resume &&
      isCut &&
      html`<button type="button" onClick=${() => actions.resume(message)}>Continue</button>`
    }
    ${role === "assistant" && html`<span class="stats">${describeStats(message)}</span>`}
  </footer>`;
}

function Versions({ message, versions, actions }) {
  const at = versions.indexOf(message);
  const step = (by, label, mark) =>
    html`<button
      type="button"
      aria-label=${label}
      disabled=${!versions[at + by] || !actions.show}
      onClick=${() => actions.show(versions[at + by])}
    >
      ${mark}
    </button>`;
  return html`<span class="versions">
    ${step(-1, "Earlier version", "‹")}<span>${at + 1} of ${versions.length}</span>
    ${step(1, "Later version", "›")}
  </span>`;
}

function describeStats({ stats, finish, error }) {
  const parts = [];
  if (stats) {
    const { seconds, rate, prompt, cached, completion } = stats;
    parts.push(`first token after ${formatSeconds(seconds)}`);
    if (completion >= MIN_TOKENS) parts.push(`${rate.toFixed(rate < 10 ? 1 : 0)} tokens/s`);
    parts.push(`${completion} tokens`);
    parts.push(`prompt ${prompt}, ${cached} cached`);
  }
  if (finish === "length") parts.push("reached the token limit");
  if (finish === "stopped" && !error) parts.push("stopped");
  return parts.join(" · ");
}

const formatSeconds = (seconds) =>
  seconds < 1 ? `${Math.round(seconds * 1000)} ms` : `${seconds.toFixed(1)} s`;

function Editor({ text, onSave, onCancel }) {
  const [draft, setDraft] = useState(text);
  const box = useRef();
  useLayoutEffect(() => {
    box.current.focus();
    box.current.setSelectionRange(text.length, text.length);
  }, []);
  const onKeyDown = (event) => {
    if (event.key === "Escape" && !event.isComposing) {
      event.stopPropagation();
      onCancel();
    } else if (isSendKey(event)) {
      event.preventDefault();
      if (draft.trim()) onSave(draft);
    }
  };
  return html`<div class="editor">
    <textarea
      ref=${box}
      aria-label="Edit the message"
      dir="auto"
      value=${draft}
      onInput=${(event) => setDraft(event.target.value)}
      onKeyDown=${onKeyDown}
    />
    <button type="button" class="main" disabled=${!draft.trim()} onClick=${() => onSave(draft)}>
      Send
    </button>
    <button type="button" onClick=${onCancel}>Cancel</button>
  </div>`;
}

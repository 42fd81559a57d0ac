// One message of a conversation, and the buttons for it.

import { Attachments } from "./attachment.js";
import { AUTHORS } from "./conversation.js";
import { Markdown } from "./markdown.js";
import {
  classes,
  copyText,
  html,
  Icon,
  IconButton,
  isSendKey,
  memo,
  useLayoutEffect,
  useRef,
  useState,
} from "./view.js";

const MIN_TOKENS = 8; // the rate of a shorter answer says nothing

/**
 * Shows a message. versions are the message and its siblings, isBusy is true while the message is
 * generated, canAct is false while any is. actions are functions by name: edit, regenerate, resume,
 * endReasoning, show and sendResults.
 */
export const Message = memo(({ message, versions, isBusy, isLast, canAct, actions }) => {
  const { role, content, calls, model, files } = message;
  const [isEditing, setEditing] = useState(false);
  const name = role === "assistant" && model ? model : AUTHORS[role];
  const needsResults = isLast && canAct && role === "assistant" && calls.length > 0;
  return html`<article class=${classes("message", role, isLast && "last")} aria-busy=${isBusy}>
    <h2 class=${role === "user" && "hidden"} title=${name}>${name}</h2>
    <${Attachments} files=${files} />
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
        : html`<${Content} message=${message} isBusy=${isBusy} actions=${actions} />`
    }
    ${needsResults && html`<${Results} message=${message} actions=${actions} />`}
    ${
      !isBusy &&
      !isEditing &&
      html`<${Footer}
        ...${{ message, versions, isLast, canAct, actions }}
        onEdit=${() => setEditing(true)}
      />`
    }
  </article>`;
});

function Content({ message, isBusy, actions }) {
  const { role, content, reasoning, calls, isJson, status, error } = message;
  if (role !== "assistant") {
    return content ? html`<div class="text" dir="auto">${content}</div>` : null;
  }
  const isThinking = isBusy && !content && !calls.length;
  return html`
    ${
      reasoning &&
      html`<details class="reasoning">
        <summary><${Icon} name="brain" />${isThinking ? "Reasoning …" : "Reasoning"}</summary>
        <${Markdown} text=${reasoning} isBusy=${isThinking} />
      </details>`
    }
    ${isThinking && reasoning && html`<${AnswerNow} message=${message} actions=${actions} />`}
    ${content && html`<${Markdown} text=${isJson ? fenceJson(content) : content} isBusy=${isBusy} />`}
    ${calls.map((call, i) => html`<${Call} key=${i} call=${call} />`)}
    ${isThinking && html`<p class="status">${status || (reasoning ? "" : "Waiting for the first token …")}</p>`}
    ${error && html`<p class="fault" role="alert">${error}</p>`}
  `;
}

/** Lets the user end the reasoning, once. */
function AnswerNow({ message, actions }) {
  const [isAsked, setAsked] = useState(false);
  const ask = () => {
    setAsked(true);
    actions.endReasoning(message);
  };
  return html`<button type="button" class="answer-now" disabled=${isAsked} onClick=${ask}>
    Answer now
  </button>`;
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
    <p><${Icon} name="wrench" />Calls <code>${call.name}</code></p>
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

function Footer({ message, versions, isLast, canAct, actions, onEdit }) {
  const { role, content, calls, isJson, finish } = message;
  const [hasCopied, setCopied] = useState(false);
  const copy = async () => {
    await copyText(content);
    setCopied(true);
    setTimeout(() => setCopied(false), 2000);
  };
  const isAnswer = role === "assistant";
  const isCut = finish === "length" || finish === "stopped";
  const canResume = canAct && isLast && isCut && isAnswer && content && !isJson && !calls.length;
  return html`<footer>
    ${versions.length > 1 && html`<${Versions} ...${{ message, versions, canAct, actions }} />`}
    <span class="actions">
      ${
        content &&
        html`<${IconButton}
          icon=${hasCopied ? "check" : "copy"}
          label=${hasCopied ? "Copied" : "Copy"}
          onClick=${copy}
        />`
      }
      ${
        canAct &&
        role === "user" &&
        html`<${IconButton} icon="pencil" label="Edit" kind="edit" onClick=${onEdit} />`
      }
      ${
        canAct &&
        isAnswer &&
        html`<${IconButton}
          icon="refresh-cw"
          label="Regenerate"
          onClick=${() => actions.regenerate(message)}
        />`
      }
      ${
        canResume &&
        html`<${IconButton}
          icon="play"
          label="Continue"
          onClick=${() => actions.resume(message)}
        />`
      }
    </span>
    ${isAnswer && html`<span class="stats">${describeStats(message)}</span>`}
  </footer>`;
}

function Versions({ message, versions, canAct, actions }) {
  const at = versions.indexOf(message);
  const step = (by, label, icon) =>
    html`<${IconButton}
      icon=${icon}
      label=${label}
      disabled=${!versions[at + by] || !canAct}
      onClick=${() => actions.show(versions[at + by])}
    />`;
  return html`<span class="versions">
    ${step(-1, "Earlier version", "chevron-left")}<span>${at + 1} of ${versions.length}</span>
    ${step(1, "Later version", "chevron-right")}
  </span>`;
}

/** Return the figures of an answer, and why it ended. */
export function describeStats({ stats, finish, error }) {
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

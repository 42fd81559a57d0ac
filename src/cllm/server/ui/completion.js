// The view of a base model: one text, which the user writes and the model continues. Each
// continuation is a message of the conversation, and so is each part that the user has added.

import { addMessage, listPath, toText } from "./conversation.js";
import { generate, isRunning, stop } from "./generation.js";
import { describeStats } from "./message.js";
import { toSampling } from "./settings.js";
import { copyText, html, Icon, useEffect, useLayoutEffect, useRef, useState } from "./view.js";

const BEGINNINGS = ["The capital of France is", "Once upon a time, a fox"];
const drafts = new Map(); // edited texts by the ids of their conversations

/** generate explains model and events. */
export function Completion({ conversation, model, events }) {
  const { id } = conversation;
  const isBusy = isRunning(conversation);
  const path = listPath(conversation);
  const last = path.at(-1);
  const generated = toText(conversation, conversation.leaf);
  const [draft, setDraft] = useState(drafts.get(id) ?? null); // null: nothing was edited
  const text = isBusy ? generated : (draft ?? generated);
  const [history, setHistory] = useState([]); // the last messages before each continuation
  const box = useRef();
  useEffect(() => box.current.focus({ preventScroll: true }), []);
  useLayoutEffect(() => {
    if (isBusy) box.current.scrollTop = box.current.scrollHeight;
  });
  const edit = (value) => {
    drafts.set(id, value);
    setDraft(value);
  };
  const run = (add) => {
    try {
      toSampling(conversation.settings);
    } catch (error) {
      return events.onError(error);
    }
    setHistory([...history, conversation.leaf]);
    const parent = add();
    edit(null);
    generate(conversation, model, parent, events);
    return undefined;
  };
  const complete = () =>
    run(() => {
      if (text === generated) return conversation.leaf;
      const isLonger = text.startsWith(generated);
      const parent = isLonger ? conversation.leaf : null;
      return addMessage(conversation, parent, "user", isLonger ? text.slice(generated.length) : text)
        .id;
    });
  const undo = () => {
    conversation.leaf = history.at(-1);
    setHistory(history.slice(0, -1));
    edit(null);
    events.onSave(conversation);
  };
  const canRun = !isBusy && Boolean(text.trim());
  const onKeyDown = (event) => {
    if (event.key !== "Enter" || !(event.ctrlKey || event.metaKey) || !canRun) return;
    event.preventDefault();
    complete();
  };
  const button = (icon, label, onClick, isDisabled, kind = "quiet") =>
    html`<button type="button" class=${kind} disabled=${isDisabled} onClick=${onClick}>
      <${Icon} name=${icon} />${label}
    </button>`;
  return html`<section class="completion">
    <h2>Continue a text with ${model.id}</h2>
    <p class="soft">
      This is a base model. It was not trained to answer, but continues the text that you write.
      <kbd>Ctrl</kbd>+<kbd>Enter</kbd> completes, <kbd>Esc</kbd> stops.
    </p>
    <textarea
      ref=${box}
      aria-label="Text"
      dir="auto"
      placeholder="Write the beginning of a text"
      readOnly=${isBusy}
      aria-busy=${isBusy}
      value=${text}
      onInput=${(event) => edit(event.target.value)}
      onKeyDown=${onKeyDown}
    />
    ${
      !text &&
      html`<div class="beginnings">
        ${BEGINNINGS.map((one) => html`<button type="button" key=${one} onClick=${() => edit(one)}>${one}</button>`)}
      </div>`
    }
    ${last?.error && html`<p class="fault" role="alert">${last.error}</p>`}
    <div class="bar">
      ${
        isBusy
          ? button("square", "Stop", () => stop(conversation), false, "main")
          : button("play", "Complete", complete, !canRun, "main")
      }
      ${button("refresh-cw", "Try again", () => run(() => last.parent), isBusy || last?.role !== "assistant" || text !== generated)}
      ${button("undo-2", "Undo", undo, isBusy || !history.length)}
      ${button("copy", "Copy", () => copyText(text), !text)}
      <span class="stats" role="status">
        ${isBusy ? last?.status : last?.role === "assistant" && describeStats(last)}
      </span>
    </div>
  </section>`;
}

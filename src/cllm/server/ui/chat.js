// The chat: the messages of a conversation, and the box for the next one.

import { fillAnswer } from "./answer.js";
import { addMessage, listPath, listVersions, showVersion, toApi } from "./conversation.js";
import { Message } from "./message.js";
import { toFields } from "./settings.js";
import { html, makePainter, useEffect, useLayoutEffect, useRef, useState } from "./view.js";

const SAVE_INTERVAL = 2000; // milliseconds, while an answer is generated
const NEAR = 80; // pixels from the end within which the view follows an answer
const EXAMPLES = {
  "cllm-builtin": [
    "What is 27 plus 45?",
    "As JSON: name Anna, age 30.",
    "Tell me a story about a fox.",
  ],
};
const running = new Map(); // AbortControllers of the answers by the ids of their conversations

export const isRunning = (conversation) => running.has(conversation.id);

export function stop(conversation) {
  running.get(conversation.id)?.abort();
}

/**
 * Generate the answer to the last message of the path to ``parent``, as a new message, or continue
 * ``message``. onChange draws the page, onSave also keeps the conversation.
 */
async function generate(conversation, model, parent, { onChange, onSave, onError }, message) {
  const isNew = !message;
  const body = {
    model,
    messages: toApi(conversation, isNew ? parent : message.id),
    stream: true,
    stream_options: { include_usage: true },
    ...toFields(conversation.settings),
  };
  if (!isNew) Object.assign(body, { continue_final_message: true, add_generation_prompt: false });
  const controller = new AbortController();
  running.set(conversation.id, controller);
  message ??= addMessage(conversation, parent, "assistant");
  Object.assign(message, { model, isJson: "response_format" in body, finish: "", error: "" });
  let saved = Date.now();
  const paint = makePainter(onChange);
  const draw = () => {
    paint();
    if (Date.now() - saved > SAVE_INTERVAL) {
      saved = Date.now();
      onSave(conversation);
    }
  };
  onSave(conversation);
  try {
    await fillAnswer(message, body, controller.signal, draw);
  } catch (error) {
    if (controller.signal.aborted) {
      message.finish = "stopped";
    } else {
      message.error = error.message;
      message.finish = "stopped";
      onError(error, message);
    }
  } finally {
    message.status = "";
    running.delete(conversation.id);
    onSave(conversation);
  }
}

/** root: the name of the model's file, which may have examples. events: see generate. */
export function Chat({ conversation, model, root, events }) {
  const log = useRef();
  const isAtEnd = useRef(true);
  const path = listPath(conversation);
  const isBusy = isRunning(conversation);
  useLayoutEffect(() => {
    if (isAtEnd.current) log.current.scrollTop = log.current.scrollHeight;
  });
  const watchScroll = () => {
    const { scrollTop, clientHeight, scrollHeight } = log.current;
    isAtEnd.current = scrollHeight - scrollTop - clientHeight < NEAR;
  };
  /** Return whether the settings can be used; if not, say which one is wrong. */
  const checkSettings = () => {
    try {
      return Boolean(toFields(conversation.settings));
    } catch (error) {
      events.onError(error);
      return false;
    }
  };
  const run = (parent, message) => {
    if (!checkSettings()) return;
    isAtEnd.current = true;
    document.querySelector(".composer textarea").focus({ preventScroll: true });
    return generate(conversation, model, parent, events, message);
  };
  /** Return whether the text was sent. */
  const ask = (parent, text) => {
    if (!checkSettings()) return false;
    run(addMessage(conversation, parent, "user", text).id);
    return true;
  };
  const actions = isBusy
    ? {}
    : {
        edit: (message, text) => ask(message.parent, text),
        regenerate: (message) => run(message.parent),
        show(message) {
          showVersion(conversation, message);
          events.onSave(conversation);
        },
      };
  const last = path.at(-1);
  const actionsOf = (message) => {
    if (isBusy || message !== last || message.role !== "assistant") return actions;
    if (message.calls.length) return { ...actions, sendResults };
    return message.content && !message.isJson ? { ...actions, resume } : actions;
  };
  const resume = (message) => run(message.parent, message);
  const sendResults = (message, texts) => {
    if (!checkSettings()) return;
    let parent = message.id;
    for (const [i, text] of texts.entries()) {
      const result = addMessage(conversation, parent, "tool", text);
      result.callId = message.calls[i].id;
      parent = result.id;
    }
    run(parent);
  };
  return html`
    <div
      class="log"
      role="log"
      aria-live="off"
      aria-label="Messages"
      tabindex="0"
      ref=${log}
      onScroll=${watchScroll}
    >
      ${!path.length && html`<${Welcome} examples=${EXAMPLES[root]} onPick=${(text) => ask(null, text)} />`}
      ${path.map(
        (message) =>
          html`<${Message}
            key=${message.id}
            message=${message}
            versions=${listVersions(conversation, message)}
            isBusy=${isBusy && message === last}
            actions=${actionsOf(message)}
          />`,
      )}
    </div>
    <${Composer}
      isBusy=${isBusy}
      onSend=${(text) => ask(conversation.leaf, text)}
      onStop=${() => stop(conversation)}
    />
    <p class="hidden" role="status">${describeState(last, isBusy)}</p>
  `;
}

/** Return what a screen reader says: not each token, but the whole answer. */
function describeState(message, isBusy) {
  if (message?.role !== "assistant") return "";
  return isBusy ? "Answering" : `Answer: ${message.content}`;
}

function Welcome({ examples, onPick }) {
  return html`<div class="welcome">
    <p>
      Ask the model something. Enter sends, Shift+Enter starts a line, Esc stops the answer, ↑ edits
      your last message. Conversations stay in this browser.
    </p>
    ${examples?.map(
      (text) =>
        html`<button type="button" key=${text} onClick=${() => onPick(text)}>${text}</button>`,
    )}
  </div>`;
}

function Composer({ isBusy, onSend, onStop }) {
  const [draft, setDraft] = useState("");
  const box = useRef();
  useEffect(() => box.current.focus({ preventScroll: true }), []);
  const send = (event) => {
    event.preventDefault();
    if (isBusy || !draft.trim()) return;
    box.current.focus();
    if (onSend(draft)) setDraft("");
  };
  const onKeyDown = (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) send(event);
    if (event.key === "ArrowUp" && !draft) {
      const edits = document.querySelectorAll(".message.user footer button.edit");
      edits[edits.length - 1]?.click();
    }
  };
  return html`<form class="composer" onSubmit=${send}>
    <textarea
      ref=${box}
      rows="1"
      aria-label="Message"
      placeholder="Write a message"
      value=${draft}
      onInput=${(event) => setDraft(event.target.value)}
      onKeyDown=${onKeyDown}
    />
    ${
      isBusy
        ? html`<button type="button" class="main" onClick=${onStop}>Stop</button>`
        : html`<button class="main" disabled=${!draft.trim()}>Send</button>`
    }
  </form>`;
}

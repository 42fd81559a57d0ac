// The chat: the messages of a conversation, and the box for the next one.

import { fillAnswer } from "./answer.js";
import { addMessage, listPath, listVersions, showVersion, toApi, toText } from "./conversation.js";
import { Message } from "./message.js";
import { isBase, isLoaded } from "./models.js";
import { toFields, toSampling } from "./settings.js";
import {
  html,
  isSendKey,
  makePainter,
  useEffect,
  useLayoutEffect,
  useRef,
  useState,
} from "./view.js";

const SAVE_INTERVAL = 2000; // milliseconds, while an answer is generated
const WINDOW = 200; // messages that are drawn at first, and added by each click on the button
const NEAR = 80; // pixels from the end within which the view follows an answer
const BUILTIN = "cllm-builtin";
const BUILTIN_EXAMPLES = [
  "What is 27 plus 45?",
  "As JSON: name Anna, age 30.",
  "Tell me a story about a fox.",
];
const EXAMPLES = [
  "Explain in three sentences why the sky is blue.",
  "Write a Python function that returns the longest word of a text.",
  "Draft a friendly e-mail that moves a meeting to Thursday.",
];
const BEGINNINGS = ["The capital of France is", "Once upon a time, a fox"];
const drafts = new Map(); // unsent texts by the ids of their conversations
const running = new Map(); // AbortControllers of the answers by the ids of their conversations

export const isRunning = (conversation) => running.has(conversation.id);

export function stop(conversation) {
  running.get(conversation.id)?.abort();
}

/**
 * Generate the answer to the last message of the path to parent, as a new message, or continue
 * message. model is an entry of /v1/models, or undefined if there is none. onChange draws the page,
 * onSave also stores the conversation, and onLoad is called when the server had to load the model.
 */
async function generate(conversation, model, parent, events, message) {
  const { onChange, onSave, onError, onLoad } = events;
  const isNew = !message;
  const name = model?.id ?? "";
  const mustLoad = Boolean(model) && !isLoaded(model);
  const leaf = isNew ? parent : message.id;
  const body = {
    model: name,
    stream: true,
    stream_options: { include_usage: true },
    ...(isBase(model)
      ? { prompt: toText(conversation, leaf), ...toSampling(conversation.settings) }
      : { messages: toApi(conversation, leaf), ...toFields(conversation.settings) }),
  };
  if (!isNew && !isBase(model)) Object.assign(body, { continue_final_message: true, add_generation_prompt: false });
  const controller = new AbortController();
  running.set(conversation.id, controller);
  message ??= addMessage(conversation, parent, "assistant");
  Object.assign(message, { model: name, isJson: "response_format" in body, finish: "", error: "" });
  if (mustLoad) message.status = "Loading the model …";
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
    if (mustLoad) onLoad();
  }
}

/** The view of a conversation. generate explains model and events. */
export function Chat({ conversation, model, events }) {
  const log = useRef();
  const isAtEnd = useRef(true);
  const fromEnd = useRef(0); // pixels from the view's top to the end, to be restored
  const path = listPath(conversation);
  const [begin, setBegin] = useState(path.length - WINDOW);
  const numHidden = Math.max(0, Math.min(begin, path.length - WINDOW));
  const isBusy = isRunning(conversation);
  useLayoutEffect(() => {
    const { scrollHeight } = log.current;
    if (fromEnd.current) log.current.scrollTop = scrollHeight - fromEnd.current;
    else if (isAtEnd.current) log.current.scrollTop = scrollHeight;
    fromEnd.current = 0;
  });
  const showEarlier = () => {
    fromEnd.current = log.current.scrollHeight - log.current.scrollTop;
    setBegin(numHidden - WINDOW);
  };
  const watchScroll = () => {
    const { scrollTop, clientHeight, scrollHeight } = log.current;
    isAtEnd.current = scrollHeight - scrollTop - clientHeight < NEAR;
  };
  /** Return whether the settings can be used. If not, report which one is wrong. */
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
      ${!path.length && html`<${Welcome} model=${model} onPick=${(text) => ask(null, text)} />`}
      ${
        numHidden > 0 &&
        html`<button type="button" class="earlier" onClick=${showEarlier}>
          Show earlier messages (${numHidden})
        </button>`
      }
      ${path.slice(numHidden).map(
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
      id=${conversation.id}
      isBusy=${isBusy}
      isBase=${isBase(model)}
      onSend=${(text) => ask(conversation.leaf, text)}
      onStop=${() => stop(conversation)}
    />
    <p class="hidden" role="status">${describeState(last, isBusy)}</p>
  `;
}

/** Return what a screen reader says: the whole answer when it is complete, not each token. */
function describeState(message, isBusy) {
  if (message?.role !== "assistant") return "";
  return isBusy ? "Answering" : `Answer: ${message.content}`;
}

function Welcome({ model, onPick }) {
  const isBuiltin = model?.root === BUILTIN;
  return html`<div class="welcome">
    <h2>
      ${model ? `${isBase(model) ? "Continue a text with" : "Ask"} ${model.id}` : "Welcome to cLLM"}
    </h2>
    ${
      isBase(model) &&
      html`<p>
        This is a base model. It was not trained to answer, but continues the text that you write.
      </p>`
    }
    ${
      isBuiltin &&
      html`<p>
        This tiny model comes with cLLM, so that you can try the server at once. It only knows
        questions like these:
      </p>`
    }
    ${
      model &&
      !isLoaded(model) &&
      html`<p>The server loads this model with your first message.</p>`
    }
    ${
      model &&
      (isBuiltin ? BUILTIN_EXAMPLES : isBase(model) ? BEGINNINGS : EXAMPLES).map(
        (text) =>
          html`<button type="button" key=${text} onClick=${() => onPick(text)}>${text}</button>`,
      )
    }
    <p class="hint">
      <kbd>Enter</kbd> sends, <kbd>Shift</kbd>+<kbd>Enter</kbd> starts a line, <kbd>Esc</kbd> stops
      the answer, <kbd>↑</kbd> edits your last message. Conversations stay in this browser.
    </p>
  </div>`;
}

function Composer({ id, isBusy, isBase, onSend, onStop }) {
  const [draft, setDraft] = useState(drafts.get(id) ?? "");
  drafts.set(id, draft);
  const box = useRef();
  useEffect(() => box.current.focus({ preventScroll: true }), []);
  const send = (event) => {
    event.preventDefault();
    if (isBusy || !draft.trim()) return;
    box.current.focus();
    if (onSend(draft)) setDraft("");
  };
  const onKeyDown = (event) => {
    if (isSendKey(event)) send(event);
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
      dir="auto"
      placeholder=${isBase ? "Write the beginning of a text" : "Write a message"}
      value=${draft}
      onInput=${(event) => setDraft(event.target.value)}
      onKeyDown=${onKeyDown}
    />
    ${
      isBusy
        ? html`<button type="button" class="main" onClick=${onStop}>Stop</button>`
        : html`<button class="main" disabled=${!draft.trim()}>
            ${isBase ? "Complete" : "Send"}
          </button>`
    }
  </form>`;
}

// The chat: the messages of a conversation, and the box for the next one.

import { Composer } from "./composer.js";
import { addMessage, groupVersions, listPath, showVersion } from "./conversation.js";
import { generate, isRunning, stop } from "./generation.js";
import { Log } from "./log.js";
import { Message } from "./message.js";
import { endReasoning } from "./server.js";
import { toFields } from "./settings.js";
import { html, useLatest, useMemo } from "./view.js";
import { Welcome } from "./welcome.js";

/**
 * The view of a conversation. generate explains model and events. context is the model's context
 * length in tokens, if known, and target is the message to show first.
 */
export function Chat({ conversation, model, context, target, events }) {
  const { messages, leaf } = conversation;
  const path = useMemo(() => listPath(conversation), [conversation, messages.length, leaf]);
  const versions = useMemo(() => groupVersions(conversation), [conversation, messages.length]);
  const isBusy = isRunning(conversation);
  const last = path.at(-1);
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
    document.querySelector(".composer textarea").focus({ preventScroll: true });
    generate(conversation, model, parent, events, message);
  };
  /** Return whether the text was sent. */
  const ask = (parent, text, files) => {
    if (!checkSettings()) return false;
    run(addMessage(conversation, parent, "user", text, files).id);
    return true;
  };
  const actions = useLatest({
    edit: (message, text) => ask(message.parent, text, message.files),
    regenerate: (message) => run(message.parent),
    resume: (message) => run(message.parent, message),
    endReasoning: (message) => endReasoning(message.answerId).catch(events.onError),
    show(message) {
      showVersion(conversation, message);
      events.onSave(conversation);
    },
    sendResults(message, texts) {
      if (!checkSettings()) return;
      let parent = message.id;
      for (const [i, text] of texts.entries()) {
        const result = addMessage(conversation, parent, "tool", text);
        result.callId = message.calls[i].id;
        parent = result.id;
      }
      run(parent);
    },
  });
  const draw = (message) =>
    html`<${Message}
      key=${message.id}
      message=${message}
      versions=${versions.get(message.parent)}
      isBusy=${isBusy && message === last}
      isLast=${message === last}
      canAct=${!isBusy}
      actions=${actions}
    />`;
  return html`
    <${Log}
      path=${path}
      target=${target}
      draw=${draw}
      empty=${html`<${Welcome} model=${model} onPick=${(text) => ask(null, text)} />`}
    />
    <${Composer}
      id=${conversation.id}
      isBusy=${isBusy}
      figures=${describeContext(path, context)}
      onSend=${(text, files) => ask(conversation.leaf, text, files)}
      onStop=${() => stop(conversation)}
      onError=${events.onError}
    />
    <p class="hidden" role="status">${describeState(last, isBusy)}</p>
  `;
}

/** Return how much of the context the conversation takes. */
function describeContext(path, context) {
  const { stats } = path.findLast((message) => message.stats) ?? {};
  if (!stats || !context) return "";
  const used = (stats.prompt + stats.completion).toLocaleString("en");
  return `${used} of ${context.toLocaleString("en")} tokens`;
}

/** Return what a screen reader says: the whole answer when it is complete, not each token. */
function describeState(message, isBusy) {
  if (message?.role !== "assistant") return "";
  return isBusy ? "Answering" : `Answer: ${message.content}`;
}

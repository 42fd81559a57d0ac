// The answers that are being generated, by their conversations.

import { fillAnswer } from "./answer.js";
import { addMessage, toApi, toText } from "./conversation.js";
import { watchLoad } from "./loading.js";
import { isBase, isLoaded } from "./models.js";
import { toFields, toSampling } from "./settings.js";
import { makePainter } from "./view.js";

const SAVE_INTERVAL = 2000; // milliseconds, while an answer is generated
const running = new Map(); // AbortControllers of the answers by the ids of their conversations

export const isRunning = (conversation) => running.has(conversation.id);

/** Return the ids of the conversations that get an answer, as one text. */
export const listRunning = () => [...running.keys()].join(" ");

export function stop(conversation) {
  running.get(conversation.id)?.abort();
}

/**
 * Generate the answer to the last message of the path to parent, as a new message, or continue
 * message. model is an entry of /v1/models, or undefined if there is none. events are functions by
 * name: onChange draws the page, onSave also stores the conversation, onError gets an error and
 * perhaps the message that shows it, and onLoad is called when the server had to load the model.
 */
export async function generate(conversation, model, parent, events, message) {
  const { onChange, onSave, onError, onLoad } = events;
  const isNew = !message;
  const name = model?.id ?? "";
  const mustLoad = Boolean(model) && !isLoaded(model);
  const leaf = isNew ? parent : message.id;
  const body = {
    model: name,
    stream: true,
    stream_options: { include_usage: true, continuous_usage_stats: true },
    ...(isBase(model)
      ? { prompt: toText(conversation, leaf), ...toSampling(conversation.settings) }
      : {
          messages: toApi(conversation, leaf),
          reasoning_control: true,
          ...toFields(conversation.settings),
        }),
  };
  if (!isNew && !isBase(model)) {
    Object.assign(body, { continue_final_message: true, add_generation_prompt: false });
  }
  const controller = new AbortController();
  running.set(conversation.id, controller);
  message ??= addMessage(conversation, parent, "assistant");
  Object.assign(message, { model: name, isJson: "response_format" in body, finish: "", error: "" });
  let saved = Date.now();
  const paint = makePainter(onChange);
  const draw = () => {
    paint();
    if (Date.now() - saved > SAVE_INTERVAL) {
      saved = Date.now();
      onSave(conversation);
    }
  };
  const loading = new AbortController();
  if (mustLoad) {
    watchLoad(model.root, loading.signal, (text) => {
      message.status = text;
      paint();
    });
  }
  onSave(conversation);
  try {
    await fillAnswer(message, body, controller.signal, () => {
      loading.abort(); // the server has answered
      draw();
    });
  } catch (error) {
    message.finish = "stopped";
    if (!controller.signal.aborted) {
      message.error = error.message;
      onError(error, message);
    }
  } finally {
    loading.abort();
    message.status = message.answerId = "";
    running.delete(conversation.id);
    onSave(conversation);
    if (mustLoad) onLoad();
  }
}

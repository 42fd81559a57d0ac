// How far the server is with loading a model.

import { listenToModels } from "./server.js";
import { useEffect, useState } from "./view.js";

/**
 * Call onProgress with a text about the load of a model, at once, whenever that changes and each
 * second, until the model is loaded or signal is aborted. name is the model's own, no alias.
 */
export async function watchLoad(name, signal, onProgress) {
  const begun = performance.now();
  let share = null;
  const tell = () => {
    const seconds = Math.floor((performance.now() - begun) / 1000);
    const done = share === null ? "…" : `${Math.floor(100 * share)} %`;
    onProgress(`Loading the model ${done}${seconds ? `, ${seconds} s` : ""}`);
  };
  tell();
  const timer = setInterval(tell, 1000);
  try {
    for await (const { model, event, data } of listenToModels(signal)) {
      if (signal.aborted) return;
      if (model !== name || event !== "model_status") continue;
      if (data.status === "loaded") return;
      share = data.progress?.value ?? null;
      tell();
    }
  } catch {
    // aborted, or the account may not use this route
  } finally {
    clearInterval(timer);
  }
}

/** Return a text about the load of a model while isLoading, and "" otherwise. onEnd is called after it. */
export function useLoad(name, isLoading, onEnd) {
  const [text, setText] = useState("");
  useEffect(() => {
    if (!isLoading) return setText("");
    const controller = new AbortController();
    const { signal } = controller;
    watchLoad(name, signal, setText).then(() => signal.aborted || onEnd());
    return () => controller.abort();
  }, [name, isLoading]);
  return text;
}

// What an empty conversation shows: the model, and examples.

import { isLoaded } from "./models.js";
import { html } from "./view.js";

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

/** model is an entry of /v1/models, or undefined. onPick gets the example that was clicked. */
export function Welcome({ model, onPick }) {
  const isBuiltin = model?.root === BUILTIN;
  return html`<div class="welcome">
    <h2>${model ? `Ask ${model.id}` : "Welcome to cLLM"}</h2>
    ${
      isBuiltin &&
      html`<p class="soft">
        This tiny model comes with cLLM, so that you can try the server at once. It only knows
        questions like these:
      </p>`
    }
    ${
      model &&
      !isLoaded(model) &&
      html`<p class="soft">The server loads this model with your first message.</p>`
    }
    ${
      model &&
      (isBuiltin ? BUILTIN_EXAMPLES : EXAMPLES).map(
        (text) =>
          html`<button type="button" key=${text} onClick=${() => onPick(text)}>${text}</button>`,
      )
    }
    <p class="hint">
      <kbd>Enter</kbd> sends, <kbd>Shift</kbd>+<kbd>Enter</kbd> starts a line, <kbd>Esc</kbd> stops
      the answer, <kbd>↑</kbd> edits your last message, <kbd>Ctrl</kbd>+<kbd>K</kbd> searches.
      Conversations stay in this browser.
    </p>
  </div>`;
}

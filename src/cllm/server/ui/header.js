// The row at the top: the model, and what belongs to the open conversation.

import { isLoaded } from "./models.js";
import { html, Icon, IconButton } from "./view.js";

/**
 * models are entries of /v1/models, and model is the name of the chosen one. actions are functions
 * by name: chooseModel, openList, openSettings and startNew.
 */
export function Header({ models, model, isListOpen, actions }) {
  return html`<header class="top">
    <${IconButton}
      icon="menu"
      label="Conversations"
      kind="narrow"
      aria-expanded=${isListOpen}
      aria-controls="sidebar"
      onClick=${actions.openList}
    />
    <h1 class="hidden">cLLM</h1>
    <div class="choice">
      <select
        aria-label="Model"
        title=${model}
        value=${model}
        disabled=${!models.length}
        onChange=${(event) => actions.chooseModel(event.target.value)}
      >
        ${!models.length && html`<option value="">No model</option>`}
        ${models.map(
          (one) =>
            html`<option key=${one.id} value=${one.id}>
              ${one.id}${isLoaded(one) ? "" : " (not loaded)"}
            </option>`,
        )}
      </select>
      <${Icon} name="chevron-down" />
    </div>
    <button type="button" class="quiet" onClick=${actions.openSettings} title="Settings">
      <${Icon} name="sliders-horizontal" /><span class="word">Settings</span>
    </button>
    <${IconButton} icon="square-pen" label="New" kind="narrow" onClick=${actions.startNew} />
  </header>`;
}

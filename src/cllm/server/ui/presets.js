// Presets: settings under a name, which the user applies to conversations.

import { html, IconButton, useState } from "./view.js";

const KEY = "cllm-presets";

/** Return the presets as [name, settings], in the order of their names. */
function readPresets() {
  try {
    const stored = Object.entries(JSON.parse(localStorage.getItem(KEY)) ?? {});
    return stored.sort(([one], [other]) => one.localeCompare(other));
  } catch {
    return [];
  }
}

/** Return whether two settings are equal, whatever their model. */
function areEqual(one, other) {
  const sort = ({ model, ...rest }) =>
    JSON.stringify(Object.entries(rest).filter(([, value]) => value).sort());
  return sort(one) === sort(other);
}

/** Lets the user apply, save and delete presets. onChange gets the settings of the chosen one. */
export function Presets({ settings, onChange }) {
  const [presets, setPresets] = useState(readPresets);
  const [name, setName] = useState("");
  const [fault, setFault] = useState("");
  const chosen = presets.find(([, preset]) => areEqual(preset, settings))?.[0] ?? "";
  const store = (changed) => {
    try {
      localStorage.setItem(KEY, JSON.stringify(Object.fromEntries(changed)));
      setPresets(readPresets());
    } catch (error) {
      setFault(`The browser did not store the preset: ${error.message}`);
    }
  };
  const others = (without) => presets.filter(([one]) => one !== without);
  const apply = (value) => {
    const preset = presets.find(([one]) => one === value)?.[1] ?? {};
    onChange({ ...preset, model: settings.model ?? "" });
  };
  const save = () => {
    const { model, ...rest } = settings;
    store([...others(name.trim()), [name.trim(), rest]]);
    setName("");
  };
  return html`<fieldset class="presets wide">
    <label>
      <span>Preset</span>
      <select value=${chosen} onChange=${(event) => apply(event.target.value)}>
        <option value="">${areEqual(settings, {}) ? "Server's defaults" : chosen ? "None" : "Own settings"}</option>
        ${presets.map(([one]) => html`<option key=${one} value=${one}>${one}</option>`)}
      </select>
    </label>
    ${
      chosen &&
      html`<${IconButton}
        icon="trash-2"
        label=${`Delete the preset ${chosen}`}
        onClick=${() => store(others(chosen))}
      />`
    }
    <label>
      <span>New preset</span>
      <input
        value=${name}
        maxlength="60"
        placeholder="Name"
        onInput=${(event) => setName(event.target.value)}
        onKeyDown=${(event) => {
          if (event.key !== "Enter") return;
          event.preventDefault();
          if (name.trim()) save();
        }}
      />
    </label>
    <button type="button" disabled=${!name.trim()} onClick=${save}>Save these settings</button>
    ${fault && html`<span class="fault" role="alert">${fault}</span>`}
  </fieldset>`;
}

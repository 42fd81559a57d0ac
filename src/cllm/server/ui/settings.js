// The settings of a conversation: system prompt, sampling, answer format and tools. All values are
// texts as the user has typed them; "" means the server's default.

import { html, useEffect, useRef } from "./view.js";

const NUMBERS = [
  { name: "temperature", label: "Temperature", min: 0, max: 100, step: "any" },
  { name: "top_p", label: "Top P", min: 0, max: 1, step: "any" },
  { name: "top_k", label: "Top K", min: 0, step: 1 },
  { name: "min_p", label: "Min P", min: 0, max: 1, step: "any" },
  { name: "max_tokens", label: "Max tokens", min: 1, step: 1 },
  { name: "seed", label: "Seed", step: 1 },
];
const EFFORTS = {
  "": "Model default",
  none: "Off",
  low: "Short",
  medium: "Medium",
  high: "Long",
};
const FORMATS = { "": "Text", json_object: "JSON", json_schema: "JSON with this schema" };

/** Return the sampling fields of a request. Throws an Error that names the wrong setting. */
export function toSampling(settings) {
  const fields = {};
  for (const { name, label, step } of NUMBERS) {
    if (!settings[name]) continue;
    fields[name] = Number(settings[name]);
    const isRight = step === 1 ? Number.isInteger : Number.isFinite;
    if (!isRight(fields[name])) throw new Error(`${label} is not a valid number.`);
  }
  const stop = (settings.stop ?? "").split("\n").filter(Boolean);
  if (stop.length) fields.stop = stop;
  return fields;
}

/** Return the fields of a chat's request body. Throws an Error that names the wrong setting. */
export function toFields(settings) {
  const fields = toSampling(settings);
  if (settings.effort) fields.reasoning_effort = settings.effort;
  if (settings.tools?.trim()) fields.tools = parse(settings.tools, "Tools");
  if (settings.format === "json_object") fields.response_format = { type: "json_object" };
  if (settings.format === "json_schema") {
    const schema = parse(settings.schema ?? "", "JSON schema");
    fields.response_format = { type: "json_schema", json_schema: { name: "answer", schema } };
  }
  return fields;
}

function parse(text, label) {
  try {
    return JSON.parse(text);
  } catch (error) {
    throw new Error(`${label}: this is not JSON. ${error.message}`);
  }
}

const findFault = (text, label) => {
  try {
    if (text?.trim()) parse(text, label);
    return "";
  } catch (error) {
    return error.message;
  }
};

/** A dialog that is open as long as it exists. */
export function Dialog({ title, onClose, children }) {
  const dialog = useRef();
  useEffect(() => dialog.current.showModal(), []);
  return html`<dialog ref=${dialog} aria-label=${title} onClose=${onClose}>
    <header>
      <h2>${title}</h2>
      <button type="button" onClick=${() => dialog.current.close()}>Close</button>
    </header>
    ${children}
  </dialog>`;
}

/** The dialog of settings. defaults are the server's sampling parameters by name. */
export function Settings({ settings, defaults, onChange, onClose }) {
  const set = (name) => (event) => onChange({ ...settings, [name]: event.target.value });
  const text = (name, label, hint, rows, fault = "") =>
    html`<label class="wide">
      <span>${label}</span>
      <textarea
        rows=${rows}
        value=${settings[name] ?? ""}
        placeholder=${hint}
        spellcheck=${name === "system"}
        aria-invalid=${Boolean(fault)}
        onInput=${set(name)}
      />
      ${fault && html`<span class="fault" role="alert">${fault}</span>`}
    </label>`;
  const choice = (name, label, options) =>
    html`<label>
      <span>${label}</span>
      <select value=${settings[name] ?? ""} onChange=${set(name)}>
        ${Object.entries(options).map(
          ([value, shown]) => html`<option key=${value} value=${value}>${shown}</option>`,
        )}
      </select>
    </label>`;
  return html`<${Dialog} title="Settings of this conversation" onClose=${onClose}>
    <form class="fields" method="dialog">
      ${text("system", "System prompt", "How the model should answer", 3)}
      ${NUMBERS.map(
        ({ name, label, ...limits }) =>
          html`<label key=${name}>
            <span>${label}</span>
            <input
              type="number"
              ...${limits}
              value=${settings[name] ?? ""}
              placeholder=${defaults[name] ?? "default"}
              onInput=${set(name)}
            />
          </label>`,
      )}
      ${text("stop", "Stop sequences, one per line", "", 2)}
      ${choice("effort", "Reasoning", EFFORTS)} ${choice("format", "Answer format", FORMATS)}
      ${
        settings.format === "json_schema" &&
        text(
          "schema",
          "JSON schema",
          '{"type": "object", "properties": {"name": {"type": "string"}}}',
          6,
          findFault(settings.schema, "JSON schema"),
        )
      }
      ${text(
        "tools",
        "Tools, a list as in OpenAI's API",
        '[{"type": "function", "function": {"name": …, "parameters": …}}]',
        3,
        findFault(settings.tools, "Tools"),
      )}
    </form>
  </${Dialog}>`;
}

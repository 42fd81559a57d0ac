// The settings of a conversation: system prompt, sampling, answer format and tools. All values are
// texts as the user has typed them; "" means the server's default.

import { Dialog } from "./dialog.js";
import { PARAMETERS, readParameters, SWITCHES } from "./parameters.js";
import { Presets } from "./presets.js";
import { html } from "./view.js";

const EFFORTS = {
  "": "Model default",
  none: "Off",
  low: "Short",
  medium: "Medium",
  high: "Long",
};
const FORMATS = { "": "Text", json_object: "JSON", json_schema: "JSON with this schema" };
const isRare = (parameter) => Boolean(parameter.isRare);
const isCommon = (parameter) => !parameter.isRare;

/** Return the sampling fields of a request. Throws an Error that names the wrong setting. */
export function toSampling(settings) {
  const fields = readParameters(settings);
  const stop = (settings.stop ?? "").split("\n").filter(Boolean);
  if (stop.length) fields.stop = stop;
  if (settings.logit_bias?.trim()) fields.logit_bias = parse(settings.logit_bias, "Logit bias");
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

/** The dialog of settings. defaults are the server's sampling parameters by name. */
export function Settings({ settings, defaults, onChange, onClose }) {
  const set = (name) => (event) => onChange({ ...settings, [name]: event.target.value });
  const text = (name, label, hint, rows, fault = "") =>
    html`<label class="wide">
      <span>${label}</span>
      <textarea
        rows=${rows}
        class=${name === "system" ? "prose" : null}
        value=${settings[name] ?? ""}
        placeholder=${hint}
        spellcheck=${name === "system"}
        aria-invalid=${Boolean(fault)}
        onInput=${set(name)}
      />
      ${fault && html`<span class="fault" role="alert">${fault}</span>`}
    </label>`;
  const choice = (name, label, options) =>
    html`<label class="double">
      <span>${label}</span>
      <select value=${settings[name] ?? ""} onChange=${set(name)}>
        ${Object.entries(options).map(
          ([value, shown]) => html`<option key=${value} value=${value}>${shown}</option>`,
        )}
      </select>
    </label>`;
  const number = ({ name, label, min, max, step, isWhole, hint }) =>
    html`<label key=${name} title=${hint}>
      <span>${label}</span>
      <input
        type="number"
        ...${{ min, max, step: step ?? (isWhole ? 1 : "any") }}
        value=${settings[name] ?? ""}
        placeholder=${defaults[name] ?? "default"}
        onInput=${set(name)}
      />
    </label>`;
  const setSwitch = (name) => (event) =>
    onChange({ ...settings, [name]: event.target.checked ? "on" : "" });
  const rare = [...PARAMETERS.filter(isRare), ...SWITCHES, { name: "logit_bias" }];
  const numSet = rare.filter(({ name }) => settings[name]).length;
  return html`<${Dialog} title="Settings" onClose=${onClose}>
    <form class="fields" method="dialog">
      <${Presets} settings=${settings} onChange=${onChange} />
      ${text("system", "System prompt", "How the model should answer", 3)}
      <h3 class="wide">Sampling</h3>
      ${PARAMETERS.filter(isCommon).map(number)}
      <details class="wide more">
        <summary>More parameters${numSet ? ` (${numSet} set)` : ""}</summary>
        <div class="fields">
          ${PARAMETERS.filter(isRare).map(number)}
          ${text(
            "logit_bias",
            "Logit bias: tokens or texts, and what to add to their logits",
            '{" maybe": -100}',
            1,
            findFault(settings.logit_bias, "Logit bias"),
          )}
          ${SWITCHES.map(
            ({ name, label }) =>
              html`<label class="check" key=${name}>
                <input
                  type="checkbox"
                  checked=${Boolean(settings[name])}
                  onChange=${setSwitch(name)}
                />
                <span>${label}</span>
              </label>`,
          )}
        </div>
      </details>
      <h3 class="wide">Answer</h3>
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
      ${text("stop", "Stop sequences, one per line", "", 1)}
      ${text(
        "tools",
        "Tools, a list as in OpenAI's API",
        '[{"type": "function", "function": {"name": …, "parameters": …}}]',
        2,
        findFault(settings.tools, "Tools"),
      )}
    </form>
  </${Dialog}>`;
}

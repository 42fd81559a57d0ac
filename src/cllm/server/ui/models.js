// The models view: what the server knows about its models.

import { useLoad } from "./loading.js";
import { getJson } from "./server.js";
import { classes, html, Icon, useEffect, useState } from "./view.js";

/**
 * Shows models, which are entries of /v1/models. onChat starts a chat with the named one, and
 * onChange is called when one was loaded or unloaded.
 */
export function Models({ models, onChat, onChange }) {
  const [running, setRunning] = useState([]);
  useEffect(() => {
    getJson("api/ps").then(
      ({ models: found }) => setRunning(found),
      () => setRunning([]),
    );
  }, [models]);
  return html`<div class="models" tabindex="0" role="region" aria-label="Models">
    <h2>Models</h2>
    ${!models.length && html`<p>The server has no models.</p>`}
    ${models.map(
      (model, i) =>
        html`<${Model}
          key=${model.id}
          model=${model}
          running=${running.find(({ name }) => name.replace(/:latest$/, "") === model.id)}
          isFirst=${i === 0}
          onChat=${onChat}
          onChange=${onChange}
        />`,
    )}
  </div>`;
}

/** Return whether a model only continues texts. */
export const isBase = (model) => model?.task === "completion";

export const isLoaded = ({ loaded }) => loaded !== false;

function Model({ model, running, isFirst, onChat, onChange }) {
  const [isOpen, setOpen] = useState(isFirst);
  const [details, setDetails] = useState(null);
  const [fault, setFault] = useState("");
  const [isChanging, setChanging] = useState(false);
  const isUsable = isLoaded(model);
  const isLoading = !isUsable && (isChanging || model.status?.value === "loading");
  const progress = useLoad(model.root, isLoading, onChange);
  useEffect(() => setDetails(null), [isUsable]);
  useEffect(() => {
    if (isOpen && !details) readDetails(model).then(setDetails, ({ message }) => setFault(message));
  }, [isOpen, details, isUsable]);
  /** Load the model, which every request may, or unload it, which the operator has to allow. */
  const change = async () => {
    setChanging(true);
    setFault("");
    try {
      if (isUsable) await getJson("models/unload", { model: model.id });
      else await getJson("api/generate", { model: model.id, stream: false });
      await onChange();
    } catch (error) {
      setFault(error.message);
    }
    setChanging(false);
  };
  const state = isUsable ? "loaded" : isLoading ? "loading" : (model.status?.value ?? "not loaded");
  return html`<details open=${isOpen} onToggle=${(event) => setOpen(event.target.open)}>
    <summary>
      <strong>${model.id}</strong>
      <span class=${classes("badge", isUsable && "ready")}>${state}</span>
    </summary>
    <div class="bar">
      ${
        model.task !== "embedding" &&
        html`<button type="button" class="main" onClick=${() => onChat(model.id)}>
          ${isBase(model) ? "Continue a text with it" : "Chat with it"}
        </button>`
      }
      ${
        !model.parent &&
        html`<button type="button" disabled=${isChanging || isLoading} onClick=${change}>
          <${Icon} name="power" />
          ${isUsable ? (isChanging ? "Unloading …" : "Unload") : isLoading ? "Loading …" : "Load"}
        </button>`
      }
    </div>
    ${progress && html`<p class="status">${progress}</p>`}
    ${fault && html`<p class="fault" role="alert">${fault}</p>`}
    ${details && html`<${Details} model=${model} running=${running} ...${details} />`}
  </details>`;
}

/**
 * Return the details of a model. If the model is not loaded, they come from its file only, because
 * the other routes would load it.
 */
async function readDetails(model) {
  const query = `?model=${encodeURIComponent(model.id)}`;
  const isUsable = isLoaded(model);
  const [show, info, props] = await Promise.all([
    getJson("api/show", { model: model.id }),
    isUsable ? getJson(`model/info${query}`) : {},
    isUsable ? getJson(`props${query}`) : {},
  ]);
  return { show, info, props };
}

function Details({ model, running, show, info, props }) {
  const { details, capabilities, model_info: metadata, template, license } = show;
  const stats = info.stats ?? {};
  const sampling = props.default_generation_settings?.params ?? {};
  const rows = {
    Capabilities: capabilities.join(", "),
    Architecture: details.family,
    Parameters: details.parameter_size,
    Quantization: details.quantization_level,
    "Adapter of": model.parent,
    Context: formatContext(info, model),
    "Parallel sequences": info.max_num_seqs,
    Weights: formatBytes(info.model_bytes),
    "Memory in use": formatBytes(running?.size_used),
    "Memory at most": formatBytes(running?.size),
    "GPU memory at most": running?.size_vram ? formatBytes(running.size_vram) : "",
    Engines: running?.engines,
    "KV cache": info.layout && `${info.layout}, ${formatBytes(info.kv_bytes_per_token)} per token`,
    "Cached tokens": stats.num_cells_idle,
    "Requests now": info.stats && `${stats.num_running} running, ${stats.num_waiting} waiting`,
    Vocabulary: info.vocabulary_size && `${info.vocabulary_size} tokens`,
    "Embedding size": info.embedding_size,
    Sampling: Object.entries(sampling)
      .filter(([, value]) => value !== -1) // no limit of tokens
      .map(([name, value]) => `${name} ${value}`)
      .join(", "),
    Licence: license?.split("\n")[0],
    "llama.cpp": info.system,
  };
  return html`
    <${Table} rows=${rows} />
    ${template && html`<${Part} title="Chat template"><pre tabindex="0">${template}</pre></${Part}>`}
    <${Part} title="Metadata of the file"><${Table} rows=${metadata} /></${Part}>
  `;
}

function formatContext({ context_length: length, trained_context_length: trained }, model) {
  if (!length) return model.context_length && `${model.context_length} tokens`;
  return `${length} tokens, trained with ${trained}`;
}

const Part = ({ title, children }) =>
  html`<details class="part">
    <summary>${title}</summary>
    ${children}
  </details>`;

const isThere = (value) => value !== undefined && value !== null && value !== "";

const Table = ({ rows }) =>
  html`<dl>
    ${Object.entries(rows)
      .filter(([, value]) => isThere(value))
      .map(
        ([name, value]) =>
          html`<div key=${name}>
            <dt>${name}</dt>
            <dd>${typeof value === "object" ? JSON.stringify(value) : String(value)}</dd>
          </div>`,
      )}
  </dl>`;

function formatBytes(count) {
  if (!count) return count === undefined ? "" : `${count} bytes`;
  const units = ["bytes", "kB", "MB", "GB", "TB"];
  const power = Math.min(Math.floor(Math.log10(count) / 3), units.length - 1);
  const shown = count / 1000 ** power;
  return `${power ? shown.toPrecision(3) : shown} ${units[power]}`;
}

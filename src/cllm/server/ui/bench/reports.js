// The list of kept reports.

import { getJson } from "../server.js";
import { download, html, Icon, IconButton, useRef } from "../view.js";
import { number, time, title } from "./format.js";

/** chosen has ids; actions are functions by name: choose, remove, upload. */
export function Reports({ reports, chosen, actions }) {
  const file = useRef();
  const upload = ({ target }) => {
    if (target.files.length) actions.upload(target.files[0]);
    target.value = "";
  };
  return html`<section class="reports" aria-label="Reports">
    <div class="bar">
      <h2>Reports</h2>
      <button type="button" onClick=${() => file.current.click()}>
        <${Icon} name="upload" />Upload
      </button>
      <input
        type="file"
        accept=".json,application/json"
        aria-label="Report to upload"
        hidden
        ref=${file}
        onChange=${upload}
      />
    </div>
    <p class="soft">
      ${reports.length ? "Choose one to see it, or two to compare them." : "There is no report yet."}
    </p>
    <ul>
      ${reports.map(
        (one) =>
          html`<${Entry}
            key=${one.id}
            entry=${one}
            isChosen=${chosen.includes(one.id)}
            actions=${actions}
          />`,
      )}
    </ul>
  </section>`;
}

function Entry({ entry, isChosen, actions }) {
  const { id, head, created } = entry;
  const save = async () =>
    download(`bench-${id}.json`, JSON.stringify(await getJson(`bench/reports/${id}`), null, 2));
  return html`<li>
    <label>
      <input
        type="checkbox"
        checked=${isChosen}
        disabled=${!head}
        onChange=${() => actions.choose(id)}
      />
      <span>
        <strong>${title(entry)}</strong>
        <span class="soft">${head ? describe(head, created) : "The file is damaged."}</span>
      </span>
    </label>
    ${head && html`<${IconButton} icon="download" label=${`Download ${title(entry)}`} onClick=${save} />`}
    <${IconButton}
      icon="trash-2"
      label=${`Delete ${title(entry)}`}
      onClick=${() => actions.remove(id)}
    />
  </li>`;
}

function describe(head, created) {
  const { workload, concurrency, rate } = head.settings;
  const parts = [
    time(created),
    head.note && `${workload ?? "load"} on ${head.model}`,
    rate ? `${number(rate)} requests/s sent` : concurrency && `${concurrency} clients`,
    `${head.num_succeeded} of ${head.num_requests} succeeded`,
    `${number(head.output_tokens_per_s)} tokens/s`,
  ];
  return parts.filter(Boolean).join(", ");
}

// What one report says, and how two differ.

import { getJson } from "../server.js";
import { classes, html, useEffect, useState } from "../view.js";
import { number, title } from "./format.js";
import { SharePlot } from "./plots.js";

const LATENCIES = { ttft: "TTFT", itl: "ITL", tpot: "TPOT", e2e: "E2E" };
const SHARES = ["mean", "p50", "p95", "p99"];

/** Return the answers to GET requests, once there are all, and the message of a fault. */
function useAnswers(...paths) {
  const [state, setState] = useState({ answers: null, fault: "" });
  useEffect(() => {
    Promise.all(paths.map((path) => getJson(path))).then(
      (answers) => setState({ answers, fault: "" }),
      ({ message }) => setState({ answers: null, fault: message }),
    );
  }, []);
  return state;
}

export function Report({ entry }) {
  const { answers, fault } = useAnswers(`bench/reports/${entry.id}`);
  if (fault) return html`<p class="fault notice" role="alert">${fault}</p>`;
  if (!answers) return null;
  const [report] = answers;
  return html`<section class="results" aria-label="Report">
    <h2>${title(entry)}</h2>
    <p>
      ${report.num_succeeded} of ${report.num_requests} requests succeeded in
      ${` ${number(report.wall_s)}`} s: ${number(report.output_tokens_per_s)} output tokens/s,
      ${` ${number(report.requests_per_s)}`} requests/s, ${number(report.cached_tokens)} of
      ${` ${number(report.prompt_tokens)}`} prompt tokens from the cache.
    </p>
    ${Object.entries(report.failures ?? {}).map(
      ([why, count]) =>
        html`<p key=${why} class="fault">${count} failed: ${why}${showExample(report, why)}</p>`,
    )}
    <div class="scroll" tabindex="0" role="region" aria-label="Latencies">
      <table>
        <thead>
          <tr>
            <th scope="col">Milliseconds</th>
            ${SHARES.map((share) => html`<th key=${share} scope="col">${share}</th>`)}
          </tr>
        </thead>
        <tbody>
          ${Object.entries(LATENCIES).map(
            ([name, label]) =>
              html`<tr key=${name}>
                <th scope="row">${label}</th>
                ${SHARES.map(
                  (share) => html`<td key=${share}>${number(report[`${name}_ms`]?.[share])}</td>`,
                )}
              </tr>`,
          )}
        </tbody>
      </table>
    </div>
    <${Plots} reports=${[report]} names=${[title(entry)]} />
    <${Settings} report=${report} />
  </section>`;
}

const showExample = ({ examples }, why) => (examples?.[why] ? `, such as: ${examples[why]}` : "");

function Settings({ report }) {
  return html`<details>
    <summary>Settings</summary>
    <dl class="settings">
      ${Object.entries(report.settings).map(
        ([name, value]) =>
          html`<div key=${name}>
            <dt>${name.replaceAll("_", " ")}</dt>
            <dd>${`${value}`}</dd>
          </div>`,
      )}
    </dl>
  </details>`;
}

function Plots({ reports, names }) {
  return html`<div class="plots">
    ${["ttft", "itl"].map(
      (name) =>
        html`<${SharePlot}
          key=${name}
          label=${LATENCIES[name]}
          names=${names}
          series=${reports.map((report) => report.percentiles_ms?.[name])}
        />`,
    )}
  </div>`;
}

export function Comparison({ before, after }) {
  const { answers, fault } = useAnswers(
    `bench/reports/${before.id}`,
    `bench/reports/${after.id}`,
    `bench/reports/${before.id}/compare/${after.id}`,
  );
  if (fault) return html`<p class="fault notice" role="alert">${fault}</p>`;
  if (!answers) return null;
  const [old, recent, { settings, figures }] = answers;
  const names = [`before: ${title(before)}`, `after: ${title(after)}`];
  return html`<section class="results" aria-label="Comparison">
    <h2>Comparison</h2>
    <p class="legend">
      ${names.map((name, i) => html`<span key=${name}><i class=${`line-${i}`}></i>${name}</span>`)}
    </p>
    ${
      settings.length > 0 &&
      html`<ul>
        ${settings.map((one) => html`<li key=${one}>${one.replaceAll("_", " ")}</li>`)}
      </ul>`
    }
    <${Plots} reports=${[old, recent]} names=${names} />
    <div class="scroll" tabindex="0" role="region" aria-label="Figures">
      <table>
        <thead>
          <tr>
            <th scope="col">Figure</th>
            <th scope="col">before</th>
            <th scope="col">after</th>
            <th scope="col">ratio</th>
            <th scope="col">beyond the spread</th>
          </tr>
        </thead>
        <tbody>
          ${figures.map((figure) => html`<${Figure} key=${figure.name} figure=${figure} />`)}
        </tbody>
      </table>
    </div>
    <p class="soft">
      Beyond the spread: the intervals in which the figures of 95 of 100 such runs would be, as far as
      one run can tell, have nothing in common. Repeat a run to see what else changes between runs.
    </p>
  </section>`;
}

function Figure({ figure }) {
  const { name, before, after, ratio, differ } = figure;
  return html`<tr class=${classes(differ && "differs")}>
    <th scope="row">${name}</th>
    <td title=${describeInterval(figure.interval_before)}>${number(before)}</td>
    <td title=${describeInterval(figure.interval_after)}>${number(after)}</td>
    <td>${ratio === null ? "" : ratio.toFixed(3)}</td>
    <td>${differ === null ? "" : differ ? "yes" : "no"}</td>
  </tr>`;
}

const describeInterval = (interval) =>
  interval ? `${number(interval[0])} to ${number(interval[1])}` : null;

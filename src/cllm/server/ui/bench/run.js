// The run that goes on, or has ended last.

import { classes, html, Icon } from "../view.js";
import { milliseconds } from "./format.js";
import { RatePlot } from "./plots.js";

const STATES = {
  running: "running",
  completed: "completed",
  cancelled: "cancelled",
  failed: "failed",
};

export function Run({ run, rates, onCancel }) {
  const { progress, plan } = run;
  const isRunning = run.status === "running";
  const share = progress.num_planned ? progress.num_done / progress.num_planned : 0;
  const facts = {
    "succeeded": progress.num_succeeded,
    "running": progress.num_running,
    "output tokens/s": progress.seconds
      ? (progress.output_tokens / progress.seconds).toFixed(1)
      : "–",
    "first token, median": milliseconds(progress.ttft_ms?.p50),
    "first token, 99 %": milliseconds(progress.ttft_ms?.p99),
    "between chunks, median": milliseconds(progress.itl_ms?.p50),
    "between chunks, 99 %": milliseconds(progress.itl_ms?.p99),
    "seconds": progress.seconds.toFixed(1),
  };
  const faults = Object.entries(progress.failures);
  return html`<section aria-label="Run" class="run">
    <h2>
      ${plan.workload} on ${run.model}
      <span class=${classes("badge", run.status)} role="status">${STATES[run.status]}</span>
    </h2>
    ${plan.note && html`<p>${plan.note}</p>`}
    ${run.reason && html`<p class=${run.status === "failed" && "fault"}>${run.reason}</p>`}
    ${
      isRunning &&
      html`<div class="bar">
        <progress aria-label="Requests that have ended" value=${share} max="1"></progress>
        <span>${describeProgress(progress)}</span>
        <button type="button" onClick=${onCancel}><${Icon} name="square" />Cancel</button>
      </div>`
    }
    <dl class="facts">
      ${Object.entries(facts).map(
        ([name, value]) =>
          html`<div key=${name}>
            <dt>${name}</dt>
            <dd>${value}</dd>
          </div>`,
      )}
    </dl>
    ${faults.map(([why, count]) => html`<p key=${why} class="fault">${count} failed: ${why}</p>`)}
    ${rates.length > 1 && html`<${RatePlot} rates=${rates} />`}
  </section>`;
}

function describeProgress({ num_done, num_planned }) {
  return num_planned ? `${num_done} of ${num_planned} requests, with the warm-up` : "starting";
}

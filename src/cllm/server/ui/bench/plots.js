// Small plots. Their colours are those of the classes line-0 and line-1.

import { html } from "../view.js";
import { milliseconds } from "./format.js";

const WIDTH = 360;
const HEIGHT = 150;
const LEFT = 34;
const BOTTOM = 20;
const TOP = 8;

/** Return a list of numbers, or an empty one for anything else. */
const asNumbers = (values) =>
  Array.isArray(values) && values.every((value) => typeof value === "number") ? values : [];

/** Return the points of a line, where x and y are shares of the area, 0 to 1. */
const points = (shares) =>
  shares
    .map(([x, y]) => {
      const across = LEFT + x * (WIDTH - LEFT - 4);
      return `${across.toFixed(1)},${(HEIGHT - BOTTOM - y * (HEIGHT - BOTTOM - TOP)).toFixed(1)}`;
    })
    .join(" ");

function Area({ label, children }) {
  const [low, high] = [HEIGHT - BOTTOM, TOP];
  return html`<svg class="plot" viewBox=${`0 0 ${WIDTH} ${HEIGHT}`} role="img" aria-label=${label}>
    <line class="axis" x1=${LEFT} x2=${WIDTH - 4} y1=${low} y2=${low} />
    <line class="axis" x1=${LEFT} x2=${WIDTH - 4} y1=${(low + high) / 2} y2=${(low + high) / 2} />
    <line class="axis" x1=${LEFT} x2=${WIDTH - 4} y1=${high} y2=${high} />
    ${children}
  </svg>`;
}

/**
 * The share of requests (of ITL: of gaps) within a time, up to the 99th percentile. series has the
 * percentiles 0 to 100 of each report.
 */
export function SharePlot({ label, names, series }) {
  const known = series.map(asNumbers);
  const most = Math.max(...known.map((values) => values[99] ?? 0));
  if (!(most > 0)) return null;
  const said = known
    .map((values, i) => `${names[i]}: half within ${milliseconds(values[50])}`)
    .join("; ");
  return html`<figure>
    <figcaption>${label}: share within a time</figcaption>
    <${Area} label=${`${label}. ${said}`}>
      <text x=${LEFT - 4} y=${TOP + 4} class="end">100 %</text>
      <text x=${LEFT - 4} y=${(HEIGHT - BOTTOM + TOP) / 2 + 4} class="end">50 %</text>
      <text x=${LEFT} y=${HEIGHT - 5}>0</text>
      <text x=${WIDTH - 4} y=${HEIGHT - 5} class="end">${milliseconds(most)}</text>
      ${known.map(
        (values, i) =>
          html`<polyline
            key=${i}
            class=${`line-${i}`}
            points=${points(values.slice(0, 100).map((ms, share) => [Math.min(1, ms / most), share / 100]))}
          />`,
      )}
    <//>
  </figure>`;
}

/** Output tokens per second while a run goes on. */
export function RatePlot({ rates }) {
  const most = Math.max(1, ...rates.map(({ rate }) => rate));
  const last = rates.at(-1).seconds;
  const label = `${Math.round(rates.at(-1).rate)} output tokens per second at last`;
  return html`<figure>
    <figcaption>Output tokens/s</figcaption>
    <${Area} label=${label}>
      <text x=${LEFT - 4} y=${TOP + 4} class="end">${Math.round(most)}</text>
      <text x=${LEFT} y=${HEIGHT - 5}>0 s</text>
      <text x=${WIDTH - 4} y=${HEIGHT - 5} class="end">${last.toFixed(0)} s</text>
      <polyline
        class="line-0"
        points=${points(rates.map(({ seconds, rate }) => [seconds / last, rate / most]))}
      />
    <//>
  </figure>`;
}

// Draws on canvases. Colours are those of the legend, so that they follow the theme.

export const ROW = 42; // pixels of a row of the list of requests
export const WINDOW = 60; // seconds shown by the bars
const BLOCKS = 240; // squares of a map of cells

let colors = {};

/** Read the colours of the present theme. */
export function readColors() {
  for (const mark of document.querySelectorAll(".legend i")) {
    colors[mark.className] = getComputedStyle(mark).backgroundColor;
  }
  const style = getComputedStyle(document.body);
  colors.text = style.color;
  colors.line = getComputedStyle(document.querySelector("section")).borderTopColor;
}

/** Return a canvas's context, cleared, in CSS pixels, with its width and height. */
function prepare(canvas, height) {
  const width = canvas.clientWidth;
  const scale = window.devicePixelRatio;
  if (canvas.width !== Math.round(width * scale) || canvas.height !== Math.round(height * scale)) {
    canvas.width = Math.round(width * scale);
    canvas.height = Math.round(height * scale);
  }
  const context = canvas.getContext("2d");
  context.setTransform(scale, 0, 0, scale, 0, 0);
  context.clearRect(0, 0, width, height);
  return { context, width, height };
}

/** Draw the phases of sequences, one below the other, in the WINDOW before a time. */
export function drawBars(canvas, tracks, time) {
  const height = ROW * tracks.length;
  canvas.style.height = `${height}px`;
  const { context, width } = prepare(canvas, height);
  const scale = width / WINDOW;
  const start = time - WINDOW;
  context.fillStyle = colors.line;
  for (let past = 0; past < WINDOW; past += 10) {
    context.fillRect(Math.round((time - past - start) * scale) - 1, 0, 1, height);
  }
  tracks.forEach((track, row) => {
    for (const { phase, from, to } of track.segments) {
      // a phase that goes on is drawn up to now
      const end = to === track.last && time - to < 1.5 ? time : Math.min(to, time);
      if (end < start || from > time) continue;
      const x = Math.max(0, (from - start) * scale);
      context.fillStyle = colors[phase];
      context.fillRect(x, ROW * row + 11, Math.max(2, (end - start) * scale - x), ROW - 22);
    }
  });
}

/** Draw the rates of all snapshots up to a time as two lines. */
export function drawRates(canvas, snapshots, time, seconds) {
  const { context, width, height } = prepare(canvas, canvas.clientHeight);
  const series = { decode: "output_tokens_per_s", prefill: "prompt_tokens_per_s" };
  const shown = snapshots.filter((snapshot) => snapshot.at <= time);
  const points = Object.entries(series).map(([color, field]) => [color, averages(shown, field)]);
  const most = Math.max(10, ...points.flatMap(([, values]) => values.map(({ value }) => value)));
  const top = 16;
  context.fillStyle = colors.text;
  context.font = "12px system-ui, sans-serif";
  context.fillText(`${Math.round(most)}`, 0, 11);
  context.fillStyle = colors.line;
  context.fillRect(0, top, width, 1);
  context.fillRect(0, height - 1, width, 1);
  for (const [color, values] of points) {
    context.strokeStyle = colors[color];
    context.lineWidth = 2;
    context.beginPath();
    for (const { at, value } of values) {
      const x = width * (1 - (time - at) / seconds);
      context.lineTo(x, height - 2 - ((height - top - 4) * value) / most);
    }
    context.stroke();
  }
}

/** Return the mean of a rate over all models and each second. */
function averages(snapshots, field) {
  const bySecond = new Map();
  for (const { at, models } of snapshots) {
    const second = Math.floor(at);
    const sums = bySecond.get(second) ?? { at: second, sum: 0, count: 0 };
    for (const model of models) sums.sum += model[field];
    sums.count += 1;
    bySecond.set(second, sums);
  }
  return [...bySecond.values()].map(({ at, sum, count }) => ({ at, value: sum / count }));
}

/** Draw the cells of an engine as squares: those of each sequence, then shared, cached, free ones. */
export function drawCells(canvas, engine) {
  const { context, width, height } = prepare(canvas, canvas.clientHeight);
  const rows = 4;
  const columns = BLOCKS / rows;
  const size = Math.min(width / columns, height / rows);
  const cells = engine.num_cells / BLOCKS;
  const kinds = [];
  const add = (kind, count) => {
    for (let i = Math.round(count / cells); i > 0; i--) kinds.push(kind);
  };
  if (engine.num_cells) {
    let isOdd = false;
    let num_private = 0;
    for (const sequence of engine.sequences) {
      const own = sequence.num_cells - sequence.num_shared_cells;
      num_private += own;
      add(isOdd ? "used odd" : "used", own);
      isOdd = !isOdd;
    }
    add("shared", Math.max(0, engine.num_cells_held - num_private));
    add("idle", engine.num_cells_idle);
  }
  for (let i = 0; i < BLOCKS; i++) {
    const kind = kinds[i] ?? "free";
    context.globalAlpha = kind === "used odd" ? 0.65 : 1;
    context.fillStyle = colors[kind.split(" ")[0]];
    const x = (i % columns) * (width / columns);
    context.fillRect(x, Math.floor(i / columns) * (height / rows), width / columns - 1, size - 1);
  }
  context.globalAlpha = 1;
}

/** Draw the latest steps of an engine: their height is their time, the blue part is for prompts. */
export function drawSteps(canvas, steps) {
  const { context, width, height } = prepare(canvas, canvas.clientHeight);
  const bar = Math.max(2, Math.floor(width / 100));
  const shown = steps.slice(-Math.floor(width / bar));
  const longest = Math.max(...shown.map((step) => step.ms), 0.001);
  shown.forEach((step, i) => {
    const whole = Math.max(1, (height * step.ms) / longest);
    const tokens = step.num_rows + step.num_prefill_tokens;
    const prompt = tokens ? (whole * step.num_prefill_tokens) / tokens : 0;
    const x = width - (shown.length - i) * bar;
    context.fillStyle = colors.decode;
    context.fillRect(x, height - whole, bar - 1, whole);
    context.fillStyle = colors.prefill;
    context.fillRect(x, height - whole, bar - 1, prompt);
  });
}

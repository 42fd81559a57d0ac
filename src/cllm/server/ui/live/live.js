// The page of the live view: what the server computes, now or at a time in the last five minutes.

import { keepKey } from "../server.js";
import { drawBars, drawCells, drawRates, drawSteps, readColors } from "./drawing.js";
import { History, listSequences, SECONDS } from "./history.js";
import { describe, describeReplica, describeShortly, seconds, shorten } from "./sentences.js";
import { watch } from "./stream.js";

const FRAME = 1000 / 31; // milliseconds between two drawings
const MAX_ROWS = 128;
const STAYS = 3; // seconds for which a request that has ended is still shown

const history = new History();
const get = (id) => document.getElementById(id);
const [bars, names] = [get("bars"), get("names")];

let arrived = 0; // when the latest snapshot came, by performance.now()
let stoppedAt = null; // the time that is shown while paused
let shown = null; // the snapshot that the texts describe
let selected = ""; // a sequence
let tracks = [];
let drawn = -Infinity;
let hasChanged = true;

/** Return the time that is shown, in seconds since 1970 by the server's clock. */
function currentTime() {
  if (stoppedAt !== null) return stoppedAt;
  const latest = history.snapshots.at(-1);
  return latest ? latest.at + Math.min(1.5, (performance.now() - arrived) / 1000) : 0;
}

/** Make an element with a class and texts or elements within. */
function make(name, className, ...children) {
  const element = document.createElement(name);
  if (className) element.className = className;
  element.append(...children);
  return element;
}

/** Change a text only if it is another one, which saves layout. */
function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

/** Let a list have as many children as there are entries; update each one. */
function fill(list, entries, create, update) {
  while (list.children.length > entries.length) list.lastChild.remove();
  while (list.children.length < entries.length) list.append(create());
  entries.forEach((entry, i) => update(list.children[i], entry));
}

// --- texts ---------------------------------------------------------------------------------------

const milliseconds = (value) => `${(1000 * value).toPrecision(3)} ms`;
const sum = (values) => values.reduce((total, value) => total + value, 0);

function showSummary(snapshot) {
  const { models, last_minute: last } = snapshot;
  const sequences = listSequences(snapshot);
  const count = (...phases) => sequences.filter((one) => phases.includes(one.phase)).length;
  const facts = {
    "running": `${count("prefill", "decode")}`,
    "queued": `${count("queued")}`,
    "parked": `${count("parked")}`,
    "output tokens/s": sum(models.map((model) => model.output_tokens_per_s)).toFixed(0),
    "prompt tokens/s": sum(models.map((model) => model.prompt_tokens_per_s)).toFixed(0),
    "first token, median": last.ttft.length ? seconds(last.ttft[0]) : "–",
    "first token, 99 %": last.ttft.length ? seconds(last.ttft[2]) : "–",
    "between tokens, median": last.itl.length ? milliseconds(last.itl[0]) : "–",
    "between tokens, 99 %": last.itl.length ? milliseconds(last.itl[2]) : "–",
    "ended in a minute": `${last.num_requests}`,
    "failed in a minute": `${last.num_failed}`,
  };
  fill(
    get("summary"),
    Object.entries(facts),
    () => make("div", "", make("dt"), make("dd")),
    (element, [name, value]) => {
      setText(element.firstChild, name);
      setText(element.lastChild, value);
    },
  );
}

function showRequests(snapshot) {
  const sequences = listSequences(snapshot).slice(0, MAX_ROWS);
  const present = new Set(sequences.map((one) => one.name));
  const rows = sequences.map((sequence) => ({ sequence, hasEnded: false }));
  for (const track of tracks) {
    if (present.has(track.name) || snapshot.at - track.last > STAYS) continue;
    const state = history.findState(track.name, snapshot.at);
    if (state) rows.push({ sequence: state.sequence, hasEnded: true });
  }
  rows.sort((a, b) => compareReplicas(a, b) || firstSeen(a) - firstSeen(b));
  tracks = rows.map(({ sequence }) => history.track(sequence.name)).filter(Boolean);
  fill(names, rows, createRow, updateRow);
  get("none").hidden = rows.length > 0;
}

const compareReplicas = (a, b) =>
  (a.sequence.replica ?? "").localeCompare(b.sequence.replica ?? "");
const firstSeen = ({ sequence }) => history.track(sequence.name)?.first ?? 0;

function createRow() {
  const button = make("button", "", make("span"), make("span", "soft"));
  button.type = "button";
  button.addEventListener("click", () => select(button.dataset.name));
  return make("li", "", button);
}

function updateRow(item, { sequence, hasEnded }) {
  const button = item.firstChild;
  button.dataset.name = sequence.name;
  button.setAttribute("aria-pressed", `${sequence.name === selected}`);
  const facts = [shorten(sequence.name), sequence.key, sequence.replica].filter(Boolean);
  setText(button.firstChild, facts.join(" · "));
  setText(button.lastChild, hasEnded ? "has ended" : describeShortly(sequence));
}

function select(name) {
  selected = name === selected ? "" : name;
  refresh();
}

function showDetail(time) {
  const detail = get("detail");
  const state = selected && history.findState(selected, time);
  detail.hidden = !state;
  if (!state) return;
  const { sequence, hasEnded, journey } = state;
  setText(detail.querySelector("h2"), `Request ${sequence.name}`);
  const end = hasEnded ? " It has ended or left since." : "";
  setText(detail.querySelector("p"), describe(sequence) + end);
  const facts = {
    Account: `${sequence.key || "none"}, class ${sequence.priority}`,
    Age: seconds(sequence.age),
    Prompt: `${sequence.num_prompt_tokens} tokens, ${sequence.num_cached_tokens} from the cache`,
    Output: `${sequence.num_output_tokens} tokens`,
    Cells: `${sequence.num_cells}, ${sequence.num_shared_cells} of them shared`,
    Parked: sequence.num_parked === 1 ? "once" : `${sequence.num_parked} times`,
    Timeline: describeTimeline(sequence.name, time),
    ...(sequence.replica && { Replica: sequence.replica }),
    ...(journey && { "Sent more than once": journey.join("; ") }),
  };
  const prompt = findPrompt(sequence.name, state.at);
  if (prompt) facts["End of the prompt"] = prompt;
  fill(
    detail.querySelector("dl"),
    Object.entries(facts).flat().map((text, i) => ({ text, isName: i % 2 === 0 })),
    () => make(detail.querySelector("dl").children.length % 2 ? "dd" : "dt"),
    (element, { text }) => setText(element, text),
  );
}

/** Return the end of a prompt; undefined unless the server shows prompts. */
function findPrompt(name, time) {
  const id = name.replace(/\.\d+$/, "");
  const engines = history.find(time).models.flatMap((model) => model.engines);
  return engines.map(({ prompts }) => prompts?.[id]).find(Boolean);
}

function describeTimeline(name, time) {
  const track = history.track(name);
  if (!track) return "";
  return track.segments
    .filter(({ from }) => from <= time)
    .map(({ phase, from, to }) => `${phase} ${seconds(Math.min(to, time) - from)}`)
    .join(", ");
}

function showEngines(snapshot, steps) {
  const engines = snapshot.models.flatMap((model) =>
    model.engines.map((engine) => ({ model, engine })),
  );
  fill(get("engines"), engines, createEngine, (element, { model, engine }) => {
    const [title, cells, facts, bars, stages] = element.children;
    const state = engine.is_ready
      ? "ready"
      : `not ready, expected in ${seconds(engine.seconds_until_ready)}`;
    const restarts = engine.num_restarts ? `, restarts: ${engine.num_restarts}` : "";
    const name = `${nameModel(model)}, engine ${engine.number}`;
    setText(title, `${name}: ${state}${restarts}`);
    setText(
      facts,
      `${engine.num_cells_held} of ${engine.num_cells} cells used, ${engine.num_cells_idle} ` +
        `cached, ${engine.num_cells_shared} saved by sharing; ${engine.num_running} running, ` +
        `${engine.num_waiting} waiting, ${engine.num_seq_ids} places`,
    );
    cells.setAttribute("aria-label", `Cells of ${name}`);
    bars.setAttribute("aria-label", `Steps of ${name}`);
    const latest = engine.steps.at(-1);
    const parts = Object.entries(engine.stage_ms).filter(([, ms]) => ms >= 0.005);
    const step = latest
      ? `Last step: ${latest.num_rows} rows, ${latest.num_prefill_tokens} prompt tokens, ` +
        `${latest.ms} ms. `
      : "No step yet. ";
    const mean = parts.map(([name, ms]) => `${name} ${ms.toFixed(2)}`).join(", ");
    setText(stages, step + (mean && `Mean ms by stage: ${mean}.`));
    drawCells(cells, engine);
    drawSteps(bars, steps(model, engine));
  });
}

const nameModel = (model) => (model.replica ? `${model.replica}: ${model.name}` : model.name);

function createEngine() {
  const cells = make("canvas", "cells");
  const bars = make("canvas", "steps");
  for (const canvas of [cells, bars]) canvas.setAttribute("role", "img");
  return make("div", "engine", make("p"), cells, make("p", "soft"), bars, make("p", "soft"));
}

/** Return the steps of an engine in the snapshots up to a time. */
function collectSteps(time) {
  return (model, engine) => {
    const found = [];
    for (const snapshot of history.snapshots) {
      if (snapshot.at > time) break;
      if (snapshot.at < time - 20) continue;
      const own = snapshot.models
        .find((one) => one.name === model.name && one.replica === model.replica)
        ?.engines.find((one) => one.number === engine.number);
      for (const step of own?.steps ?? []) {
        if (step.number > (found.at(-1)?.number ?? 0)) found.push(step);
      }
    }
    return found;
  };
}

function showTable(id, rows) {
  fill(
    get(id).tBodies[0],
    rows,
    () => make("tr"),
    (line, cells) =>
      fill(
        line,
        cells,
        () => make("td"),
        (cell, text) => setText(cell, `${text}`),
      ),
  );
}

function showTables(snapshot) {
  const replicas = snapshot.replicas ?? [];
  get("replicas").closest("section").hidden = replicas.length === 0;
  showTable(
    "replicas",
    replicas.map((one) => [one.name, describeReplica(one), one.num_requests]),
  );
  const queue = snapshot.models.flatMap((model) => model.queue.map((one) => ({ model, one })));
  showTable(
    "queue",
    queue.map(({ model, one }) => [
      model.replica ? `${model.replica}: ${one.priority}` : one.priority,
      one.key || "none",
      one.num_requests,
      one.num_tokens,
    ]),
  );
  showTable(
    "models",
    snapshot.models.map((model) => [
      nameModel(model),
      model.status === "loading"
        ? `loading, ${Math.round(100 * model.loaded_share)} %`
        : model.status,
      model.num_bytes ? `${(model.num_bytes / 1e9).toFixed(2)} GB` : "–",
      model.num_requests,
    ]),
  );
}

// --- time ----------------------------------------------------------------------------------------

function refresh() {
  const time = currentTime();
  const snapshot = history.find(time);
  if (!snapshot) return;
  shown = snapshot;
  hasChanged = true;
  showSummary(snapshot);
  showRequests(snapshot);
  showDetail(time);
  showEngines(snapshot, collectSteps(time));
  showTables(snapshot);
  drawRates(get("rates"), history.snapshots, time, SECONDS);
  const past = Math.round(history.snapshots.at(-1).at - time);
  const clock = new Date(1000 * time).toLocaleTimeString();
  setText(get("when"), stoppedAt === null ? "now" : `${clock}, ${past} s ago`);
}

function draw(now) {
  requestAnimationFrame(draw);
  if (now - drawn < FRAME - 4 || (stoppedAt !== null && !hasChanged)) return;
  drawn = now;
  hasChanged = false;
  if (shown) drawBars(bars, tracks, currentTime());
}

function stopAt(time) {
  stoppedAt = time;
  get("pause").setAttribute("aria-pressed", `${time !== null}`);
  setText(get("pause"), time === null ? "Pause" : "Continue");
  if (time === null) get("back").value = "0";
  tracks = [];
  refresh();
}

get("pause").addEventListener("click", () => stopAt(stoppedAt === null ? currentTime() : null));
get("back").addEventListener("input", (event) => {
  const latest = history.snapshots.at(-1);
  const first = history.snapshots[0];
  if (latest) stopAt(Math.max(first.at, latest.at + Number(event.target.value)));
});
get("detail").querySelector("button").addEventListener("click", () => select(selected));
get("export").addEventListener("click", () => {
  const content = { format: "cllm-live", version: 1, snapshots: history.snapshots };
  const url = URL.createObjectURL(new Blob([JSON.stringify(content)], { type: "application/json" }));
  const link = make("a");
  link.href = url;
  link.download = "cllm-live.json";
  link.click();
  URL.revokeObjectURL(url);
});
window.addEventListener("resize", refresh);

// --- connection ----------------------------------------------------------------------------------

function showState(text, isFault) {
  setText(get("state"), text);
  get("state").classList.toggle("fault", isFault);
}

function connect() {
  watch({
    onSnapshot(snapshot) {
      history.add(snapshot);
      arrived = performance.now();
      get("bench").hidden = !snapshot.has_bench;
      const ready = snapshot.is_ready ? "Ready" : "Not ready";
      const state = snapshot.is_draining ? "Shuts down after its requests" : ready;
      showState(`${state}, version ${snapshot.version}`, false);
      readColors();
      if (stoppedAt === null) refresh();
    },
    onState: (text) => showState(text, true),
    onKey(text) {
      showState(text, true);
      get("key").hidden = false;
    },
  });
}

get("key").addEventListener("submit", (event) => {
  event.preventDefault();
  const field = get("key").querySelector("input");
  keepKey(field.value, false);
  field.value = "";
  get("key").hidden = true;
  connect();
});

connect();
requestAnimationFrame(draw);

// The form of a new run.

import { html, Icon, useState } from "../view.js";

/** What can be sent, and which sizes it has: words of a prompt, or a scale of the usual sizes. */
const WORKLOADS = {
  words: "Random words, all prompts of one size.",
  chat: "Random words, with lengths that vary as those of chats, around the given ones.",
  "shared-prefix": "Random words, of which the prompts share the first three quarters.",
  "multi-turn": "Conversations of 4 turns, each of which sends all earlier ones.",
  "long-prefill": "Random words; every fifth prompt is 25 times as long.",
  "cancel-storm": "Random words; every second client leaves before the end.",
  agents: "Agents that share a system prompt of 2,000 tokens, with 6 turns each.",
  rag: "Instructions of 500 tokens, one of 12 documents of 1,500 tokens, and a question.",
  "long-beside-short": "A prompt of 3,000 tokens, alone and then beside streams.",
  phases: "Short prompts, one long one among them, a shared beginning, mixed lengths.",
};
const SCALED = ["agents", "rag", "long-beside-short", "phases"];

/** Calls onStart with the body of POST /bench/run. */
export function Plan({ models, isBusy, onStart }) {
  const [workload, setWorkload] = useState("words");
  const isScaled = SCALED.includes(workload);
  const start = (event) => {
    event.preventDefault();
    const plan = { workload };
    for (const [name, value] of new FormData(event.target)) {
      if (value === "") continue;
      plan[name] = ["model", "note", "workload"].includes(name) ? value : Number(value);
    }
    onStart(plan);
  };
  return html`<form class="fields" onSubmit=${start}>
    <label>
      <span>Model</span>
      <select name="model">
        ${models.map(({ id }) => html`<option key=${id}>${id}</option>`)}
      </select>
    </label>
    <label>
      <span>Workload</span>
      <select
        name="workload"
        aria-describedby="what"
        value=${workload}
        onChange=${(event) => setWorkload(event.target.value)}
      >
        ${Object.keys(WORKLOADS).map((name) => html`<option key=${name}>${name}</option>`)}
      </select>
    </label>
    <p id="what" class="soft wide">${WORKLOADS[workload]}</p>
    <${NumberField} name="concurrency" label="Clients" max="64" placeholder="8" />
    <${NumberField} name="requests" label="Requests" max="5000" placeholder="as the workload has" />
    <${NumberField} name="seconds" label="Seconds, at most" max="600" placeholder="600" />
    ${
      isScaled
        ? html`<${NumberField}
            name="scale"
            label="Scale of prompts"
            min="0.01"
            max="1"
            step="any"
            placeholder="1"
          />`
        : html`<${NumberField}
            name="prompt_words"
            label="Words of a prompt"
            max="8192"
            placeholder="64"
          />`
    }
    <${NumberField} name="max_tokens" label="Tokens of an answer" max="4096" placeholder="64" />
    <label><span>Note</span><input name="note" maxlength="100" autocomplete="off" /></label>
    <div class="wide">
      <button type="submit" class="main" disabled=${isBusy}><${Icon} name="play" />Start</button>
      <span class="soft">Other clients go first: the run has the class batch.</span>
    </div>
  </form>`;
}

const NumberField = ({ name, label, ...rest }) =>
  html`<label key=${name}>
    <span>${label}</span>
    <input type="number" name=${name} min="1" step="1" inputmode="decimal" ...${rest} />
  </label>`;

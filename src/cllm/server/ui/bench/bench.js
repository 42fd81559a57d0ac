// The page of load runs: start one, follow it, and compare the reports.

import { getJson, keepKey, readEvents, request, ServerError } from "../server.js";
import { classes, html, Icon, render, useEffect, useRef, useState } from "../view.js";
import { Plan } from "./plan.js";
import { Reports } from "./reports.js";
import { Comparison, Report } from "./results.js";
import { Run } from "./run.js";

const RETRY = 2000; // milliseconds

function App() {
  const [run, setRun] = useState(null); // the run that goes on or has ended last
  const [rates, setRates] = useState([]); // of the run so far: { seconds, rate }
  const [reports, setReports] = useState(null); // null: not known yet
  const [models, setModels] = useState([]);
  const [chosen, setChosen] = useState([]); // ids of one or two reports
  const [fault, setFault] = useState(null);
  const [needsKey, setNeedsKey] = useState(false);
  const following = useRef(false);

  function report(error) {
    if (!(error instanceof ServerError)) throw error;
    setFault(error.message);
    setNeedsKey(error.status === 401 || error.code === "admin_required");
  }

  /** Do some work, and show its error, if there is one. */
  async function attempt(work) {
    setFault(null);
    try {
      await work();
    } catch (error) {
      report(error);
    }
  }

  async function loadReports() {
    setReports((await getJson("bench/reports")).data);
  }

  const load = () =>
    attempt(async () => {
      await loadReports();
      setNeedsKey(false);
      setModels((await getJson("v1/models")).data.filter(({ task }) => task !== "embedding"));
      const latest = (await getJson("bench/run")).run;
      setRun(latest);
      if (latest?.status === "running") follow();
    });

  /** Show a run until it has ended, also if the connection is lost meanwhile. */
  async function follow() {
    if (following.current) return;
    following.current = true;
    let last = null;
    setRates([]);
    do {
      try {
        for await (const data of readEvents(await request("bench/run/events"))) {
          const before = last?.progress ?? { seconds: 0, output_tokens: 0 };
          last = JSON.parse(data);
          setRun(last);
          const { seconds, output_tokens } = last.progress;
          if (seconds > before.seconds) {
            const rate = (output_tokens - before.output_tokens) / (seconds - before.seconds);
            setRates((rates) => [...rates, { seconds, rate: Math.max(0, rate) }]);
          }
        }
        setFault(null);
      } catch (error) {
        if (error.status === 401 || error.status === 403) {
          report(error);
          break;
        }
        setFault("The connection is lost. Connecting again.");
        await new Promise((resolve) => setTimeout(resolve, RETRY));
      }
    } while (last?.status === "running" && (await isRunning()));
    following.current = false;
    if (last?.report) setChosen([last.report]);
    attempt(loadReports);
  }

  /** Return whether a run goes on; true if the server cannot be asked. */
  async function isRunning() {
    try {
      const latest = (await getJson("bench/run")).run;
      setRun(latest);
      return latest?.status === "running";
    } catch {
      return true;
    }
  }

  const actions = {
    start: (plan) =>
      attempt(async () => {
        try {
          setRun(await getJson("bench/run", plan));
        } catch (error) {
          if (error.code === "conflict") follow();
          throw error;
        }
        follow();
      }),
    cancel: () =>
      attempt(async () => {
        const response = await request("bench/run", { method: "DELETE" });
        setRun((await response.json()).run);
      }),
    upload: (file) =>
      attempt(async () => {
        let body;
        try {
          body = JSON.parse(await file.text());
        } catch {
          throw new ServerError(`${file.name} is not a report: it has no valid JSON.`);
        }
        const { id } = await getJson("bench/reports", body);
        await loadReports();
        setChosen([id]);
      }),
    remove: (id) =>
      attempt(async () => {
        await request(`bench/reports/${id}`, { method: "DELETE" });
        setChosen((ids) => ids.filter((one) => one !== id));
        await loadReports();
      }),
    /** Choose a report, besides the one that was chosen last, or no longer. */
    choose: (id) =>
      setChosen((ids) =>
        ids.includes(id) ? ids.filter((one) => one !== id) : [...ids.slice(-1), id],
      ),
  };

  useEffect(() => {
    load();
  }, []);

  const isBusy = run?.status === "running";
  const known = new Map((reports ?? []).map((one) => [one.id, one]));
  const [before, after] = chosen.filter((id) => known.has(id)).toSorted();
  return html`
    <header>
      <h1>Load runs</h1>
      <nav aria-label="Other pages"><a href="live">Live</a><a href="./">Chat</a></nav>
    </header>
    <main>
      ${fault && html`<p class="fault notice" role="alert">${fault}</p>`}
      ${needsKey && html`<${KeyForm} onKey=${load} />`}
      ${
        reports &&
        html`
          <section class="plan">
            <h2>New run</h2>
            <${Plan} models=${models} isBusy=${isBusy} onStart=${actions.start} />
          </section>
          ${run && html`<${Run} run=${run} rates=${rates} onCancel=${actions.cancel} />`}
          <${Reports} reports=${reports} chosen=${chosen} actions=${actions} />
          ${before && !after && html`<${Report} key=${before} entry=${known.get(before)} />`}
          ${
            after &&
            html`<${Comparison}
              key=${`${before} ${after}`}
              before=${known.get(before)}
              after=${known.get(after)}
            />`
          }
        `
      }
    </main>
  `;
}

function KeyForm({ onKey }) {
  const field = useRef();
  const send = (event) => {
    event.preventDefault();
    keepKey(field.current.value, false);
    onKey();
  };
  return html`<form class="key" onSubmit=${send}>
    <label
      >Key of an administrator
      <input type="password" autocomplete="off" required ref=${field}
    /></label>
    <button type="submit">Open</button>
  </form>`;
}

render(html`<${App} />`, document.body);

// The page: its views, the open conversation, and the state that all parts share.

import { Chat, isRunning, stop } from "./chat.js";
import { addMissing, makeConversation } from "./conversation.js";
import { isLoaded, Models } from "./models.js";
import { getJson, isKeyRemembered, keepKey, listModels, readKey, ServerError } from "./server.js";
import { Dialog, Settings } from "./settings.js";
import { Sidebar } from "./sidebar.js";
import * as store from "./store.js";
import { html, render, useEffect, useReducer, useRef, useState } from "./view.js";

const SETTINGS = "cllm-settings"; // the settings for the next conversation
const MODELS = "#models"; // the address of the models view; all others are ids of conversations

function readSettings() {
  try {
    return JSON.parse(localStorage.getItem(SETTINGS)) ?? {};
  } catch {
    return {};
  }
}

function App() {
  const [, draw] = useReducer((count) => count + 1, 0);
  const [all, setAll] = useState([]); // the stored conversations, the latest first
  const [current, setCurrent] = useState(() => makeConversation(readSettings()));
  const [view, setView] = useState("");
  const [models, setModels] = useState([]);
  const [defaults, setDefaults] = useState({});
  const [dialog, setDialog] = useState("");
  const [notice, setNotice] = useState(null); // has a text, and perhaps undo, a function
  const [isListOpen, setListOpen] = useState(false);
  const conversations = useRef(all);
  conversations.current = all;
  const shown = useRef();
  shown.current = current;

  const loaded = models.find(({ id }) => id === current.settings.model) ?? models[0];
  const model = loaded?.id ?? "";

  async function readModels() {
    try {
      setModels(await listModels());
      setNotice((shown) => (shown?.isOfServer ? null : shown));
    } catch (error) {
      report(error);
    }
  }

  function report(error) {
    const isOfKey = error.status === 401;
    setNotice({ text: error.message, isOfServer: error instanceof ServerError, isOfKey });
    if (isOfKey) setDialog("key");
  }

  async function save(conversation) {
    if (conversation.isRemoved) return; // it was deleted while its answer was generated
    if (!location.hash && conversation === shown.current) {
      history.replaceState(null, "", `#${conversation.id}`);
    }
    const others = conversations.current.filter(({ id }) => id !== conversation.id);
    conversations.current = [conversation, ...others].sort((a, b) => b.updated - a.updated);
    setAll(conversations.current);
    draw();
    try {
      await store.save(conversation);
    } catch (error) {
      setNotice({ text: `The browser did not store the conversation: ${error.message}` });
    }
  }

  function followAddress() {
    const name = location.hash;
    setView(name === MODELS ? name : "");
    setListOpen(false);
    if (name === MODELS) return;
    const found = conversations.current.find(({ id }) => `#${id}` === name);
    if (!found) history.replaceState(null, "", location.pathname + location.search);
    // a conversation without messages is not stored
    if (found) setCurrent(found);
    else if (shown.current.messages.length) setCurrent(makeConversation(readSettings()));
  }

  function open(conversation) {
    setCurrent(conversation);
    setView("");
    setListOpen(false);
    history.pushState(null, "", `#${conversation.id}`);
  }

  const startNew = () => open(makeConversation(readSettings()));

  async function remove(conversation) {
    conversation.isRemoved = true;
    stop(conversation);
    setAll(conversations.current.filter(({ id }) => id !== conversation.id));
    if (conversation === current) startNew();
    await store.remove(conversation.id);
    const undo = () => {
      conversation.isRemoved = false;
      setNotice(null);
      save(conversation);
    };
    setNotice({ text: "The conversation was deleted.", undo });
  }

  function changeSettings(settings) {
    current.settings = settings;
    try {
      localStorage.setItem(SETTINGS, JSON.stringify(settings));
    } catch (error) {
      setNotice({ text: `The browser did not store the settings: ${error.message}` });
    }
    if (current.messages.length) save(current);
    else draw();
  }

  useEffect(() => {
    store.loadAll().then(
      (stored) => {
        // the user may have sent a message before the stored conversations were read
        const made = conversations.current;
        const others = stored.filter(({ id }) => !made.some((one) => one.id === id));
        setAll((conversations.current = [...made, ...others]));
        followAddress();
      },
      () => setNotice({ text: "This browser does not store conversations." }),
    );
    readModels();
    addEventListener("popstate", followAddress);
    addEventListener("hashchange", followAddress);
    addEventListener("focus", readModels);
    return store.watch((id, changed) => {
      const old = conversations.current.find((one) => one.id === id);
      if (old && isRunning(old)) return changed && addMissing(old, changed);
      const others = conversations.current.filter((one) => one.id !== id);
      const now = changed ? [changed, ...others] : others;
      setAll((conversations.current = now.sort((a, b) => b.updated - a.updated)));
      setCurrent((shown) => (shown.id === id && changed ? changed : shown));
    });
  }, []);

  useEffect(() => {
    if (!loaded || !isLoaded(loaded)) return setDefaults({});
    const query = `?model=${encodeURIComponent(model)}`;
    getJson(`props${query}`).then(
      (props) => setDefaults(props.default_generation_settings.params),
      () => setDefaults({}), // the account may not use this route
    );
  }, [model, loaded && isLoaded(loaded)]);

  useEffect(() => {
    document.title = view ? "Models · cLLM" : `${current.title || "New conversation"} · cLLM`;
  });

  const events = {
    onChange: draw,
    onSave: save,
    onLoad: readModels,
    onError(error, message) {
      if (!message || error.status === 401) report(error); // others are shown in the message
    },
  };
  useEffect(() => {
    const onKeyDown = (event) => {
      if (event.key === "Escape" && !event.isComposing && !dialog) stop(current);
    };
    addEventListener("keydown", onKeyDown);
    return () => removeEventListener("keydown", onKeyDown);
  });

  return html`<div class="page">
    <${TopBar}
      ...${{ view, models, model, isListOpen, setListOpen, setDialog }}
      onModel=${(name) => changeSettings({ ...current.settings, model: name })}
    />
    <${Sidebar}
      conversations=${all}
      current=${view ? null : current}
      isOpen=${isListOpen}
      actions=${{
        open,
        startNew,
        remove,
        report: (text) => setNotice({ text }),
        rename: (conversation, title) => save(Object.assign(conversation, { title })),
        add: (imported) => imported.forEach(save),
      }}
    />
    <main>
      ${
        notice &&
        html`<div class="notice" role="alert">
          <span>${notice.text}</span>
          ${
            notice.undo &&
            html`<button type="button" onClick=${notice.undo}>Undo</button>`
          }
          <button type="button" onClick=${() => setNotice(null)}>Dismiss</button>
        </div>`
      }
      ${
        view
          ? html`<${Models}
              models=${models}
              onChat=${(name) => open(makeConversation({ ...readSettings(), model: name }))}
            />`
          : html`<${Chat}
              key=${current.id}
              conversation=${current}
              model=${loaded}
              events=${events}
            />`
      }
    </main>
    ${
      dialog === "settings" &&
      html`<${Settings}
        settings=${current.settings}
        defaults=${defaults}
        onChange=${changeSettings}
        onClose=${() => setDialog("")}
      />`
    }
    ${
      dialog === "key" &&
      html`<${KeyDialog}
        fault=${notice?.isOfKey ? notice.text : ""}
        onClose=${() => setDialog("")}
        onSave=${readModels}
      />`
    }
  </div>`;
}

function TopBar({ view, models, model, isListOpen, setListOpen, setDialog, onModel }) {
  const [theme, setTheme] = useState(window.theme.read());
  return html`<header class="top">
    <button
      type="button"
      class="narrow"
      aria-expanded=${isListOpen}
      aria-controls="sidebar"
      onClick=${() => setListOpen(!isListOpen)}
      aria-label="Conversations"
    >
      ☰
    </button>
    <h1>cLLM</h1>
    <select
      aria-label="Model"
      value=${model}
      disabled=${!models.length}
      onChange=${(event) => onModel(event.target.value)}
    >
      ${!models.length && html`<option value="">No model</option>`}
      ${models.map(
        (one) =>
          html`<option key=${one.id} value=${one.id}>
            ${one.id}${isLoaded(one) ? "" : " (not loaded)"}
          </option>`,
      )}
    </select>
    <button type="button" onClick=${() => setDialog("settings")}>Settings</button>
    <button type="button" onClick=${() => setDialog("key")}>API key</button>
    <button type="button" onClick=${() => setTheme(window.theme.switchTheme())}>
      Theme: ${theme}
    </button>
    <a href=${MODELS} aria-current=${view ? "page" : null}>Models</a>
    <a href="docs">API</a>
  </header>`;
}

function KeyDialog({ fault, onClose, onSave }) {
  const save = (event) => {
    event.preventDefault();
    const fields = new FormData(event.target);
    keepKey(fields.get("key").trim(), fields.has("remember"));
    event.target.closest("dialog").close();
    onSave();
  };
  return html`<${Dialog} title="API key" onClose=${onClose}>
    <form class="fields" onSubmit=${save}>
      <p class="wide">
        Needed only if the server has API keys. It is sent only to this server. Save an empty field
        to remove it.
      </p>
      <label class="wide">
        <span>Key</span>
        <input
          name="key"
          type="password"
          autocomplete="off"
          autofocus
          pattern="[!-~]*"
          title="letters, digits and punctuation"
          aria-invalid=${Boolean(fault)}
          defaultValue=${readKey()}
        />
        ${fault && html`<span class="fault" role="alert">${fault}</span>`}
      </label>
      <label class="check">
        <input name="remember" type="checkbox" defaultChecked=${isKeyRemembered()} />
        <span>Remember it in this browser</span>
      </label>
      <button class="main">Save</button>
    </form>
  </${Dialog}>`;
}

render(html`<${App} />`, document.body);

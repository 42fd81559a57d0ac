// The page: its views, the open conversation, and the state that all parts share.

import { Chat } from "./chat.js";
import { Completion } from "./completion.js";
import { addMissing, makeConversation, showVersion } from "./conversation.js";
import { isRunning, listRunning, stop } from "./generation.js";
import { Header } from "./header.js";
import { KeyDialog } from "./key.js";
import { isBase, isLoaded, Models } from "./models.js";
import { Search } from "./search.js";
import { getJson, listModels, ServerError } from "./server.js";
import { Settings } from "./settings.js";
import { Sidebar } from "./sidebar.js";
import * as store from "./store.js";
import {
  html,
  IconButton,
  render,
  useEffect,
  useLayoutEffect,
  useLatest,
  useReducer,
  useRef,
  useState,
} from "./view.js";

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
  const [isAdmin, setAdmin] = useState(false);
  const [defaults, setDefaults] = useState({});
  const [hasBench, setHasBench] = useState(false);
  const [dialog, setDialog] = useState("");
  const [notice, setNotice] = useState(null); // has a text, and perhaps undo, a function
  const [isListOpen, setListOpen] = useState(false);
  const [target, setTarget] = useState(null); // the message that the search has found
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

  function readRights() {
    getJson(".").then(
      ({ admin }) => setAdmin(admin === true),
      () => setAdmin(false),
    );
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
    setTarget(null);
    if (name === MODELS) return;
    const found = conversations.current.find(({ id }) => `#${id}` === name);
    if (!found) history.replaceState(null, "", location.pathname + location.search);
    // a conversation without messages is not stored
    if (found) setCurrent(found);
    else if (shown.current.messages.length) setCurrent(makeConversation(readSettings()));
  }

  function open(conversation, message = null) {
    setTarget(message);
    setCurrent(conversation);
    setView("");
    setListOpen(false);
    history.pushState(null, "", `#${conversation.id}`);
  }

  const startNew = () => open(makeConversation(readSettings()));

  /** Open a conversation at a message, or at its end if there is none. */
  function openFound(conversation, message) {
    if (message && !isRunning(conversation)) showVersion(conversation, message);
    open(conversation, message);
  }

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
    readRights();
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
      (props) => {
        setDefaults(props.default_generation_settings);
        setHasBench(props.endpoint_bench);
      },
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
  // not a moment later than what is shown, or a shortcut would find a dialog that is closed already
  useLayoutEffect(() => {
    const onKeyDown = (event) => {
      const isShortcut = (event.ctrlKey || event.metaKey) && !event.altKey;
      const key = event.key.toLowerCase();
      if (event.isComposing || dialog) return;
      if (isShortcut && key === "k" && !event.shiftKey) setDialog("search");
      else if (isShortcut && key === "o" && event.shiftKey) startNew();
      else if (event.key === "Escape") return isListOpen ? setListOpen(false) : stop(current);
      else return;
      event.preventDefault();
    };
    addEventListener("keydown", onKeyDown);
    return () => removeEventListener("keydown", onKeyDown);
  });

  const actions = useLatest({
    open,
    startNew,
    remove,
    report: (text) => setNotice({ text }),
    rename: (conversation, title) => save(Object.assign(conversation, { title })),
    add: (imported) => imported.forEach(save),
    openList: () => setListOpen(true),
    closeList: () => setListOpen(false),
    openSearch: () => setDialog("search"),
    openSettings: () => setDialog("settings"),
    openKey: () => setDialog("key"),
    chooseModel: (name) => changeSettings({ ...current.settings, model: name }),
  });
  const View = isBase(loaded) ? Completion : Chat;
  return html`<div class="page">
    <${Sidebar}
      conversations=${all}
      current=${view ? null : current}
      view=${view}
      isOpen=${isListOpen}
      running=${listRunning()}
      hasBench=${hasBench}
      isAdmin=${isAdmin}
      actions=${actions}
    />
    ${isListOpen && html`<div class="shade" onClick=${actions.closeList} />`}
    <main inert=${isListOpen}>
      <${Header} ...${{ models, model, isListOpen, actions }} />
      ${
        notice &&
        html`<div class="notice" role="alert">
          <span>${notice.text}</span>
          ${
            notice.undo &&
            html`<button type="button" onClick=${notice.undo}>Undo</button>`
          }
          <${IconButton} icon="x" label="Dismiss" onClick=${() => setNotice(null)} />
        </div>`
      }
      ${
        view
          ? html`<${Models}
              models=${models}
              onChange=${readModels}
              onChat=${(name) => open(makeConversation({ ...readSettings(), model: name }))}
            />`
          : html`<${View}
              key=${`${current.id} ${target?.id}`}
              conversation=${current}
              model=${loaded}
              context=${defaults.n_ctx}
              target=${target}
              events=${events}
            />`
      }
    </main>
    ${
      dialog === "settings" &&
      html`<${Settings}
        settings=${current.settings}
        defaults=${defaults.params ?? {}}
        onChange=${changeSettings}
        onClose=${() => setDialog("")}
      />`
    }
    ${
      dialog === "key" &&
      html`<${KeyDialog}
        fault=${notice?.isOfKey ? notice.text : ""}
        onClose=${() => setDialog("")}
        onSave=${() => {
          readModels();
          readRights();
        }}
      />`
    }
    ${
      dialog === "search" &&
      html`<${Search} conversations=${all} onOpen=${openFound} onClose=${() => setDialog("")} />`
    }
  </div>`;
}

render(html`<${App} />`, document.body);

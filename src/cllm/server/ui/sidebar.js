// The list of conversations, and what is about the whole page.

import { isRunning } from "./generation.js";
import { exportAll, importAll, toMarkdown } from "./conversation.js";
import { Menu } from "./menu.js";
import {
  classes,
  download,
  html,
  Icon,
  IconButton,
  memo,
  useEffect,
  useRef,
  useState,
} from "./view.js";

const DAY = 24 * 60 * 60 * 1000; // milliseconds
const AGES = ["Today", "Yesterday", "Last 7 days", "Last 30 days", "Older"];
const THEME_ICONS = { system: "monitor", light: "sun", dark: "moon" };

/** Return the conversations of each age that has some, as pairs of its name and a list. */
function groupByAge(conversations) {
  const today = new Date().setHours(0, 0, 0, 0);
  const begins = [today, today - DAY, today - 7 * DAY, today - 30 * DAY, -Infinity];
  const groups = AGES.map((age) => [age, []]);
  for (const one of conversations) groups[begins.findIndex((at) => one.updated >= at)][1].push(one);
  return groups.filter(([, members]) => members.length);
}

/** Return a name for the file of a conversation, without characters that file systems forbid. */
const makeFileName = (title) =>
  title.replace(/[^\p{L}\p{N}_-]+/gu, " ").trim().slice(0, 60) || "conversation";

/**
 * Lists conversations. view is the address of the view that is shown instead of one, running lists
 * those that get an answer. hasBench links to the load runs, and isAdmin to the live view. actions
 * are functions by name: open, startNew, rename, remove, add (for imported conversations),
 * openSearch, openKey, closeList and report.
 */
export const Sidebar = memo(({ conversations, current, view, isOpen, hasBench, isAdmin, actions }) => {
  const file = useRef();
  const importFile = async ({ target }) => {
    try {
      actions.add(importAll(JSON.parse(await target.files[0].text())));
    } catch (error) {
      actions.report(`The file cannot be imported: ${error.message}`);
    }
    target.value = "";
  };
  return html`<nav
    id="sidebar"
    class=${classes("sidebar", isOpen && "open")}
    aria-label="Conversations"
  >
    <div class="brand">
      <img src="ui/icon.svg" alt="" width="24" height="24" /><strong>cLLM</strong>
      <${IconButton} icon="x" label="Close the list" kind="narrow" onClick=${actions.closeList} />
    </div>
    <button type="button" class="row" onClick=${actions.startNew}>
      <${Icon} name="square-pen" />New conversation
    </button>
    <button type="button" class="row" onClick=${actions.openSearch}>
      <${Icon} name="search" /><span>Search</span><kbd>Ctrl K</kbd>
    </button>
    <div class="list">
      ${groupByAge(conversations).map(
        ([age, members]) =>
          html`<h2 key=${`${age} title`}>${age}</h2>
            <ul key=${age}>
              ${members.map(
                (one) =>
                  html`<${Entry}
                    key=${one.id}
                    conversation=${one}
                    isCurrent=${one === current}
                    actions=${actions}
                  />`,
              )}
            </ul>`,
      )}
    </div>
    <footer>
      <a class="row" href="#models" aria-current=${view ? "page" : null}>
        <${Icon} name="box" />Models
      </a>
      ${hasBench && html`<a class="row" href="bench"><${Icon} name="play" />Load runs</a>`}
      ${
        isAdmin &&
        html`<a class="row" href="live" target="_blank" rel="opener">
          <${Icon} name="activity" />Live view
        </a>`
      }
      <a class="row" href="docs"><${Icon} name="book-open" />API</a>
      <div class="tools">
        <button type="button" class="row" onClick=${actions.openKey}>
          <${Icon} name="key-round" />API key
        </button>
        <${Theme} />
        <${Menu}
          label="Import and export"
          items=${[
            { label: "Import", icon: "upload", onClick: () => file.current.click() },
            {
              label: "Export all",
              icon: "download",
              isDisabled: !conversations.length,
              onClick: () => download("conversations.json", exportAll(conversations)),
            },
          ]}
        />
        <input
          type="file"
          accept=".json,application/json"
          hidden
          ref=${file}
          onChange=${importFile}
        />
      </div>
    </footer>
  </nav>`;
});

function Theme() {
  const [theme, setTheme] = useState(window.theme.read());
  return html`<${IconButton}
    icon=${THEME_ICONS[theme]}
    label=${`Theme: ${theme}`}
    onClick=${() => setTheme(window.theme.switchTheme())}
  />`;
}

function Entry({ conversation, isCurrent, actions }) {
  const [isNaming, setNaming] = useState(false);
  const title = conversation.title || "Untitled";
  const fileName = makeFileName(conversation.title);
  if (isNaming) {
    const rename = (text) => {
      setNaming(false);
      if (text) actions.rename(conversation, text);
    };
    return html`<li><${Naming} title=${conversation.title} onEnd=${rename} /></li>`;
  }
  return html`<li class=${isCurrent && "current"}>
    <button
      type="button"
      class="title"
      title=${title}
      aria-current=${isCurrent ? "page" : null}
      onClick=${() => actions.open(conversation)}
    >
      ${title}${isRunning(conversation) ? " …" : ""}
    </button>
    <${Menu}
      label=${`Actions for ${title}`}
      items=${[
        { label: "Rename", icon: "pencil", onClick: () => setNaming(true) },
        {
          label: "Export as Markdown",
          icon: "file-text",
          onClick: () => download(`${fileName}.md`, toMarkdown(conversation), "text/markdown"),
        },
        {
          label: "Export as JSON",
          icon: "download",
          onClick: () => download(`${fileName}.json`, exportAll([conversation])),
        },
        {
          label: "Delete",
          icon: "trash-2",
          isDanger: true,
          onClick: () => actions.remove(conversation),
        },
      ]}
    />
  </li>`;
}

/** A box for a new title. onEnd gets it, or "" if there is none. */
function Naming({ title, onEnd }) {
  const box = useRef();
  useEffect(() => box.current.select(), []);
  const save = (event) => {
    event.preventDefault();
    onEnd(new FormData(event.target).get("title").trim());
  };
  const onKeyDown = (event) => {
    if (event.key !== "Escape") return;
    event.stopPropagation();
    onEnd("");
  };
  return html`<form onSubmit=${save}>
    <input
      name="title"
      aria-label="Title"
      required
      maxlength="200"
      defaultValue=${title}
      ref=${box}
      onKeyDown=${onKeyDown}
    />
    <button class="icon-only" aria-label="Save" title="Save"><${Icon} name="check" /></button>
  </form>`;
}

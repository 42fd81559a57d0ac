// The box for the next message, with its attachments.

import { Attachments, joinFiles, readFiles } from "./attachment.js";
import {
  classes,
  html,
  Icon,
  IconButton,
  isSendKey,
  useEffect,
  useReducer,
  useRef,
  useState,
} from "./view.js";

const drafts = new Map(); // unsent texts and files by the ids of their conversations
const NOTHING = { text: "", files: [] };

/**
 * onSend gets a text and files, and returns whether they were sent. figures is a short text about
 * the conversation.
 */
export function Composer({ id, isBusy, figures, onSend, onStop, onError }) {
  const [, draw] = useReducer((count) => count + 1, 0);
  const [isOver, setOver] = useState(false);
  const readDraft = () => drafts.get(id) ?? NOTHING;
  const { text, files } = readDraft();
  const change = (part) => {
    drafts.set(id, { ...readDraft(), ...part });
    draw();
  };
  const box = useRef();
  const picker = useRef();
  const canSend = Boolean(text.trim() || files.length);
  useEffect(() => box.current.focus({ preventScroll: true }), []);
  const send = (event) => {
    event.preventDefault();
    if (isBusy || !canSend) return;
    box.current.focus();
    if (onSend(text, files)) change(NOTHING);
  };
  const attach = async (chosen) => {
    try {
      const read = await readFiles(chosen);
      change({ files: joinFiles(readDraft().files, read) }); // others may have been added meanwhile
    } catch (error) {
      onError(error);
    }
    box.current?.focus();
  };
  const onKeyDown = (event) => {
    if (isSendKey(event)) send(event);
    if (event.key === "ArrowUp" && !text) {
      const edits = document.querySelectorAll(".message.user footer button.edit");
      edits[edits.length - 1]?.click();
    }
  };
  /** Attach the files that were dropped or pasted, if there are any. */
  const take = (event, { files: taken }) => {
    setOver(false);
    if (!taken.length) return;
    event.preventDefault();
    attach([...taken]);
  };
  const onDragOver = (event) => {
    if (!event.dataTransfer.types.includes("Files")) return;
    event.preventDefault();
    setOver(true);
  };
  return html`<form
    class=${classes("composer", isOver && "over")}
    onSubmit=${send}
    onDragOver=${onDragOver}
    onDragLeave=${() => setOver(false)}
    onDrop=${(event) => take(event, event.dataTransfer)}
  >
    <div class="box">
      <${Attachments}
        files=${files}
        onRemove=${(file) => change({ files: files.filter((one) => one !== file) })}
      />
      <textarea
        ref=${box}
        rows="1"
        aria-label="Message"
        dir="auto"
        placeholder="Write a message"
        value=${text}
        onInput=${(event) => change({ text: event.target.value })}
        onKeyDown=${onKeyDown}
        onPaste=${(event) => take(event, event.clipboardData)}
      />
      <div class="tools">
        <${IconButton}
          icon="paperclip"
          label="Attach text files"
          onClick=${() => picker.current.click()}
        />
        <input
          type="file"
          class="attach"
          multiple
          hidden
          ref=${picker}
          onChange=${({ target }) => {
            attach([...target.files]);
            target.value = "";
          }}
        />
        <span class="figures">${figures}</span>
        ${
          isBusy
            ? html`<${IconButton} icon="square" label="Stop" kind="main" onClick=${onStop} />`
            : html`<button class="icon-only main" aria-label="Send" title="Send" disabled=${!canSend}>
                <${Icon} name="arrow-up" />
              </button>`
        }
      </div>
    </div>
  </form>`;
}

// Text files that the user attaches to a message. Their text is sent as part of the message.

import { classes, html, Icon, IconButton } from "./view.js";

const MAX_SIZE = 512 * 1024; // bytes of all files of a message; more does not fit into any context
const UNITS = ["bytes", "kB", "MB"];

/**
 * Return files as texts with a name and their content. Throws an Error that names the file that is
 * too large or no text.
 */
export async function readFiles(files) {
  const texts = [];
  for (const file of files) {
    if (file.size > MAX_SIZE) throw tooLarge(file);
    try {
      const content = new TextDecoder("utf-8", { fatal: true }).decode(await file.arrayBuffer());
      if (content.includes("\0")) throw new TypeError("binary");
      texts.push({ name: file.name, content });
    } catch {
      throw new Error(`${file.name} is not a text file. Only text can be attached.`);
    }
  }
  return texts;
}

/** Return both lists of texts as one. Throws an Error that names the first one for which there is no room. */
export function joinFiles(attached, added) {
  const files = [...attached, ...added];
  let size = 0;
  for (const file of files) {
    size += countBytes(file);
    if (size > MAX_SIZE) throw tooLarge(file);
  }
  return files;
}

const tooLarge = ({ name }) => new Error(`${name}: more than ${describeSize(MAX_SIZE)}.`);
const countBytes = ({ content }) => new Blob([content]).size;

function describeSize(count) {
  const power = count < 1000 ? 0 : count < 1e6 ? 1 : 2;
  return `${(count / 1000 ** power).toFixed(power === 2 ? 1 : 0)} ${UNITS[power]}`;
}

/** Shows attached texts. onRemove, if given, gets the one that the user removes. */
export function Attachments({ files, onRemove }) {
  if (!files.length) return null;
  return html`<ul class=${classes("attachments", onRemove && "draft")}>
    ${files.map(
      (file, i) =>
        html`<li key=${i}>
          ${
            onRemove
              ? html`<span class="file" title=${file.name}><${FileName} file=${file} /></span>
                  <${IconButton}
                    icon="x"
                    label=${`Remove ${file.name}`}
                    onClick=${() => onRemove(file)}
                  />`
              : html`<details>
                  <summary class="file" title=${file.name}><${FileName} file=${file} /></summary>
                  <pre tabindex="0">${file.content}</pre>
                </details>`
          }
        </li>`,
    )}
  </ul>`;
}

const FileName = ({ file }) =>
  html`<${Icon} name="file-text" /><span class="name">${file.name}</span>
    <span class="size">${describeSize(countBytes(file))}</span>`;

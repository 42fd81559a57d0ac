// Markdown of a model as safe HTML. HTML in the text is shown as text, images become links, and the
// result is sanitized again. Then KaTeX draws the formulas.

import { drawFormulas } from "./formula.js";
import hljs from "./vendor/highlight.js";
import DOMPurify from "./vendor/dompurify.js";
import bash from "./vendor/languages/bash.js";
import c from "./vendor/languages/c.js";
import cpp from "./vendor/languages/cpp.js";
import csharp from "./vendor/languages/csharp.js";
import css from "./vendor/languages/css.js";
import diff from "./vendor/languages/diff.js";
import go from "./vendor/languages/go.js";
import ini from "./vendor/languages/ini.js";
import java from "./vendor/languages/java.js";
import javascript from "./vendor/languages/javascript.js";
import json from "./vendor/languages/json.js";
import markdown from "./vendor/languages/markdown.js";
import php from "./vendor/languages/php.js";
import python from "./vendor/languages/python.js";
import ruby from "./vendor/languages/ruby.js";
import rust from "./vendor/languages/rust.js";
import sql from "./vendor/languages/sql.js";
import typescript from "./vendor/languages/typescript.js";
import xml from "./vendor/languages/xml.js";
import yaml from "./vendor/languages/yaml.js";
import { Marked, Tokenizer } from "./vendor/marked.js";
import { copyText, html, useLayoutEffect, useMemo, useRef } from "./view.js";

const LANGUAGES = { bash, c, cpp, csharp, css, diff, go, ini, java, javascript, json, markdown };
Object.assign(LANGUAGES, { php, python, ruby, rust, sql, typescript, xml, yaml });
for (const [name, grammar] of Object.entries(LANGUAGES)) hljs.registerLanguage(name, grammar);

const MAX_MARKDOWN = 200_000; // characters; longer text is shown as it is
const MAX_HIGHLIGHTED = 20_000; // characters; longer code is shown without colours
const PLAIN_ATTRIBUTES = "align class rel start tabindex target title type".split(" ");
const SAFE = {
  ALLOWED_TAGS: (
    "a blockquote br button code del div em h3 hr li ol p pre span strong " +
    "table tbody td th thead tr ul"
  ).split(" "),
  ALLOWED_ATTR: ["href", ...PLAIN_ATTRIBUTES],
  ADD_URI_SAFE_ATTR: PLAIN_ATTRIBUTES,
  ALLOWED_URI_REGEXP: /^(?:https?|mailto):/i,
  ALLOW_ARIA_ATTR: false,
  ALLOW_DATA_ATTR: false,
  RETURN_TRUSTED_TYPE: true,
};

const ESCAPES = { "&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;", "'": "&#39;" };
const escape = (text) => text.replace(/[&<>"']/g, (mark) => ESCAPES[mark]);

function highlight(text, language) {
  const known = hljs.getLanguage(language) && text.length <= MAX_HIGHLIGHTED;
  return known ? hljs.highlight(text, { language }).value : escape(text);
}

const renderLink = (href, shown, title) =>
  `<a href="${escape(href)}" target="_blank" rel="noopener noreferrer"` +
  `${title ? ` title="${escape(title)}"` : ""}>${shown}</a>`;

const showAsWritten = (text) => `<p class="verbatim">${escape(text.trim())}</p>`;

const FORMULA =
  /^(?:\$\$[^]{1,2000}?\$\$|\\\([^]{1,2000}?\\\)|\\\[[^]{1,2000}?\\\]|\$(?![\s$])[^$\n]*[^\s\\$]\$(?!\w))/;
const FORMULA_LINES = /^ {0,3}(\$\$|\\\[|\\begin\{\w+\*?\})(?:[^\n]*\n)*?/;
const CLOSING = { "$$": "$$", "\\[": "\\]" };

/** A formula on lines of its own. It ends with its mark or before an empty line. */
const formulaLines = {
  name: "formulaLines",
  level: "block",
  start: (src) => src.match(/^ {0,3}(?:\$\$|\\\[|\\begin\{)/m)?.index,
  tokenizer(src) {
    const opening = FORMULA_LINES.exec(src)?.[1];
    if (!opening) return undefined;
    const closing = CLOSING[opening] ?? opening.replace("begin", "end");
    const paragraph = src.slice(0, src.search(/\n[ \t]*(?:\n|$)|$/));
    const at = paragraph.indexOf(closing, src.indexOf(opening) + opening.length);
    const end = at < 0 ? -1 : paragraph.indexOf("\n", at);
    const raw = end < 0 ? paragraph : paragraph.slice(0, end);
    const isInSentence =
      at >= 0 && !raw.includes("\n") && /[^ .,;]/.test(raw.slice(at + closing.length));
    return isInSentence ? undefined : { type: "formulaLines", raw, isWhole: at >= 0 };
  },
  renderer: ({ raw, isWhole }) =>
    isWhole ? `<p class="formula verbatim">${escape(raw.trim())}</p>` : showAsWritten(raw),
};

const formula = {
  name: "formula",
  level: "inline",
  start: (src) => src.match(/[$\\]/)?.index,
  tokenizer(src) {
    const raw = FORMULA.exec(src)?.[0];
    return raw && { type: "formula", raw };
  },
  renderer: ({ raw }) => `<span class="formula">${escape(raw)}</span>`,
};

const UNDIVIDED = /(`+)(?!`)[^\n]{1,500}?[^`\n]?\1(?!`)|\\\([^\n]{1,500}?\\\)/g;

/** Escape each | of a row that is in code or in a formula, or that follows the last column. */
function keepPipes(row, columns) {
  const kept = row.replace(UNDIVIDED, (part) => part.replace(/(?<!\\)\|/g, "\\|"));
  const last = columns + (kept.trimStart().startsWith("|") ? 0 : -1);
  let count = 0;
  return kept.replace(/(?<!\\)\|/g, (pipe, at) =>
    count++ < last || !kept.slice(at + 1).trim() ? pipe : "\\|",
  );
}

/** Read a table without dropping any of its cells. */
function readTable(src) {
  const head = src.slice(0, src.search(/\n[ \t]*(?:\n|$)|$/));
  const columns = /^[^\n]*\n([ |:-]+)(?:\n|$)/.exec(head)?.[1].match(/-+/g)?.length;
  if (!columns) return false;
  const kept = head.split("\n").map((row, i) => (i === 1 ? row : keepPipes(row, columns)));
  const token = Tokenizer.prototype.table.call(this, kept.join("\n") + src.slice(head.length));
  if (!token) return undefined;
  const count = token.raw.split("\n").length;
  token.raw = src.split("\n", count).join("\n");
  return token;
}

// false: parse as usual; undefined: this is not such a token
const tokenizer = {
  autolink: (src) => (/^<(?:https?:|mailto:)/i.test(src) ? false : undefined),
  escape: (src) => (/^\\[*_`~<$#]/.test(src) ? false : undefined),
  br: (src) => (src.startsWith("\\") ? undefined : false),
  del: (src) => (src.startsWith("~~") ? false : undefined),
  table: readTable,
};

const marked = new Marked({
  gfm: true,
  breaks: true, // lines of a poem or an address stay lines
  extensions: [formulaLines, formula],
  tokenizer,
  renderer: {
    html: ({ text, block }) => (block ? showAsWritten(text) : escape(text)),
    image: ({ href, text }) => renderLink(href, `[image: ${escape(text || href)}]`),
    link({ href, title, tokens }) {
      return renderLink(href, this.parser.parseInline(tokens), title);
    },
    // one level: an answer is below the headings of the page, and must not skip levels
    heading({ tokens, depth }) {
      return `<h3 class="depth-${depth}">${this.parser.parseInline(tokens)}</h3>`;
    },
    checkbox: ({ checked }) => (checked ? "☑ " : "☐ "),
    code({ text, lang }) {
      const language = (lang ?? "").split(/\s/)[0].toLowerCase();
      return (
        `<div class="code"><div class="code-head"><span>${escape(language)}</span>` +
        `<button type="button" class="copy">Copy</button></div>` +
        `<pre tabindex="0"><code>${highlight(text, language)}</code></pre></div>`
      );
    },
    table({ header, rows }) {
      const row = (cells, tag) =>
        `<tr>${cells
          .map(({ tokens, align }) => {
            const side = align ? ` align="${align}"` : "";
            return `<${tag}${side}>${this.parser.parseInline(tokens)}</${tag}>`;
          })
          .join("")}</tr>`;
      return (
        `<div class="table" tabindex="0"><table><thead>${row(header, "th")}</thead>` +
        `<tbody>${rows.map((cells) => row(cells, "td")).join("")}</tbody></table></div>`
      );
    },
  },
});

const renderBlock = (token) => ({
  // the target of a link, which Markdown hides, may have been meant as text
  __html: DOMPurify.sanitize(
    token.type === "def" ? showAsWritten(token.raw) : marked.parser([token]),
    SAFE,
  ),
});

/**
 * Shows a text as Markdown. While the text grows (isBusy), unchanged blocks are not rendered again,
 * so links whose targets come later become right when the text is complete. Text that is too long,
 * or nested too deeply for the parser, is shown as it is.
 */
export function Markdown({ text, isBusy }) {
  const rendered = useRef(new Map());
  const blocks = useMemo(() => {
    if (text.length > MAX_MARKDOWN) return null;
    const known = isBusy ? rendered.current : new Map();
    try {
      const tokens = marked.lexer(text).filter(({ type }) => type !== "space");
      const now = new Map(
        tokens.map((token) => [token.raw, known.get(token.raw) ?? renderBlock(token)]),
      );
      rendered.current = now;
      return tokens.map((token) => now.get(token.raw));
    } catch {
      return null;
    }
  }, [text, isBusy]);
  const box = useRef();
  useLayoutEffect(() => {
    if (blocks) drawFormulas(box.current);
  }, [blocks]);
  if (!blocks) return html`<div class="markdown plain" dir="auto">${text}</div>`;
  return html`<div class="markdown" ref=${box} onClick=${copyCode}>
    ${blocks.map((block, i) => html`<div key=${i} dir="auto" dangerouslySetInnerHTML=${block} />`)}
  </div>`;
}

async function copyCode({ target }) {
  if (!target.matches("button.copy")) return;
  await copyText(target.closest(".code").querySelector("pre").textContent);
  target.textContent = "Copied";
  setTimeout(() => (target.textContent = "Copy"), 2000);
}

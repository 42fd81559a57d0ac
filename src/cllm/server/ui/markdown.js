// Markdown of a model as safe HTML. HTML in the text is shown as text, images become links, and
// the result is sanitized again.

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
import { Marked } from "./vendor/marked.js";
import { copyText, html, useMemo, useRef } from "./view.js";

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

const marked = new Marked({
  gfm: true,
  renderer: {
    html: ({ text }) => escape(text),
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
  __html: DOMPurify.sanitize(marked.parser([token]), SAFE),
});

/**
 * Text as Markdown. While it grows (isBusy), blocks that have not changed are not rendered again;
 * links whose targets come later are right when it is complete. Text that is too long, or nested
 * too deeply for the parser, is shown as it is.
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
  if (!blocks) return html`<div class="markdown plain" dir="auto">${text}</div>`;
  return html`<div class="markdown" onClick=${copyCode}>
    ${blocks.map((block, i) => html`<div key=${i} dir="auto" dangerouslySetInnerHTML=${block} />`)}
  </div>`;
}

async function copyCode({ target }) {
  if (!target.matches("button.copy")) return;
  await copyText(target.closest(".code").querySelector("pre").textContent);
  target.textContent = "Copied";
  setTimeout(() => (target.textContent = "Copy"), 2000);
}

// The functions with which the components of the page are built.

import htm from "./vendor/htm.js";
import { useRef } from "./vendor/preact-hooks.js";
import { Component, h } from "./vendor/preact.js";

export { render } from "./vendor/preact.js";
export {
  useEffect,
  useLayoutEffect,
  useMemo,
  useReducer,
  useRef,
  useState,
} from "./vendor/preact-hooks.js";

const FRAME = 16; // milliseconds

export const html = htm.bind(h);

/**
 * Return a component like draw that is drawn again only if one of its properties has changed or
 * isBusy is true. Objects count as changed if they are other objects.
 */
export function memo(draw) {
  return class extends Component {
    shouldComponentUpdate(next) {
      const names = new Set([...Object.keys(this.props), ...Object.keys(next)]);
      return next.isBusy || [...names].some((name) => next[name] !== this.props[name]);
    }
    render(props) {
      return h(draw, props);
    }
  };
}

/** Return an object that stays the same and always has the latest functions. */
export function useLatest(functions) {
  const latest = useRef({});
  return Object.assign(latest.current, functions);
}

/** A symbol of vendor/icons.svg. It is only decoration: a text or a label says what it means. */
export const Icon = ({ name }) =>
  html`<svg class="icon" aria-hidden="true"><use href=${`ui/vendor/icons.svg#${name}`} /></svg>`;

/** A button that shows only an icon. label is its name, and its tooltip too. */
export const IconButton = ({ icon, label, kind, ...rest }) =>
  html`<button
    type="button"
    class=${classes("icon-only", kind)}
    aria-label=${label}
    title=${label}
    ...${rest}
  >
    <${Icon} name=${icon} />
  </button>`;

/** Return whether a key sends a text: Enter does, except to choose a word in an input method. */
export const isSendKey = ({ key, shiftKey, isComposing, keyCode }) =>
  key === "Enter" && !shiftKey && !isComposing && keyCode !== 229; // Safari's only sign of one

/** Join the names of classes that are not false or empty. */
export const classes = (...names) => names.filter(Boolean).join(" ");

export async function copyText(text) {
  if (navigator.clipboard) return navigator.clipboard.writeText(text);
  // pages without TLS have no clipboard, except those of this machine
  const box = document.createElement("textarea");
  box.value = text;
  document.body.append(box);
  box.select();
  document.execCommand("copy");
  box.remove();
}

/**
 * Return a function that makes paint run soon, and only once for many calls. If painting takes
 * long, it pauses three times as long between two runs, so that the page stays responsive.
 */
export function makePainter(paint) {
  let isPlanned = false;
  let isOutdated = false;
  const plan = (pause) => {
    isPlanned = true;
    setTimeout(() => {
      const begun = performance.now();
      isOutdated = false;
      paint();
      requestAnimationFrame(() =>
        setTimeout(() => {
          isPlanned = false;
          if (isOutdated) plan(3 * Math.max(0, performance.now() - begun - FRAME));
        }),
      );
    }, pause);
  };
  return () => {
    isOutdated = true;
    if (!isPlanned) plan(0);
  };
}

/** Offer a text as a file to download. */
export function download(name, text, type = "application/json") {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([text], { type }));
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 1000);
}

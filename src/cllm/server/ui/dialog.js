// A dialog: a title, a button that closes it, and what it contains.

import { html, IconButton, useLayoutEffect, useRef } from "./view.js";

/** A dialog that is open as long as it exists. A click beside it closes it. */
export function Dialog({ title, kind, onClose, children }) {
  const dialog = useRef();
  useLayoutEffect(() => dialog.current.showModal(), []);
  const onPointerDown = (event) => {
    const { left, right, top, bottom } = dialog.current.getBoundingClientRect();
    const { clientX: x, clientY: y, target } = event;
    const isInside = x >= left && x <= right && y >= top && y <= bottom;
    if (target === dialog.current && !isInside) dialog.current.close();
  };
  return html`<dialog
    ref=${dialog}
    class=${kind}
    aria-label=${title}
    onClose=${onClose}
    onPointerDown=${onPointerDown}
  >
    <header>
      <h2>${title}</h2>
      <${IconButton} icon="x" label="Close" onClick=${() => dialog.current.close()} />
    </header>
    ${children}
  </dialog>`;
}

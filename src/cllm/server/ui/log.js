// The messages of a conversation, of which only those near the visible ones are drawn.

import { html, IconButton, useLayoutEffect, useRef, useState } from "./view.js";

const STEP = 40; // messages that are drawn at first, and added when the user scrolls to them
const EARLY = 800; // pixels to the first or last drawn message at which more are drawn
const NEAR = 80; // pixels from the end within which the view follows an answer

/** Return the first and the last drawn message (excluded): the last ones, or those around target. */
function makeRange(path, target) {
  const at = target ? path.indexOf(target) : -1;
  if (at < 0) return { begin: path.length - STEP, end: Infinity };
  return { begin: at - STEP / 2, end: at + STEP };
}

/**
 * Shows the messages of path with draw, from target on if there is one, or empty if there are none.
 * The view stays at the end while messages are added and grow, unless the user scrolls away.
 */
export function Log({ path, target, draw, empty }) {
  const box = useRef();
  const content = useRef();
  const isAtEnd = useRef(!target);
  const fromEnd = useRef(0); // pixels from the view's top to the end, to be restored
  const [range, setRange] = useState(() => makeRange(path, target));
  const [isAway, setAway] = useState(false);
  const begin = Math.max(0, Math.min(range.begin, path.length - STEP));
  const end = Math.min(range.end, path.length);
  const scrollToEnd = () => {
    if (box.current) box.current.scrollTop = box.current.scrollHeight;
  };
  useLayoutEffect(() => {
    if (fromEnd.current) box.current.scrollTop = box.current.scrollHeight - fromEnd.current;
    else if (isAtEnd.current) scrollToEnd();
    fromEnd.current = 0;
  });
  useLayoutEffect(() => {
    const shown = target && content.current.querySelectorAll(".message")[path.indexOf(target) - begin];
    shown?.scrollIntoView({ block: "center" });
    shown?.classList.add("found");
    // formulas and code grow when their library has been loaded
    const observer = new ResizeObserver(() => isAtEnd.current && scrollToEnd());
    observer.observe(content.current);
    return () => observer.disconnect();
  }, []);
  const showEarlier = () => {
    fromEnd.current = box.current.scrollHeight - box.current.scrollTop;
    setRange({ begin: begin - STEP, end: range.end });
  };
  const showEnd = () => {
    isAtEnd.current = true;
    setAway(false);
    setRange(makeRange(path));
    scrollToEnd();
  };
  const onScroll = () => {
    if (!box.current) return; // the view was left while it scrolled
    const { scrollTop, clientHeight, scrollHeight } = box.current;
    const below = scrollHeight - scrollTop - clientHeight;
    isAtEnd.current = end === path.length && below < NEAR;
    setAway(!isAtEnd.current);
    if (scrollTop < EARLY && begin > 0) showEarlier();
    else if (below < EARLY && end < path.length) setRange({ begin, end: end + STEP });
  };
  return html`<div class="log-frame">
    <div
      class="log"
      role="log"
      aria-live="off"
      aria-label="Messages"
      tabindex="0"
      ref=${box}
      onScroll=${onScroll}
    >
      <div class="content" ref=${content}>
        ${!path.length && empty}
        ${
          begin > 0 &&
          html`<button type="button" class="earlier" onClick=${showEarlier}>
            Show earlier messages (${begin})
          </button>`
        }
        ${path.slice(begin, end).map(draw)}
      </div>
    </div>
    ${
      isAway &&
      html`<${IconButton}
        icon="arrow-down"
        label="Jump to the latest message"
        kind="jump"
        onClick=${showEnd}
      />`
    }
  </div>`;
}

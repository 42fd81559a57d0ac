// A button that opens a list of actions.

import { classes, html, Icon, IconButton, useEffect, useLayoutEffect, useRef, useState } from "./view.js";

const GAP = 6; // pixels between the button and its list, and around the list

/** items have a label, an icon and onClick, and perhaps isDisabled or isDanger. */
export function Menu({ label, icon = "ellipsis", items }) {
  const [isOpen, setOpen] = useState(false);
  const box = useRef();
  const close = () => {
    setOpen(false);
    box.current.querySelector("button").focus();
  };
  return html`<div class="menu-box" ref=${box}>
    <${IconButton}
      icon=${icon}
      label=${label}
      aria-haspopup="menu"
      aria-expanded=${isOpen}
      onClick=${() => setOpen(!isOpen)}
    />
    ${isOpen && html`<${List} box=${box.current} items=${items} onClose=${close} onLeave=${() => setOpen(false)} />`}
  </div>`;
}

function List({ box, items, onClose, onLeave }) {
  const list = useRef();
  useLayoutEffect(() => {
    const menu = list.current;
    menu.showPopover();
    const button = box.getBoundingClientRect();
    const below = button.bottom + GAP;
    const isBelow = below + menu.offsetHeight + GAP <= innerHeight;
    const left = Math.min(button.left, innerWidth - menu.offsetWidth - GAP);
    menu.style.left = `${Math.max(GAP, left)}px`;
    menu.style.top = `${isBelow ? below : Math.max(GAP, button.top - GAP - menu.offsetHeight)}px`;
    menu.querySelector("button:enabled")?.focus();
  }, []);
  useEffect(() => {
    const leave = ({ target }) => box.contains(target) || onLeave();
    addEventListener("pointerdown", leave);
    addEventListener("resize", onLeave);
    return () => {
      removeEventListener("pointerdown", leave);
      removeEventListener("resize", onLeave);
    };
  }, []);
  const onKeyDown = (event) => {
    const buttons = [...list.current.querySelectorAll("button:enabled")];
    const at = buttons.indexOf(document.activeElement);
    const { length } = buttons;
    const next = { ArrowDown: at + 1, ArrowUp: at - 1 + length, Home: 0, End: length - 1 };
    if (event.key in next) buttons[next[event.key] % length].focus();
    else if (event.key === "Escape") onClose();
    else if (event.key === "Tab") return onLeave();
    else return;
    event.preventDefault();
    event.stopPropagation();
  };
  return html`<div class="menu" role="menu" popover="manual" ref=${list} onKeyDown=${onKeyDown}>
    ${items.map(
      ({ label, icon, onClick, isDisabled, isDanger }) =>
        html`<button
          type="button"
          role="menuitem"
          tabindex="-1"
          key=${label}
          class=${classes(isDanger && "danger")}
          disabled=${isDisabled}
          onClick=${() => {
            onClose();
            onClick();
          }}
        >
          <${Icon} name=${icon} />${label}
        </button>`,
    )}
  </div>`;
}

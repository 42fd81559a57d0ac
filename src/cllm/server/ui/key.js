// The dialog for the API key.

import { Dialog } from "./dialog.js";
import { isKeyRemembered, keepKey, readKey } from "./server.js";
import { html } from "./view.js";

/** fault says what is wrong with the current key. onSave is called when there is another one. */
export function KeyDialog({ fault, onClose, onSave }) {
  const save = (event) => {
    event.preventDefault();
    const fields = new FormData(event.target);
    keepKey(fields.get("key").trim(), fields.has("remember"));
    event.target.closest("dialog").close();
    onSave();
  };
  return html`<${Dialog} title="API key" kind="small" onClose=${onClose}>
    <form class="fields" onSubmit=${save}>
      <p class="wide soft">
        Needed only if the server has API keys. It is sent only to this server. Save an empty field
        to remove it.
      </p>
      <label class="wide">
        <span>Key</span>
        <input
          name="key"
          type="password"
          autocomplete="off"
          autofocus
          pattern="[!-~]*"
          title="letters, digits and punctuation"
          aria-invalid=${Boolean(fault)}
          defaultValue=${readKey()}
        />
        ${fault && html`<span class="fault" role="alert">${fault}</span>`}
      </label>
      <label class="check">
        <input name="remember" type="checkbox" defaultChecked=${isKeyRemembered()} />
        <span>Remember it in this browser</span>
      </label>
      <button class="main">Save</button>
    </form>
  </${Dialog}>`;
}

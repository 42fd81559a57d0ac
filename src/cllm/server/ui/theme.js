// The colours: those of the system, light, or dark. This is not a module, so that it runs before
// the page is shown.
(() => {
  const KEY = "cllm-theme";
  const NAMES = ["system", "light", "dark"];

  let current = "system";
  try {
    current = localStorage.getItem(KEY);
  } catch {
    // the browser stores nothing, so the choice lasts until the page is closed
  }

  const read = () => (NAMES.includes(current) ? current : "system");

  function use(name) {
    document.documentElement.dataset.theme = name;
  }

  /** Use the next colours, remember them, and return their name. */
  function switchTheme() {
    current = NAMES[(NAMES.indexOf(read()) + 1) % NAMES.length];
    use(current);
    try {
      localStorage.setItem(KEY, current);
    } catch {
      // see above
    }
    return current;
  }

  window.theme = { read, switchTheme };
  use(read());
})();

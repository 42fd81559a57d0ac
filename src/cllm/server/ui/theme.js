// The colours: those of the system, light or dark. Not a module, so that it runs before the page
// is shown.
(() => {
  const KEY = "cllm-theme";
  const NAMES = ["system", "light", "dark"];

  function read() {
    const name = localStorage.getItem(KEY);
    return NAMES.includes(name) ? name : "system";
  }

  function use(name) {
    document.documentElement.dataset.theme = name;
  }

  /** Use the next colours, remember them, and return their name. */
  function switchTheme() {
    const name = NAMES[(NAMES.indexOf(read()) + 1) % NAMES.length];
    localStorage.setItem(KEY, name);
    use(name);
    return name;
  }

  window.theme = { read, switchTheme };
  use(read());
})();

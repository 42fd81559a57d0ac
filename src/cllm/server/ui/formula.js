// Formulas in TeX, drawn by KaTeX, which is loaded when the first formula is shown.

const FOLDER = "ui/vendor/katex/";
const MARKS = /^\s*(?:\$\$|\\\[|\\\(|\$)([^]*?)(?:\$\$|\\\]|\\\)|\$)[\s.,;:]*$/;
const STYLED = /\\(?:pmb|fcolorbox)/; // their MathML needs inline styles, which the policy forbids
const LIMITS = { maxSize: 20, maxExpand: 200, strict: "ignore", trust: false };

let loading = null; // the promise of KaTeX, or null before the first formula

function load() {
  const style = document.createElement("link");
  style.rel = "stylesheet";
  style.href = `${FOLDER}katex.css`;
  const isStyled = new Promise((resolve, reject) => {
    style.onload = resolve;
    style.onerror = reject;
  });
  document.head.append(style);
  return Promise.all([import("./vendor/katex/katex.js"), isStyled]);
}

/**
 * Draw the formulas in an element, which have the class formula and their source as text. A formula
 * that KaTeX cannot read keeps its source.
 */
export async function drawFormulas(element) {
  const isNew = (one) => !one.querySelector(".katex");
  const found = () => [...element.querySelectorAll(".formula")].filter(isNew);
  if (!found().length) return;
  if (!window.katex) {
    try {
      await (loading ??= load());
    } catch {
      loading = null; // the server is gone; the next formula tries again
      return;
    }
  }
  for (const one of found()) drawFormula(one);
}

function drawFormula(element) {
  const source = element.textContent;
  const tex = MARKS.exec(source)?.[1] ?? source;
  const drawn = document.createElement("span");
  try {
    window.katex.render(tex, drawn, {
      ...LIMITS,
      displayMode: element.tagName === "P" || source.startsWith("$$") || source.startsWith("\\["),
      output: STYLED.test(tex) ? "html" : "htmlAndMathml",
    });
  } catch {
    return;
  }
  element.replaceChildren(...drawn.childNodes);
  const wide = element.querySelector(".katex-display");
  if (wide) wide.tabIndex = 0; // it may have to be scrolled
  element.title = tex.trim();
}

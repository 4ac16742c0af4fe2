// The list of pages and actions under Ctrl+K: the links of the page's navigation, tabs and headings, and some actions.

/** Fill the dialog when it opens. `actions` maps titles to functions. */
export function palette(dialog, actions) {
  const input = dialog.querySelector("input");
  const list = dialog.querySelector("ul");
  let entries = [];
  let current = 0;

  function collect() {
    const links = [...document.querySelectorAll(".rooms a, .tabs a, .heading a, [data-palette]")];
    const found = links.map((link) => ({ title: link.textContent.trim(), keys: link.dataset.keys ?? "", run: () => link.click() }));
    return [...found, ...Object.entries(actions).map(([title, run]) => ({ title, keys: "", run }))];
  }

  function show() {
    const words = input.value.toLowerCase().split(/\s+/);
    const matching = entries.filter(({ title }) => words.every((word) => title.toLowerCase().includes(word)));
    current = Math.max(0, Math.min(current, matching.length - 1));
    list.replaceChildren(...matching.map((entry, index) => {
      const item = document.createElement("li");
      item.id = `palette-${index}`;
      item.setAttribute("role", "option");
      item.setAttribute("aria-selected", String(index === current));
      for (const text of [entry.title, entry.keys]) item.append(Object.assign(document.createElement("span"), { textContent: text }));
      item.addEventListener("click", () => run(entry));
      return item;
    }));
    input.setAttribute("aria-activedescendant", matching.length ? `palette-${current}` : "");
    return matching;
  }

  function run(entry) {
    dialog.close();
    entry?.run();
  }

  dialog.addEventListener("opened", () => {
    entries = collect();
    input.value = "";
    current = 0;
    show();
    input.focus();
  });
  input.addEventListener("input", () => { current = 0; show(); });
  input.addEventListener("keydown", (event) => {
    const step = { ArrowDown: 1, ArrowUp: -1 }[event.key];
    if (step) { event.preventDefault(); current += step; show(); list.querySelector("[aria-selected=true]")?.scrollIntoView({ block: "nearest" }); }
    if (event.key === "Enter") { event.preventDefault(); run(show()[current]); }
  });
}

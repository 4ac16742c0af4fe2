// What every page has: dialogs, messages, the theme, shortcuts, copying. Other modules import from here.
import { palette } from "./palette.js";

const root = document.documentElement;
const THEMES = ["system", "light", "dark"];

/** POST to the server as a form; returns the response. */
export function post(address, fields = {}) {
  return fetch(address, { method: "POST", body: new URLSearchParams(fields), headers: { "HX-Request": "true" } });
}

/** Show a message for some seconds; it stays in the list of recent messages. */
export function toast(text, level = "info") {
  const shown = document.createElement("div");
  shown.className = `toast ${level}`;
  shown.append(icon(`is-${level}`), Object.assign(document.createElement("span"), { textContent: text }));
  const close = Object.assign(document.createElement("button"), { type: "button", className: "quiet icon-only" });
  close.dataset.dismiss = "";
  close.append(icon("close"), Object.assign(document.createElement("span"), { className: "hidden", textContent: "Dismiss" }));
  shown.append(close);
  document.getElementById("toasts").append(shown);
  leaveLater(shown);
  const list = document.getElementById("recent-list");
  list.querySelector("[data-empty]")?.remove();
  const line = document.createElement("li");
  const pill = Object.assign(document.createElement("span"), { className: `pill ${level}` });
  pill.append(icon(`is-${level}`), text);
  line.append(pill, Object.assign(document.createElement("time"), { textContent: new Date().toLocaleTimeString() }));
  list.prepend(line);
  document.getElementById("last-message").replaceChildren(line.lastChild.cloneNode(true), ` ${text}`);
}

/** An icon of icons.svg. */
export function icon(name) {
  const svg = document.querySelector(".brand .icon").cloneNode(true);
  const use = svg.querySelector("use");
  use.setAttribute("href", `${use.getAttribute("href").split("#")[0]}#${name}`);
  return svg;
}

function leaveLater(shown, seconds = 8) {
  let timer = 0;
  const start = () => { timer = setTimeout(() => shown.remove(), seconds * 1000); };
  const stop = () => clearTimeout(timer);
  for (const event of ["mouseenter", "focusin"]) shown.addEventListener(event, stop);
  for (const event of ["mouseleave", "focusout"]) shown.addEventListener(event, start);
  start();
}

/** Open a dialog of the page; the focus returns to where it was when it closes. */
export function openDialog(id) {
  const dialog = document.getElementById(id);
  if (!dialog || dialog.open) return;
  const before = document.activeElement;
  dialog.addEventListener("close", () => before?.focus?.(), { once: true });
  dialog.showModal();
  dialog.dispatchEvent(new CustomEvent("opened"));
}

async function nextTheme() {
  const theme = THEMES[(THEMES.indexOf(root.dataset.theme) + 1) % THEMES.length];
  root.dataset.theme = theme;
  document.querySelector('meta[name="color-scheme"]').content = theme === "system" ? "light dark" : theme;
  for (const name of document.querySelectorAll("[data-theme-name]")) name.textContent = theme;
  for (const button of document.querySelectorAll("[data-theme-next]")) button.title = `Theme: ${theme} (t)`;
  document.dispatchEvent(new CustomEvent("theme", { detail: theme }));
  await post("/theme", { value: theme });
}

document.addEventListener("click", async (event) => {
  const element = event.target.closest("[data-opens], [data-closes], [data-dismiss], [data-theme-next], [data-copies], dialog");
  if (!element) return;
  if (element.dataset.opens) openDialog(element.dataset.opens);
  else if ("closes" in element.dataset) element.closest("dialog").close();
  else if ("dismiss" in element.dataset) element.closest(".toast").remove();
  else if ("themeNext" in element.dataset) nextTheme();
  else if ("copies" in element.dataset) {
    await navigator.clipboard.writeText(element.dataset.copies || element.parentElement.querySelector("code").textContent);
    toast("Copied", "success");
  } else if (element === event.target && element.tagName === "DIALOG") element.close(); // beside the dialog
});

document.addEventListener("toast", (event) => {
  for (const { text, level } of event.detail?.messages ?? []) toast(text, level);
});
for (const type of ["htmx:error", "htmx:response:error"]) {
  document.addEventListener(type, (event) => {
    const status = event.detail?.ctx?.response?.status;
    if (status === undefined) toast("The server does not answer. Is `smalti ui` still running?", "error");
    else if (status === 401) toast("The session has ended. Open the link from the terminal.", "error");
    else if (status >= 500) toast("The server made an error. Its terminal has the traceback.", "error");
  });
}
document.addEventListener("htmx:after:swap", (event) => event.target.querySelector?.(".notice[data-focus]")?.focus());

// --- shortcuts --------------------------------------------------------------------------------------------------------------

const shortcuts = new Map([
  ["/", () => document.querySelector("main [type=search], main [data-search]")?.focus()],
  ["?", () => openDialog("shortcuts")],
  ["t", nextTheme],
  ["j", () => moveRow(1)],
  ["k", () => moveRow(-1)],
]);
for (const link of document.querySelectorAll(".rooms a[data-keys]")) shortcuts.set(link.dataset.keys, () => link.click());

/** Add a shortcut of one key, or of two with a blank between them. */
export function shortcut(keys, action) {
  shortcuts.set(keys, action);
}

function moveRow(step) {
  const links = [...document.querySelectorAll("main tbody tr")].map((row) => row.querySelector("a, button, input")).filter(Boolean);
  const now = links.findIndex((link) => link.closest("tr").contains(document.activeElement));
  links[Math.min(Math.max(now + step, 0), links.length - 1)]?.focus();
}

const enabled = () => localStorage.getItem("shortcuts") !== "off";
let first = "";
document.addEventListener("keydown", (event) => {
  if ((event.ctrlKey || event.metaKey) && event.key.toLowerCase() === "k") {
    event.preventDefault();
    openDialog("palette");
    return;
  }
  const typing = event.target.matches?.("input:not([type=checkbox], [type=radio], [type=range]), select, textarea, [contenteditable]");
  if (typing || event.ctrlKey || event.metaKey || event.altKey || !enabled() || document.querySelector("dialog[open]")) return;
  const action = shortcuts.get(`${first} ${event.key}`) ?? shortcuts.get(event.key);
  first = action ? "" : event.key;
  if (action) {
    event.preventDefault();
    action(event);
  }
});

const toggle = document.querySelector("[data-shortcuts]");
if (toggle) {
  toggle.checked = enabled();
  toggle.addEventListener("change", () => localStorage.setItem("shortcuts", toggle.checked ? "on" : "off"));
}
for (const shown of document.querySelectorAll("#toasts .toast")) leaveLater(shown);
document.querySelector(".notice[data-focus]")?.focus();
palette(document.getElementById("palette"), { "Next theme": nextTheme, "Keyboard shortcuts": () => openDialog("shortcuts") });

// What the three views of a draft share: storing changes in order, and showing what the command line says.
import { post, toast } from "./site.js";

const byId = (id) => document.getElementById(id);
const address = `/configs/${byId("editor").dataset.id}`;

export let state = JSON.parse(byId("state").textContent);
let listener = () => {};
let open = () => {};

/** `shown(state)` is called with each new state; `find(option)` brings an option into view. */
export function follow(shown, find) {
  listener = shown;
  open = find;
  show(state);
}

function element(tag, text, className = "") {
  return Object.assign(document.createElement(tag), { textContent: text, className });
}

function link(option) {
  const button = element("button", option, "link");
  button.type = "button";
  button.addEventListener("click", () => open(option));
  return button;
}

function list(id, items, count) {
  const held = byId(id).contains(document.activeElement) && document.activeElement.textContent;
  byId(id).replaceChildren(...items);
  if (held) [...byId(id).querySelectorAll("button")].find((each) => each.textContent === held)?.focus();
  byId(`${count}-count`).textContent = items.length;
}

function show(next) {
  state = next;
  const saved = byId("saved");
  saved.textContent = state.saved ? "saved" : "draft, stored";
  saved.className = `pill ${state.saved ? "success" : "neutral"}`;
  for (const each of document.querySelectorAll("#editor [name=version]")) each.value = state.version;
  const problems = [...(state.broken ? [{ message: state.broken, fix: "", option: "", where: "TOML" }] : []), ...state.problems];
  list("problems", problems.map(problem), "problem");
  if (!problems.length) byId("problems").append(element("li", state.checked ? "No problem found." : "None in the options.", "good"));
  byId("checked").textContent = checkText();
  list("notices", state.notices.map(({ text }) => element("li", text)), "notice");
  byId("notices-card").hidden = !state.notices.length;
  list("differences", state.differences.map(difference), "difference");
  listener(state, problems);
}

function problem({ message, fix, option }) {
  const item = document.createElement("li");
  if (option) item.append(link(option), " ");
  item.append(option && message.startsWith(`${option} `) ? message.slice(option.length + 1) : message);
  if (fix) item.append(element("div", `fix: ${fix}`, "fix"));
  return item;
}

function difference({ option, text, default: usual }) {
  const item = document.createElement("li");
  const shown = text.length > 80 ? `${text.slice(0, 80)}…` : text;
  item.append(link(option), " ", element("span", shown), usual ? " " : "", element("del", usual));
  return item;
}

function checkText() {
  if (!state.checked) return "Options only. Check also reads datasets, plugins, model and devices.";
  if (state.checked.failed) return state.checked.failed;
  return state.checked.unchecked ? `Not checked, because it may have to be downloaded: ${state.checked.unchecked}` : "Checked: options, datasets, plugins, devices.";
}

// --- storing ----------------------------------------------------------------------------------------------------------------

let waiting = null;
let sending = null;

/** Store a change: `join(earlier)` returns what is to be sent if an earlier change is still waiting. */
export function store(place, join) {
  waiting = { place, fields: join(waiting?.fields ?? null) };
  send();
}

async function send() {
  if (sending || !waiting || !byId("conflict").hidden) return;
  sending = waiting;
  waiting = null;
  let answer;
  try {
    answer = await post(`${address}/${sending.place}`, { version: state.version, ...sending.fields });
    if (!answer.ok && answer.status !== 409 && answer.status !== 422) throw new Error(answer.statusText);
    byId("offline").hidden = true;
  } catch {
    byId("offline").hidden = false;
    const kept = sending;
    sending = null;
    waiting = waiting ? { ...waiting, fields: merged(kept.fields, waiting.fields) } : kept;
    setTimeout(send, 2000);
    return;
  }
  const kept = sending;
  sending = null;
  const isJson = (answer.headers.get("content-type") ?? "").includes("json");
  if (answer.status === 409 && isJson) conflict(await answer.json(), kept);
  else if (isJson) show(await answer.json());
  else toast(new DOMParser().parseFromString(await answer.text(), "text/html").body.textContent.trim(), "error");
  send();
}

function merged(earlier, later) {
  if (!("changes" in earlier) || !("changes" in later)) return later;
  return { changes: JSON.stringify({ ...JSON.parse(earlier.changes), ...JSON.parse(later.changes) }) };
}

function conflict({ version }, kept) {
  waiting = waiting ? { ...waiting, fields: merged(kept.fields, waiting.fields) } : kept;
  const names = waiting.fields.changes ? Object.keys(JSON.parse(waiting.fields.changes)).join(", ") : "the text of this page";
  byId("conflict-text").textContent = `It is at version ${version}; this page shows version ${state.version}. Not stored: ${names}.`;
  byId("conflict").hidden = false;
  byId("conflict").focus();
  byId("conflict-mine").onclick = async () => {
    state.version = version;
    byId("conflict").hidden = true;
    await send();
    if (byId("conflict").hidden && !waiting) location.reload();
  };
}

byId("conflict-theirs").addEventListener("click", () => { waiting = null; location.reload(); });
addEventListener("beforeunload", (event) => { if (waiting || sending) event.preventDefault(); });
document.addEventListener("visibilitychange", async () => {
  if (document.visibilityState !== "visible" || waiting || sending) return;
  const answer = await fetch(`${address}/state`);
  if (answer.ok && (await answer.json()).version !== state.version && !waiting && !sending) location.reload();
});

/** Wait until everything is stored. */
export async function stored() {
  document.activeElement?.dispatchEvent(new Event("change", { bubbles: true }));
  while ((waiting || sending) && byId("conflict").hidden) await new Promise((resolve) => setTimeout(resolve, 50));
}

byId("check").addEventListener("click", async ({ currentTarget: button }) => {
  await stored();
  button.disabled = true;
  byId("checked").textContent = "Checking…";
  try {
    const answer = await post(`${address}/check`);
    if (answer.ok) show(await answer.json());
    else toast("The check did not work", "error");
  } catch {
    toast("The server does not answer. Is `smalti ui` still running?", "error");
  }
  button.disabled = false;
  button.focus();
});

for (const each of document.querySelectorAll(".heading .actions a")) {
  each.addEventListener("click", async (event) => {
    event.preventDefault();
    await stored();
    location.assign(each.href);
  });
}
document.addEventListener("keydown", (event) => {
  const id = (event.ctrlKey || event.metaKey) && { s: "save", Enter: "launch" }[event.key];
  if (!id || document.querySelector("dialog[open]")) return;
  event.preventDefault();
  byId(id).click();
});

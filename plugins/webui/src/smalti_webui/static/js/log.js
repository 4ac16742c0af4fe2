// The log of a run: filters without loading the page again, new lines, following. And the search in its configuration.
import { markup, whileVisible } from "./live.js";

const form = document.getElementById("log-tools");
const lines = document.getElementById("log-lines");
const search = document.getElementById("value-search");

if (form) {
  const follow = document.getElementById("follow");
  let timer = 0;
  let waiting = false;
  const load = async () => {
    waiting = false;
    const query = new URLSearchParams(new FormData(form));
    history.replaceState(null, "", `${form.getAttribute("action")}?${query}`);
    const response = await fetch(`${form.dataset.lines}?${query}`, { headers: { "HX-Request": "true" } });
    if (!response.ok) return;
    const opened = lines.querySelector("details[open]");
    if (opened || getSelection()?.containsNode(lines, true) && !getSelection().isCollapsed) return; // somebody reads here
    lines.replaceChildren(...markup(await response.text()).childNodes);
    if (follow.checked) lines.scrollTop = lines.scrollHeight;
  };
  const soon = (milliseconds) => {
    clearTimeout(timer);
    timer = setTimeout(load, milliseconds);
  };
  form.addEventListener("input", (event) => event.target === follow ? follow.checked && load() : soon(250));
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    load();
  });
  lines.addEventListener("scroll", () => {
    if (lines.scrollTop + lines.clientHeight < lines.scrollHeight - 40) follow.checked = false;
  });
  document.addEventListener("run:events", () => { waiting = true; });
  whileVisible(() => waiting && follow.checked && load(), 1500);
  lines.scrollTop = lines.scrollHeight;
}

if (search) {
  search.addEventListener("input", () => {
    const wanted = search.value.toLowerCase();
    for (const row of document.querySelectorAll("#values tbody tr")) row.hidden = !row.textContent.toLowerCase().includes(wanted);
  });
}

// Keeps a page about a run up to date: one stream of events, and regions that the server renders again when something happened.

const REFRESH_MS = 1000;
const sources = new WeakMap(); // what the server last sent for an element, before htmx changed it
let region_timer = 0;
let last_refresh = 0;

/** A part of a page from its text. */
export const markup = (html) => new DOMParser().parseFromString(html, "text/html").body;

/** Replace what differs in a region. The focus stays, and so do the rows of a list with their selection. */
export function patch(region, html) {
  const fresh = markup(html);
  for (const list of fresh.querySelectorAll("[data-list]")) {
    const own = region.querySelector(`[data-list="${CSS.escape(list.dataset.list)}"]`);
    if (!own) return replaceAll(region, fresh);
    patchList(own, list);
  }
  for (const part of fresh.querySelectorAll("[data-live]")) {
    const own = region.querySelector(`[data-live="${CSS.escape(part.dataset.live)}"]`);
    const html = part.outerHTML;
    if (!own) {
      if (!part.closest("[data-list]")) return replaceAll(region, fresh);
    } else if ((sources.get(own) ?? own.outerHTML) !== html) replacePart(own, part, html);
  }
}

/** Replace a part, unless somebody types in it. A button or link with the focus hands it to the one with its name, or to the first. */
function replacePart(own, part, html) {
  const active = own.contains(document.activeElement) ? document.activeElement : null;
  if (active?.matches("input, select, textarea")) return;
  const copy = document.importNode(part, true);
  own.replaceWith(copy);
  sources.set(copy, html);
  globalThis.htmx?.process(copy);
  if (!active) return;
  const others = [...copy.querySelectorAll("a, button")];
  (others.find((other) => nameOf(other) === nameOf(active)) ?? others[0])?.focus();
}

const nameOf = (element) => element.getAttribute("aria-label") ?? element.textContent;

function patchList(own, list) {
  const before = new Map([...own.children].map((row) => [row.dataset.key, row]));
  const wanted = [...list.children].map((row) => before.get(row.dataset.key) ?? document.importNode(row, true));
  for (const row of before.values()) if (!wanted.includes(row)) row.remove();
  wanted.forEach((row, place) => {
    if (own.children[place] === row) return;
    own.insertBefore(row, own.children[place] ?? null);
    globalThis.htmx?.process(row);
  });
}

function replaceAll(region, content) {
  if (region.contains(document.activeElement)) return;
  region.replaceChildren(...document.importNode(content, true).childNodes);
  globalThis.htmx?.process(region);
}

/** Render all regions of the page again. */
export async function refresh() {
  last_refresh = Date.now();
  for (const region of document.querySelectorAll("[data-region]")) {
    try {
      const response = await fetch(region.dataset.region, { headers: { "HX-Request": "true" } });
      if (response.ok) patch(region, await response.text());
    } catch {
      return; // the server has gone; the next event or look tries again
    }
  }
  document.dispatchEvent(new CustomEvent("run:refreshed"));
}

/** Render all regions again soon, at most once in a second. */
export function refreshSoon() {
  if (region_timer) return;
  region_timer = setTimeout(() => {
    region_timer = 0;
    refresh();
  }, Math.max(50, last_refresh + REFRESH_MS - Date.now()));
}

/** Call `look` at an interval in milliseconds while the page is visible, and once when it becomes visible again. */
export function whileVisible(look, milliseconds) {
  setInterval(() => document.hidden || look(), milliseconds);
  document.addEventListener("visibilitychange", () => document.hidden || look());
}

/** Follow the events of a run from a position. The stream is closed while the tab is hidden, and continues where it was. */
export function follow(address, position) {
  let stream = null;
  const open = () => {
    stream = new EventSource(`${address}?from=${encodeURIComponent(position)}`);
    stream.addEventListener("message", (event) => {
      position = event.lastEventId || position;
      const events = event.data.split("\n").map(parsed).filter(Boolean);
      document.dispatchEvent(new CustomEvent("run:events", { detail: events }));
      refreshSoon();
    });
    stream.addEventListener("status", refreshSoon);
    stream.addEventListener("replaced", () => location.reload());
  };
  const change = () => {
    if (document.hidden) {
      stream?.close();
      stream = null;
    } else if (!stream) {
      open();
      refreshSoon();
    }
  };
  document.addEventListener("visibilitychange", change);
  change();
}

function parsed(line) {
  try {
    return JSON.parse(line);
  } catch {
    return null;
  }
}

/** Say changes of the status and each tenth of the steps to screen readers. */
function announce() {
  const state = document.querySelector("[data-condition]");
  const place = document.getElementById("announce");
  if (!state || !place) return;
  const tenths = Number(state.dataset.steps) ? Math.floor((10 * state.dataset.step) / state.dataset.steps) : 0;
  const text = `${state.dataset.condition}, ${tenths * 10} percent`;
  if (announce.last && announce.last !== text) place.textContent = text;
  announce.last = text;
}

const live = document.getElementById("live");
if (live) {
  announce();
  document.addEventListener("run:refreshed", announce);
  document.addEventListener("submit", (event) => event.target.closest("dialog")?.close());
  if (!document.getElementById("charts")) follow(live.dataset.events, live.dataset.position);
}

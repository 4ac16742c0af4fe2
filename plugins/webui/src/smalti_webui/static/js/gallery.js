// The gallery of a run: the keyboard, the dialog with one image, and two steps beside each other.
import { icon, openDialog } from "./site.js";

const table = document.getElementById("gallery");
const find = (id) => document.getElementById(id);
const rows = table ? [...table.tBodies[0].rows].map((row) => [...row.cells].slice(1).map((cell) => cell.querySelector("button.cell"))) : [];
let place = [0, 0]; // row, column

const cellAt = ([row, column]) => rows[row]?.[column] ?? null;
const address = (cell) => `${table.dataset.base}/file/${encodeURI(cell.dataset.file)}`;
const named = (step) => (step === "0" ? "base model" : `step ${Number(step).toLocaleString("en")}`);

/** The next place with an image in a direction; the same one if there is none. */
function next([row, column], [down, right]) {
  let [y, x] = [row + down, column + right];
  while (y >= 0 && y < rows.length && x >= 0 && x < rows[y].length) {
    if (cellAt([y, x])) return [y, x];
    [y, x] = [y + down, x + right];
  }
  return [row, column];
}

/** Make one cell the one that Tab reaches. */
function select(to, focus = true) {
  cellAt(place)?.setAttribute("tabindex", "-1");
  place = to;
  const cell = cellAt(place);
  cell?.setAttribute("tabindex", "0");
  if (focus) cell?.focus();
  cell?.scrollIntoView({ block: "nearest", inline: "nearest" });
}

const DIRECTIONS = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] };

function open(cell) {
  select(placeOf(cell), false);
  openDialog("lightbox");
  show();
}

function placeOf(cell) {
  const row = rows.findIndex((each) => each.includes(cell));
  return [row, rows[row].indexOf(cell)];
}

let shown = 0;
async function show() {
  const cell = cellAt(place);
  const { step, prompt, file } = cell.dataset;
  find("lightbox-title").textContent = named(step)[0].toUpperCase() + named(step).slice(1);
  find("lightbox-prompt").textContent = prompt;
  const image = find("lightbox-image");
  image.src = address(cell);
  image.alt = `${prompt}, ${named(step)}`;
  find("open-file").href = address(cell);
  find("open-file").download = `${file.replaceAll("/", "-")}`;
  find("lightbox-status").textContent = `${prompt}, ${named(step)}`;
  showBefore(cell);
  const request = ++shown;
  const response = await fetch(`${table.dataset.base}/settings/${encodeURI(file)}`);
  const settings = response.ok ? await response.json() : {};
  if (request === shown) showSettings(settings);
}

function showSettings(settings) {
  find("lightbox-settings").replaceChildren(...Object.entries(settings).map(([name, value]) => {
    const line = document.createElement("div");
    line.append(Object.assign(document.createElement("dt"), { textContent: name.replaceAll("_", " ") }), Object.assign(document.createElement("dd"), { textContent: value }));
    return line;
  }));
  find("copy-settings").dataset.copies = JSON.stringify(settings, null, 2);
}

/** The image of the other step of the same prompt, left of the border. */
function showBefore(cell) {
  const step = find("compare-step").value;
  const other = step === "" ? null : rows[place[0]].find((each) => each?.dataset.step === step);
  const before = find("lightbox-before");
  before.hidden = find("split-field").hidden = !other || other === cell;
  if (before.hidden) return;
  before.src = address(other);
  before.alt = `${other.dataset.prompt}, ${named(step)}`;
  find("split-left").textContent = named(step);
  find("split-right").textContent = named(cell.dataset.step);
  split();
}

const split = () => find("viewer").style.setProperty("--split", `${find("split").value}%`);

function move(columns, lines) {
  const to = next(place, [lines, columns]);
  if (to[0] === place[0] && to[1] === place[1]) {
    find("lightbox-status").textContent = "This is the last image in that direction.";
    return;
  }
  select(to, false);
  show();
}

if (table) {
  const first = rows.flatMap((row, y) => row.map((cell, x) => (cell ? [y, x] : null))).filter(Boolean);
  const newest = Math.max(...first.map(([, x]) => x));
  select(first.find(([, x]) => x === newest), false);
  table.addEventListener("click", (event) => {
    const cell = event.target.closest("button.cell");
    if (cell) open(cell);
  });
  table.addEventListener("keydown", (event) => {
    if (!DIRECTIONS[event.key] || !event.target.matches("button.cell")) return;
    event.preventDefault();
    select(next(placeOf(event.target), DIRECTIONS[event.key]));
  });
  find("lightbox").addEventListener("keydown", (event) => {
    const direction = DIRECTIONS[event.key];
    if (!direction || event.target.matches("input, select")) return;
    event.preventDefault();
    move(direction[1], direction[0]);
  });
  find("lightbox").addEventListener("close", () => setTimeout(() => select(place))); // after the dialog has given the focus back
  for (const button of document.querySelectorAll("[data-move]")) {
    button.addEventListener("click", () => move(...button.dataset.move.split(",").map(Number)));
  }
  find("compare-step").addEventListener("change", () => showBefore(cellAt(place)));
  find("split").addEventListener("input", split);
  find("viewer").addEventListener("pointermove", (event) => {
    if (find("split-field").hidden || event.buttons !== 1) return;
    const box = find("lightbox-image").getBoundingClientRect();
    find("split").value = Math.round((100 * (event.clientX - box.left)) / box.width);
    split();
  });
  const size = find("gallery-size");
  const resize = () => table.style.setProperty("--cell", `${size.value}px`);
  size.value = localStorage.getItem("gallery-size") ?? size.value;
  size.addEventListener("input", () => { resize(); localStorage.setItem("gallery-size", size.value); });
  resize();
  for (const image of table.querySelectorAll("img")) {
    image.addEventListener("error", () => image.replaceWith(icon("is-warning"), " missing"), { once: true });
  }
  const wrap = table.parentElement;
  wrap.scrollLeft = wrap.scrollWidth; // the newest step
}

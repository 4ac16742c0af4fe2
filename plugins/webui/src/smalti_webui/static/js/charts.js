// The curves of a run: a chart for each metric with its least and largest values, smoothing, markers, and new steps as they come.
// On a page without tools and choices it is that of one metric, `data-only`.
import { follow } from "./live.js";

const MOST = 3000; // points of a chart before the server thins them again
const COLOURS = { checkpoint: "--series-1", resumed: "--series-4", error: "--error", warning: "--warning" };
const place = document.getElementById("charts");
const tools = document.getElementById("chart-tools");
const choices = document.getElementById("metric-choices");
const charts = new Map();
let series = [];
let markers = [];
let drawing = 0;
let waiting = null; // events that arrive while the series are loaded

/** A colour of the style sheet as the canvas reads it. */
function colour(name, alpha = 1) {
  const probe = document.createElement("i");
  probe.style.color = `color-mix(in srgb, var(${name}) ${100 * alpha}%, transparent)`;
  place.append(probe);
  const found = getComputedStyle(probe).color;
  probe.remove();
  return found;
}

function shown(value) {
  if (value === null || value === undefined || !Number.isFinite(value)) return "–";
  const size = Math.abs(value);
  if (size > 0 && (size < 1e-3 || size >= 1e7)) return Number(value.toPrecision(4)).toExponential();
  return value.toLocaleString("en", { maximumSignificantDigits: size < 1e4 ? 4 : 8 });
}

const options = () => {
  if (!tools) return { axis: "step", log: false, smoothing: 0.9, markers: true };
  const given = new FormData(tools);
  return { axis: given.get("axis"), log: given.has("log"), smoothing: Number(given.get("smoothing")), markers: given.has("markers") };
};

/** An exponential mean that starts without a bias. A point of several measurements counts as many. */
function smoothed(values, counts, weight) {
  let sum = 0;
  let total = 0;
  return values.map((value, place) => {
    if (value === null) return null;
    const keep = weight ** counts[place];
    sum = sum * keep + value * (1 - keep);
    total = total * keep + (1 - keep);
    return sum / total;
  });
}

function dataOf(metric, given) {
  const positive = (values) => (given.log ? values.map((value) => (value > 0 ? value : null)) : values);
  const mean = positive(metric.mean);
  const smooth = given.smoothing > 0 ? positive(smoothed(metric.mean, metric.count, given.smoothing)) : mean.map(() => null);
  return [metric[given.axis], positive(metric.low), positive(metric.high), mean, smooth];
}

/** Times of an axis: days if it spans days, otherwise hours and minutes, with seconds if it is short. */
function times(chart, values, axis, space, step) {
  const days = { month: "2-digit", day: "2-digit" };
  const hours = { hour: "2-digit", minute: "2-digit", hour12: false, ...(step < 60 && { second: "2-digit" }) };
  return values.map((value) => new Date(1000 * value).toLocaleString("sv", step < 86400 ? hours : days));
}

function drawMarkers(chart, given) {
  if (!given.markers) return;
  const { ctx, bbox } = chart;
  ctx.save();
  for (const marker of markers) {
    const at = chart.valToPos(given.axis === "time" ? marker.time : marker.step, "x", true);
    if (at < bbox.left || at > bbox.left + bbox.width) continue;
    ctx.strokeStyle = marker.colour;
    ctx.setLineDash(marker.kind === "error" ? [] : [4, 4]);
    ctx.beginPath();
    ctx.moveTo(at, bbox.top);
    ctx.lineTo(at, bbox.top + bbox.height);
    ctx.stroke();
  }
  ctx.restore();
}

function create(metric, given) {
  const figure = document.createElement("figure");
  figure.className = "card chart";
  const caption = document.createElement("figcaption");
  caption.append(Object.assign(document.createElement("h2"), { textContent: metric.title }), Object.assign(document.createElement("p"), { className: "muted" }));
  const box = Object.assign(document.createElement("div"), { className: "plot" });
  figure.append(caption, box);
  place.append(figure);
  const line = colour("--series-0");
  const axis = { stroke: colour("--muted"), grid: { stroke: colour("--line"), width: 1 }, ticks: { stroke: colour("--line"), width: 1 }, size: 46 };
  const number = (chart, value) => shown(value);
  const chart = new uPlot({
    width: Math.max(240, box.clientWidth),
    height: 230,
    cursor: { sync: { key: "metrics" }, y: false },
    scales: { x: { time: given.axis === "time" }, y: { distr: given.log ? 3 : 1 } },
    axes: [{ ...axis, size: 34, ...(given.axis === "time" && { values: times }) }, { ...axis, size: 58, values: (chart, values) => values.map((value) => (value === null ? "" : shown(value))) }],
    bands: [{ series: [2, 1], fill: colour("--series-0", 0.18) }],
    series: [
      given.axis === "time" ? { label: "Time", value: (chart, value) => value && new Date(1000 * value).toLocaleString("sv") } : { label: "Step" },
      { label: "Least", stroke: colour("--series-0", 0.2), width: 0, points: { show: false }, value: number },
      { label: "Largest", stroke: colour("--series-0", 0.2), width: 0, points: { show: false }, value: number },
      { label: "Mean", stroke: given.smoothing > 0 ? colour("--series-0", 0.4) : line, width: given.smoothing > 0 ? 1 : 1.8, points: { show: false }, value: number },
      { label: "Smoothed", stroke: line, width: 2, points: { show: false }, value: number, show: given.smoothing > 0 },
    ],
    hooks: { draw: [(chart) => drawMarkers(chart, given)] },
  }, dataOf(metric, given), box);
  chart.root.querySelector(".u-legend").classList.add("keep"); // a row on a narrow screen too
  chart.root.querySelector("canvas").setAttribute("aria-hidden", "true");
  const observer = new ResizeObserver(() => chart.setSize({ width: Math.max(240, box.clientWidth), height: 230 }));
  observer.observe(box);
  charts.set(metric.name, { chart, figure, observer, caption: caption.lastChild });
}

/** Draw all chosen metrics anew, because something about all of them has changed. */
function draw() {
  const given = options();
  for (const { chart, figure, observer } of charts.values()) {
    observer.disconnect();
    chart.destroy();
    figure.remove();
  }
  charts.clear();
  for (const marker of markers) marker.colour = colour(COLOURS[marker.kind] ?? "--muted", 0.75);
  const chosen = new Set(choices ? [...choices.querySelectorAll("input:checked")].map((input) => input.value) : [place.dataset.only]);
  for (const metric of series) if (chosen.has(metric.name)) create(metric, given);
  update();
}

/** Put new points into the charts. */
function update() {
  drawing = 0;
  const given = options();
  for (const metric of series) {
    const found = charts.get(metric.name);
    if (!found) continue;
    found.chart.setData(dataOf(metric, given));
    const lows = metric.low.filter((value) => value !== null);
    const last = metric.mean.at(-1);
    found.caption.textContent = `${shown(last)} at step ${shown(metric.step.at(-1))}, least ${shown(lows.reduce((a, b) => Math.min(a, b), Infinity))}`;
    found.figure.dataset.points = metric.step.length;
    found.figure.dataset.last = metric.step.at(-1) ?? "";
  }
}

function addStep(event) {
  for (const metric of series) {
    const value = event[metric.name];
    if (typeof value !== "number" && !["NaN", "Infinity", "-Infinity"].includes(value)) continue;
    if (event.step <= (metric.step.at(-1) ?? -1)) continue; // the series had it already
    const finite = typeof value === "number" ? value : null;
    metric.step.push(event.step);
    metric.time.push(event.t);
    for (const column of ["mean", "low", "high"]) metric[column].push(finite);
    metric.count.push(finite === null ? 0 : 1);
  }
}

/** Load the thinned series. Events that arrive meanwhile are added to them afterwards, unless they are in them. */
async function load() {
  if (waiting) return null;
  waiting = [];
  let position = null;
  const response = await fetch(`${place.dataset.series}?points=1000`).catch(() => null);
  if (response?.ok) {
    ({ series, markers, position } = await response.json());
    for (const metric of choices ? series : []) if (!choices.querySelector(`[value="${CSS.escape(metric.name)}"]`)) addChoice(metric);
  }
  const late = waiting;
  waiting = null;
  for (const event of late) if (["step", "metric"].includes(event.type) && event.step) addStep(event);
  draw();
  return position;
}

function addChoice(metric) {
  choices.querySelector("span.muted")?.remove();
  const box = Object.assign(document.createElement("input"), { type: "checkbox", name: "metric", value: metric.name, checked: choices.querySelectorAll("input").length < 4 });
  const label = Object.assign(document.createElement("label"), { className: "check" });
  label.append(box, ` ${metric.title}`);
  choices.append(label);
}

document.addEventListener("run:events", ({ detail }) => {
  if (waiting) return waiting.push(...detail);
  for (const event of detail) {
    if (["step", "metric"].includes(event.type) && event.step) addStep(event);
    if (["checkpoint", "error", "warning"].includes(event.type)) {
      const text = event.path ?? event.message ?? "";
      markers.push({ kind: event.type, step: event.step ?? 0, time: event.t, text, colour: colour(COLOURS[event.type], 0.75) });
    }
  }
  const resumed = detail.some((event) => event.type === "state" && event.state === "running");
  if (resumed || !series.length || series.some((metric) => metric.step.length > MOST)) return load();
  drawing ||= requestAnimationFrame(update);
});
tools?.addEventListener("input", () => {
  document.getElementById("smoothing-value").textContent = options().smoothing.toFixed(2);
  draw();
});
choices?.addEventListener("change", draw);
document.addEventListener("theme", draw);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);

const live = document.getElementById("live");
follow(live.dataset.events, (await load()) ?? live.dataset.position);

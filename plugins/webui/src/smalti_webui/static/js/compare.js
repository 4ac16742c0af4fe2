// The curves of several runs over each other, with a table of their values.
const place = document.getElementById("curves");
const find = (id) => document.getElementById(id);
const shown = (value) => (value === null || value === undefined ? "–" : Number(Number(value).toPrecision(4)).toLocaleString("en"));
let runs = [];
let chart = null;

function colour(name) {
  const probe = document.createElement("i");
  probe.style.color = `var(${name})`;
  place.append(probe);
  const found = getComputedStyle(probe).color;
  probe.remove();
  return found;
}

/** An exponential mean that starts without a bias. A point of several measurements counts as many. */
function smoothed(values, counts, weight) {
  let [sum, total] = [0, 0];
  return values.map((value, place) => {
    if (value === null) return null;
    const keep = weight ** counts[place];
    sum = sum * keep + value * (1 - keep);
    total = total * keep + (1 - keep);
    return sum / total;
  });
}

/** The curve of a run: [places on the axis, values], times from the beginning of the run on. */
function curve(run, given) {
  const series = run.series.find((each) => each.name === given.metric);
  if (!series) return [[], []];
  const over = given.axis === "time" ? series.time.map((time) => time - series.time[0]) : series.step;
  const values = given.smoothing > 0 ? smoothed(series.mean, series.count, given.smoothing) : series.mean;
  return [over, values.map((value) => (given.log && !(value > 0) ? null : value))];
}

function draw() {
  const given = { metric: find("metric").value, axis: find("axis").value, smoothing: Number(find("smoothing").value), log: find("log-scale").checked };
  const curves = runs.map((run) => curve(run, given));
  const axis = { stroke: colour("--muted"), grid: { stroke: colour("--line"), width: 1 }, ticks: { stroke: colour("--line"), width: 1 } };
  const tables = curves.filter(([over]) => over.length);
  chart?.destroy();
  chart = null;
  place.replaceChildren();
  if (tables.length) {
    const lines = runs.map((run, number) => ({
      label: run.name, stroke: colour(`--series-${number % 8}`), width: 2, dash: number > 7 ? [6, 4] : [], spanGaps: true,
      points: { show: false }, value: (chart, value) => shown(value),
    }));
    const width = () => Math.max(260, place.clientWidth);
    chart = new uPlot({
      width: width(), height: 340,
      scales: { x: { time: false }, y: { distr: given.log ? 3 : 1 } },
      axes: [{ ...axis, size: 36 }, { ...axis, size: 60, values: (chart, values) => values.map((value) => (value === null ? "" : shown(value))) }],
      series: [{ label: given.axis === "time" ? "Seconds" : "Step", value: (chart, value) => shown(value) }, ...lines.filter((line, number) => curves[number][0].length)],
    }, uPlot.join(tables), place);
    chart.root.querySelector("canvas").setAttribute("aria-hidden", "true");
    chart.root.querySelector("table").classList.add("keep");
  }
  describe(curves, given);
}

/** The same in words, and as a table. */
function describe(curves, given) {
  const title = find("metric").selectedOptions[0]?.textContent ?? "";
  const last = curves.map(([, values]) => values.findLast((value) => value !== null));
  find("curves-text").textContent = `${title} at the end: ${runs.map((run, number) => `${run.name} ${shown(last[number])}`).join(", ")}`;
  const table = document.createElement("table");
  table.className = "keep dense";
  table.createCaption().textContent = `${title} at ten places of each run${given.smoothing > 0 ? ", smoothed" : ""}`;
  const head = table.createTHead().insertRow();
  for (const text of ["", ...runs.map((run) => run.name)]) head.append(Object.assign(document.createElement("th"), { scope: "col", textContent: text }));
  const body = table.createTBody();
  for (let place = 0; place < 10; place += 1) {
    const row = body.insertRow();
    row.append(Object.assign(document.createElement("th"), { scope: "row", textContent: `${(place + 1) * 10} %` }));
    for (const [over, values] of curves) {
      const at = Math.round(((over.length - 1) * (place + 1)) / 10);
      const cell = row.insertCell();
      cell.className = "number";
      cell.textContent = over.length ? `${shown(values[at])} at ${shown(over[at])}` : "–";
    }
  }
  find("curves-table").replaceChildren(table);
}

if (place) {
  const given = JSON.parse(place.dataset.runs);
  runs = await Promise.all(given.map(async (run) => {
    const response = await fetch(`/runs/${run.id}/series?points=1000`).catch(() => null);
    return { ...run, series: response?.ok ? (await response.json()).series : [] };
  }));
  const names = new Map(runs.flatMap((run) => run.series.map((each) => [each.name, each.title])));
  find("metric").append(...[...names].map(([name, title]) => new Option(title, name)));
  for (const id of ["metric", "axis", "smoothing", "log-scale"]) find(id).addEventListener("input", draw);
  document.addEventListener("theme", draw);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
  new ResizeObserver(() => chart?.setSize({ width: Math.max(260, place.clientWidth), height: 340 })).observe(place);
  if (names.size) draw();
  else find("curves-text").textContent = "None of these runs has made a step.";
}

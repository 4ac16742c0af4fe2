// The table of runs: up to date, with a selection to compare.
import { refresh, whileVisible } from "./live.js";

const region = document.querySelector("[data-region]");

function count() {
  const selected = document.querySelectorAll("input[name=run]:checked").length;
  document.getElementById("compare-button").disabled = selected < 2;
  document.getElementById("selected").textContent =
    selected === 0 ? "Select two or more runs to compare them." : selected === 1 ? "1 run selected, select another." : `${selected} runs selected.`;
}

if (region) {
  whileVisible(refresh, Number(region.dataset.every));
  document.addEventListener("change", (event) => event.target.name === "run" && count());
  document.addEventListener("run:refreshed", count);
  document.getElementById("shown").addEventListener("change", (event) => event.target.form.requestSubmit());
  count();
} else {
  whileVisible(async () => {
    const response = await fetch("/runs/rows", { headers: { "HX-Request": "true" } });
    if (response.ok && (await response.text()).includes("data-key=")) location.reload(); // the first run has appeared
  }, 2000);
}

// The form of a draft: fields are stored as they are changed; search, levels and sections only show and hide.
import { follow, state, store } from "./config-state.js";

const form = document.getElementById("form");
const search = document.getElementById("find");
const fields = new Map([...form.querySelectorAll(".option")].map((field) => [field.dataset.name, field]));
const control = (field) => field.querySelector("[data-kind]");
const links = [...document.querySelectorAll(".sections a[data-section]")];
const groups = [...form.querySelectorAll("section.options")];
let chosen = links.find((each) => each.ariaCurrent)?.dataset.section;

// --- changes ----------------------------------------------------------------------------------------------------------------

const text = (input) => (input.type === "checkbox" ? String(input.checked) : input.value);
const known = new Map([...fields].map(([name, field]) => [name, text(control(field))]));

function change(field, value) {
  known.set(field.dataset.name, text(control(field)));
  store("change", (earlier) => ({ changes: JSON.stringify({ ...JSON.parse(earlier?.changes ?? "{}"), [field.dataset.name]: value }) }));
}

function typed(input) {
  const field = input.closest(".option");
  if (field && text(input) !== known.get(field.dataset.name)) change(field, text(input));
}

let timer = 0;
form.addEventListener("input", ({ target }) => {
  clearTimeout(timer);
  if (target.dataset.kind) timer = setTimeout(() => typed(target), 500);
});
form.addEventListener("change", ({ target }) => target.dataset.kind && typed(target));
form.addEventListener("click", ({ target }) => {
  const field = target.closest(".reset")?.closest(".option");
  if (!field) return;
  const input = control(field);
  if (input.type === "checkbox") input.checked = field.dataset.default === "true";
  else input.value = "";
  change(field, null);
  input.focus();
});

// --- what the command line says ---------------------------------------------------------------------------------------------

function say(field, part, lines) {
  const place = document.getElementById(`option-${field.dataset.name}-${part}`);
  place.textContent = lines.join("\n");
  place.hidden = !lines.length;
}

function shown(now, problems) {
  const counts = new Map();
  for (const [name, field] of fields) {
    const input = control(field);
    const mine = problems.filter(({ option }) => option === name);
    const given = now.given.includes(name);
    const elsewhere = now.elsewhere[name];
    const unmet = now.idle[name];
    say(field, "error", mine.map(({ message, fix }) => (fix ? `${message}\nfix: ${fix}` : message)));
    say(field, "reason", [
      ...(unmet ? [`Has no effect unless ${unmet}.`] : []),
      ...(elsewhere ? [`${elsewhere.text || "another value"}: ${elsewhere.source}`] : []),
      ...now.notices.filter(({ option }) => option === name && !unmet).map((notice) => notice.text),
    ]);
    input.setAttribute("aria-invalid", String(mine.length > 0));
    input.disabled = Boolean(unmet) && input !== document.activeElement;
    field.classList.toggle("given", given);
    field.classList.toggle("shown", given || mine.length > 0);
    field.querySelector(".reset").hidden = !given;
    const section = field.closest("section").dataset.section;
    const count = counts.get(section) ?? { given: 0, bad: 0 };
    counts.set(section, { given: count.given + given, bad: count.bad + mine.length });
  }
  for (const each of links) {
    const { given, bad } = counts.get(each.dataset.section);
    const badge = each.querySelector(".count");
    badge.hidden = !given && !bad;
    badge.textContent = bad ? `${bad} ${bad === 1 ? "problem" : "problems"}` : given;
    badge.title = bad ? "" : `${given} given`;
    badge.classList.toggle("bad", bad > 0);
  }
  arrange();
}

// --- search, levels, sections -----------------------------------------------------------------------------------------------

const LEVELS = ["basic", "advanced", "expert"];

function arrange() {
  const words = search.value.toLowerCase().replace(/^--/, "").split(/\s+/).filter(Boolean);
  let found = 0;
  for (const section of groups) {
    let some = 0;
    for (const field of section.querySelectorAll(".option")) {
      const fits = words.every((word) => field.dataset.words.includes(word));
      field.hidden = !fits;
      if (words.length) field.classList.toggle("shown", fits);
      else field.classList.toggle("shown", field.classList.contains("given") || control(field).ariaInvalid === "true");
      some += fits && (field.classList.contains("shown") || LEVELS.indexOf(field.dataset.optionLevel) <= LEVELS.indexOf(form.dataset.level));
    }
    found += words.length ? some : 0;
    section.hidden = words.length ? !some : section.dataset.section !== chosen;
    section.querySelector(".more").hidden = some > 0;
  }
  for (const each of links) {
    if (each.dataset.section === chosen && !words.length) each.ariaCurrent = "true";
    else each.removeAttribute("aria-current");
  }
  document.getElementById("found").textContent = words.length ? `${found} ${found === 1 ? "option" : "options"} found` : "";
}

function remember() {
  const address = new URL(location.href);
  address.searchParams.set("level", form.dataset.level);
  address.searchParams.set("section", chosen);
  address.hash = "";
  history.replaceState(null, "", address);
}

function choose(section) {
  chosen = section;
  search.value = "";
  arrange();
  remember();
}

search.addEventListener("input", arrange);
for (const each of links) {
  each.addEventListener("click", (event) => { event.preventDefault(); choose(each.dataset.section); });
  each.addEventListener("keydown", (event) => {
    const step = { ArrowDown: 1, ArrowRight: 1, ArrowUp: -1, ArrowLeft: -1 }[event.key];
    if (step) { event.preventDefault(); links[(links.indexOf(each) + step + links.length) % links.length].focus(); }
  });
}
document.addEventListener("click", ({ target }) => {
  const level = target.closest("button[data-level]")?.dataset.level;
  if (!level) return;
  form.dataset.level = level;
  for (const each of document.querySelectorAll(".finder [data-level]")) each.ariaPressed = String(each.dataset.level === level);
  arrange();
  remember();
});

follow(shown, (option) => {
  const field = fields.get(option);
  if (!field) return;
  choose(field.closest("section").dataset.section);
  field.classList.add("shown");
  field.scrollIntoView({ block: "center" });
  control(field).focus();
  control(field).select?.();
});
if (location.hash.startsWith("#section-")) choose(location.hash.slice(9));
if (state.broken) for (const field of fields.values()) control(field).disabled = true;

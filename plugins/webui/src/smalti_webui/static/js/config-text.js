// The TOML and the flags of a draft: a text that is stored while it is written.
import { follow, store } from "./config-state.js";
import { toast } from "./site.js";

const text = document.getElementById("text");
const error = document.getElementById("text-error");
let known = text.value;
let timer = 0;

function change() {
  clearTimeout(timer);
  if (text.value === known) return;
  known = text.value;
  store(text.dataset.address, () => ({ text: known }));
}

text.addEventListener("input", () => { clearTimeout(timer); timer = setTimeout(change, 600); });
text.addEventListener("change", change);
document.getElementById("copy")?.addEventListener("click", async () => {
  await navigator.clipboard.writeText(text.value);
  toast("Copied", "success");
});

follow((state) => {
  error.textContent = state.broken;
  error.hidden = !state.broken;
  text.setAttribute("aria-invalid", String(Boolean(state.broken)));
}, (option) => {
  // The line of the text that gives the option.
  const at = text.value.search(new RegExp(`^[ \\t]*(?:"?--)?${option.replace(/_/g, "[-_]")}\\b|^\\[\\[${option}`, "m"));
  text.focus();
  if (at < 0) return;
  const end = text.value.indexOf("\n", at);
  text.setSelectionRange(at, end < 0 ? text.value.length : end);
});

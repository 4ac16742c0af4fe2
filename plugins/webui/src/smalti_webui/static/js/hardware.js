// The hardware page: a line number of a problem selects the line in the JSON.
document.addEventListener("click", (event) => {
  const button = event.target.closest("[data-line]");
  const text = document.getElementById("builder-text");
  if (!button || !text) return;
  const lines = text.value.split("\n");
  const line = Math.min(Number(button.dataset.line), lines.length);
  const start = lines.slice(0, line - 1).reduce((sum, each) => sum + each.length + 1, 0);
  text.focus();
  text.setSelectionRange(start, start + lines[line - 1].length);
  text.scrollTop = (text.scrollHeight * (line - 2)) / lines.length;
});

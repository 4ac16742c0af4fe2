// The editor of captions: the keyboard, and a question before changes are lost.
const dialog = document.getElementById("caption-editor");
const text = () => document.querySelector("#caption-form textarea");
const changed = () => text() !== null && text().value !== text().dataset.saved;
const key = () => document.querySelector("#caption-form [name=key]")?.value;

const buttons = () => [...document.querySelectorAll("#photos button.cell")];
const keyOf = (button) => button.closest(".photo").querySelector("figcaption code").textContent;

/** Whether the editor may be left: nothing has changed, or the user agrees. */
const mayLeave = () => !changed() || confirm("The caption was changed and is not saved. Leave it?");

/** Open the editor of the image before or after this one on the page. */
function go(step) {
  const button = buttons()[buttons().findIndex((each) => keyOf(each) === key()) + step];
  if (!button || !mayLeave()) return;
  if (text()) text().dataset.saved = text().value;
  button.click();
}

if (dialog) {
  dialog.addEventListener("keydown", (event) => {
    if ((event.ctrlKey || event.metaKey) && event.key === "Enter") document.getElementById("caption-form").requestSubmit();
    else if (event.altKey && event.key === "ArrowLeft") go(-1);
    else if (event.altKey && event.key === "ArrowRight") go(1);
    else return;
    event.preventDefault();
  });
  dialog.addEventListener("click", (event) => {
    const next = event.target.closest("[data-next]");
    if (next) go(Number(next.dataset.next));
    const leaves = event.target === dialog || event.target.closest("[data-closes]");
    if (leaves && !mayLeave()) event.stopPropagation();
  }, true);
  dialog.addEventListener("cancel", (event) => { if (!mayLeave()) event.preventDefault(); });
  dialog.addEventListener("close", () => {
    const button = buttons().find((each) => keyOf(each) === key());
    document.getElementById("caption-body").replaceChildren();
    setTimeout(() => button?.focus()); // the image may have been replaced since the editor was opened
  });
  document.getElementById("photos")?.addEventListener("error", (event) => {
    event.target.replaceWith(Object.assign(document.createElement("span"), { className: "problem", textContent: "cannot be shown" }));
  }, true);
  document.addEventListener("htmx:after:swap", () => { if (dialog.open && !dialog.contains(document.activeElement)) text()?.focus(); });
  window.addEventListener("beforeunload", (event) => { if (dialog.open && changed()) event.preventDefault(); });
}

// Figures: an entry of a legend hides its series. A point shows its text when hovered over or reached by the arrow keys,
// and opens its runs on a click or Enter.
for (const button of document.querySelectorAll("[data-hides]")) {
  button.addEventListener("click", () => {
    const shown = button.getAttribute("aria-pressed") !== "true";
    button.setAttribute("aria-pressed", shown);
    for (const part of button.closest("figure").querySelectorAll("[data-series]"))
      if (part.dataset.series === button.dataset.hides) part.toggleAttribute("hidden", !shown);
  });
}

const tip = document.getElementById("tip");
const tell = (point) => {
  tip.replaceChildren(...page.tips[point.dataset.t].split("\n").map((line) => {
    const part = document.createElement("p");
    part.textContent = line;
    return part;
  }));
  tip.hidden = false;
  const at = point.getBoundingClientRect(), box = tip.getBoundingClientRect();
  const left = Math.min(Math.max(at.left + at.width / 2 - box.width / 2, 4), innerWidth - box.width - 4);
  tip.style.left = `${left}px`;
  tip.style.top = `${at.top > box.height + 12 ? at.top - box.height - 8 : at.bottom + 8}px`;
};
const untell = () => { tip.hidden = true; };
const listen = (figure) => {
  const points = [...figure.querySelectorAll("[data-t]")];
  figure.tabIndex = 0;
  for (const point of points) {
    point.setAttribute("tabindex", -1);
    point.addEventListener("pointerenter", () => tell(point));
    point.addEventListener("pointerleave", untell);
    point.addEventListener("focus", () => tell(point));
    point.addEventListener("blur", untell);
    point.addEventListener("click", () => { if (point.dataset.c) openConfiguration(point.dataset.c); });
  }
  figure.addEventListener("keydown", (event) => {
    const seen = points.filter((point) => !point.closest("[hidden]"));
    const step = {ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1}[event.key];
    const place = seen.indexOf(document.activeElement);
    if (step && seen.length) {
      event.preventDefault();
      seen[(place < 0 ? (step > 0 ? 0 : -1) : place + step + seen.length) % seen.length]?.focus();
    } else if (event.key === "Enter" && place >= 0) {
      event.preventDefault();  // else the same key press closes the dialog again
      seen[place].dispatchEvent(new Event("click"));
    } else if (event.key === "Escape") untell();
  });
};
for (const figure of document.querySelectorAll("figure svg:has([data-t])")) listen(figure);

// Adds the other panels of a figure, and the comparisons of claims, when they are opened, and all of them for print.
const folds = document.querySelectorAll("details[data-fold]");
const unfold = (fold) => {
  if (fold.dataset.added) return;
  fold.dataset.added = "yes";
  fold.insertAdjacentHTML("beforeend", page.folds[fold.dataset.fold]);
  fold.querySelectorAll("svg:has([data-t])").forEach(listen);
  const hidden = [...fold.closest("figure, section").querySelectorAll("[data-hides][aria-pressed=false]")];
  const names = hidden.map((button) => button.dataset.hides);
  for (const part of fold.querySelectorAll("[data-series]"))
    part.toggleAttribute("hidden", names.includes(part.dataset.series));
};
for (const fold of folds) fold.addEventListener("toggle", () => unfold(fold));
addEventListener("beforeprint", () => folds.forEach(unfold));
addEventListener("scroll", untell, {passive: true});

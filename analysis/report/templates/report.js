const element = (tag, text, ...children) => {
  const made = document.createElement(tag);
  made.textContent = text;
  made.append(...children);
  return made;
};

// Sorts a table by the column of the pressed button, within each group of rows, whose heading stays above them. Missing
// values come last in both directions.
for (const button of document.querySelectorAll("th button")) {
  button.addEventListener("click", () => {
    const head = button.closest("th"), column = head.cellIndex;
    const upwards = head.getAttribute("aria-sort") !== "ascending";
    for (const other of head.parentNode.cells) other.removeAttribute("aria-sort");
    head.setAttribute("aria-sort", upwards ? "ascending" : "descending");
    const numeric = head.classList.contains("number");
    const key = ({cells: {[column]: cell}}) => {
      const text = cell.dataset.key ?? cell.textContent;
      return text === "–" || text === "" || numeric && isNaN(text) ? undefined : text;
    };
    const compare = (a, b) => numeric ? a - b : a < b ? -1 : a > b ? 1 : 0;
    const order = (one, other) => {
      const a = key(one), b = key(other);
      if (a === undefined || b === undefined) return (a === undefined) - (b === undefined);
      return upwards ? compare(a, b) : compare(b, a);
    };
    for (const body of head.closest("table").tBodies) {
      body.append(...[...body.rows].filter((row) => !row.classList.contains("group")).sort(order));
    }
  });
}

// Opens the runs behind a row or a point: every column, the record and the end of the log.
const dialog = document.getElementById("details");

const folded = (summary, text) => {
  const block = element("pre", text);
  block.tabIndex = 0;
  return element("details", "", element("summary", summary), block);
};

const showRun = (place) => {
  const [title, folder, cells, record, log] = page.runs[place];
  const known = page.columns.flatMap(([name, meaning], index) => {
    if (cells[index] === "") return [];
    const term = element("dt", name);
    term.title = meaning;
    return [term, element("dd", cells[index])];
  });
  const absent = record === null ? "The page has no room for the record; it is in the folder." : "";
  return element("article", "",
    element("h3", title), element("p", folder), element("p", absent),
    ...(record ? [folded("record.json", record)] : []), ...(log ? [folded("End of run.log", log)] : []),
    element("dl", "", ...known));
};

const open = (title, places, of) => {
  document.getElementById("details-title").textContent = title;
  const absent = of - places.length;
  document.getElementById("details-body").replaceChildren(
    ...places.map(showRun), element("p", absent > 0 ? `${absent} more runs are not on this page.` : ""));
  dialog.showModal();
  dialog.scrollTop = 0;
};

const openConfiguration = (place) => open(...page.configurations[place]);

for (const button of document.querySelectorAll("button.open")) {
  const [table, place] = button.dataset.opens.split(" ");
  const show = () => table === "configurations" ? openConfiguration(place) : open(page.runs[place][0], [place], 1);
  button.addEventListener("click", show);
  // A click anywhere in the row does the same, but neither a double click nor the end of a drag, which select text.
  let pending;
  button.closest("tr").addEventListener("click", (event) => {
    clearTimeout(pending);
    if (event.detail === 1 && !event.target.closest("a, button"))
      pending = setTimeout(() => { if (getSelection().isCollapsed) show(); }, 250);
  });
}

// Filters tables and failures by the checked values; a facet without a checked value filters nothing. The address keeps
// the choice, so that it can be bookmarked.
const form = document.getElementById("filters");
const boxes = form ? [...form.querySelectorAll("input")] : [];

const matching = () => {
  const chosen = [];
  for (const box of boxes) if (box.checked) (chosen[box.dataset.facet] ??= new Set()).add(box.dataset.value);
  const passes = (values, index) => values === "" || !chosen[index] || values.split("|").some((one) => chosen[index].has(one));
  return (facets) => facets.split(",").every(passes);
};

const count = (name) => {
  const rows = [...document.querySelectorAll(`[data-table=${name}] tbody tr[data-f]`)];
  return rows.length ? [`${rows.filter((row) => !row.hidden).length} of ${rows.length} ${name}`] : [];
};

const narrow = () => {
  const matches = matching();
  for (const item of document.querySelectorAll("[data-f]")) item.hidden = !matches(item.dataset.f);
  for (const empty of document.querySelectorAll("[data-empty]")) {
    const box = empty.previousElementSibling;
    box.hidden = !box.querySelector("tr[data-f]:not([hidden])");
    empty.hidden = !box.hidden;
  }
  if (form) document.getElementById("count").textContent = ["configurations", "runs"].flatMap(count).join(", ");
};

const remember = () => {
  const chosen = new URLSearchParams(boxes.filter((box) => box.checked).map((box) => [box.name, box.value]));
  history.replaceState(null, "", `#${chosen}`);
};

const recall = () => {
  const chosen = new URLSearchParams(location.hash.slice(1));
  for (const box of boxes) box.checked = chosen.getAll(box.name).includes(box.value);
};

if (form) {
  form.hidden = false;
  form.addEventListener("change", () => { narrow(); remember(); });
  form.addEventListener("reset", () => setTimeout(() => { narrow(); remember(); }));
  form.addEventListener("submit", (event) => event.preventDefault());
}
addEventListener("hashchange", () => {
  if (location.hash.includes("=")) { recall(); narrow(); }
});
recall();
narrow();

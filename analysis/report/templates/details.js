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
  const absent = record === null ? "The record did not fit into this page; it lies in the folder." : "";
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
  button.addEventListener("click", () =>
    table === "configurations" ? openConfiguration(place) : open(page.runs[place][0], [place], 1));
}

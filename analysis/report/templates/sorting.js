// Sorts a table by the column of the button pressed, within each group of rows, whose heading stays above them; what is
// missing stays last both ways.
for (const button of document.querySelectorAll("th button")) {
  button.addEventListener("click", () => {
    const head = button.closest("th"), column = head.cellIndex;
    const upwards = head.getAttribute("aria-sort") !== "ascending";
    for (const other of head.parentNode.cells) other.removeAttribute("aria-sort");
    head.setAttribute("aria-sort", upwards ? "ascending" : "descending");
    const key = (row) => row.cells[column].dataset.key;
    const numeric = head.classList.contains("number");
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

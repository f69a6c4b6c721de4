// Narrows figures, tables and failures to what is chosen; of a part with nothing chosen all is shown. The address keeps
// the choice, so that it can be bookmarked.
const form = document.getElementById("filters");
const boxes = form ? [...form.querySelectorAll("input")] : [];

const matching = () => {
  const chosen = [];
  for (const box of boxes) if (box.checked) (chosen[box.dataset.facet] ??= new Set()).add(box.dataset.value);
  return (facets) => facets.split(",").every((value, index) => value === "" || !chosen[index] || chosen[index].has(value));
};

const told = (name, one) => {
  const rows = [...document.querySelectorAll(`[data-table=${name}] tbody tr[data-f]`)];
  return `${rows.filter((row) => !row.hidden).length} of ${rows.length} ${one}`;
};

const narrow = () => {
  const matches = matching();
  for (const item of document.querySelectorAll("[data-f]")) item.hidden = !matches(item.dataset.f);
  narrowCharts(matches);
  if (form) document.getElementById("count").textContent = `${told("configurations", "configurations")}, ${told("runs", "runs")}`;
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

if (page.charts.length) {
  const sight = new IntersectionObserver((seen) => {
    for (const {isIntersecting, target} of seen) if (isIntersecting && !drawn.has(target)) draw(target, matching());
  }, {rootMargin: "400px"});
  const places = [...document.querySelectorAll(".panel")];
  for (const place of places) sight.observe(place);
  // The rest while nothing else is to be done, so that a picture of the whole page, or a search in it, misses none.
  const drawNext = () => {
    const place = places.find((one) => !one.hidden && !drawn.has(one));
    if (!place) return;
    draw(place, matching());
    setTimeout(drawNext);
  };
  setTimeout(drawNext);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => narrowCharts(matching()));
}

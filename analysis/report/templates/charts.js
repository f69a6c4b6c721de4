// Draws the panels of the interactive figures as they come into sight, narrowed to what is chosen, in the page's colours.
const drawn = new Set();

// A trace without data of its points, as of a search, is always whole.
const narrowed = (trace, matches) => {
  if (!trace.customdata) return trace;
  const kept = trace.customdata.map((point) => point !== null && matches(point.f));
  const only = (values, none) => values && values.map((value, index) => kept[index] ? value : none);
  return {...trace, y: only(trace.y, null), text: only(trace.text, ""), hovertext: only(trace.hovertext, "")};
};

const themed = (layout) => {
  const style = getComputedStyle(document.documentElement);
  const [ink, soft, line, paper] = ["--ink", "--soft", "--line", "--paper"].map((name) => style.getPropertyValue(name));
  const axes = Object.entries(layout).filter(([name]) => /^[xy]axis/.test(name));
  const coloured = axes.map(([name, axis]) => [name, {...axis, color: soft, gridcolor: line, linecolor: line}]);
  return {
    ...layout, ...Object.fromEntries(coloured),
    paper_bgcolor: "transparent", plot_bgcolor: "transparent", font: {family: "system-ui, sans-serif", size: 11, color: soft},
    hoverlabel: {bgcolor: paper, bordercolor: line, align: "left", font: {color: ink, size: 12}},
  };
};

const draw = (place, matches) => {
  const panel = page.charts[place.dataset.chart].panels[place.dataset.panel];
  const plot = place.querySelector(".plot");
  const traces = panel.data.map((trace) => narrowed(trace, matches));
  Plotly.react(plot, traces, themed(panel.layout), {displayModeBar: false, responsive: true});
  if (drawn.has(place)) return;
  drawn.add(place);
  plot.on("plotly_click", ({points}) => {
    const asked = points[0].customdata;
    if (asked && asked.c !== null) openConfiguration(asked.c);
  });
};

// Shows those panels in which something is left, and draws those again that are in sight.
const narrowCharts = (matches) => {
  for (const place of document.querySelectorAll(".panel")) {
    const {data} = page.charts[place.dataset.chart].panels[place.dataset.panel];
    place.hidden = !data.some((trace) => !trace.customdata || trace.customdata.some((point) => point && point.c !== null && matches(point.f)));
    if (drawn.has(place) && !place.hidden) draw(place, matches);
  }
};

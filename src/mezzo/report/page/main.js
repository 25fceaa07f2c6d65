// The page: read the data, make the parts, draw them.

function reportPage(data) {
  const rows = readRows(data);
  document.body.dataset.framework = data.framework;
  const filter = new Filter(rows, data.regions);
  const page = document.getElementById("page");
  page.append(...[header(data), totals(data, rows, filter), notes(data), findings(data, filter)].filter(Boolean));
  if (!rows.length) {
    page.append(node("p", { class: "dim" }, "No ops were recorded."));
    return;
  }
  page.append(
    filterBar(filter),
    treeSection(filter),
    plotsSection(rows, filter),
    byOpSection(filter),
    opsSection(filter),
  );
  filter.apply();
}

function plotsSection(rows, filter) {
  const pictures = [];
  const lists = [writtenPlot(filter), castPlot(filter)];
  if (rows.some((row) => row.numbers)) {
    pictures.push(exponentsFigure(filter));
    pictures.push(alongPlot(filter, "plot-max", "Largest number of each op, in time order", (row) => row.max, 65504));
  }
  if (rows.some((row) => row.error !== null)) {
    pictures.push(
      alongPlot(filter, "plot-growth", "Error of each op against float32, in time order", (row) => row.error, 0),
    );
    lists.push(errorPlot(filter));
  }
  const columns = pictures.length ? [pictures, lists] : lists.map((list) => [list]);
  return section(
    "plots",
    "Plots",
    node(
      "div",
      { class: "plots" },
      columns.map((column) => node("div", {}, column)),
    ),
  );
}

const DATA = JSON.parse(document.getElementById("data").textContent);
(DATA.kind === "nonfinite" ? nonfinitePage : reportPage)(DATA);
document.body.dataset.ready = "yes";

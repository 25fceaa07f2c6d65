// The modules as a tree, with sums of what is inside of each, in the order in which they first ran.

class Module {
  constructor(name, steps) {
    Object.assign(this, { name, steps, sums: new Sums(), children: new Map() });
  }

  get key() {
    return this.steps.join("\u0000");
  }
}

function moduleTree(rows) {
  const root = new Module("", []);
  for (const { steps, sums } of byModule(rows)) {
    let here = root;
    here.sums.merge(sums);
    steps.forEach((step, depth) => {
      let child = here.children.get(step);
      if (!child) {
        child = new Module(step, steps.slice(0, depth + 1));
        here.children.set(step, child);
      }
      child.sums.merge(sums);
      here = child;
    });
  }
  return root;
}

// The sums of each innermost module alone, in the order of the first op.
function byModule(rows) {
  const sums = new Map();
  for (const row of rows) {
    let one = sums.get(row.key);
    if (!one) sums.set(row.key, (one = { steps: row.steps, sums: new Sums() }));
    one.sums.add(row);
  }
  return [...sums.values()];
}

function treeColumns(rows) {
  const columns = [
    ["ops", "ops", "how many ops ran", (sums) => count(sums.ops)],
    ["casts", "casts", "casts that mezzo put in", (sums) => (sums.casts ? count(sums.casts) : "")],
    ["moved", "cast bytes", "bytes that these casts read and wrote", (sums) => (sums.moved ? bytes(sums.moved) : "")],
    ["written", "written", "bytes of the results", (sums) => bytes(sums.written)],
    ["low", "low", "share of the float results in a low dtype", (sums) => percent(sums.lowShare)],
  ];
  if (rows.some((row) => row.numbers)) {
    columns.push(
      ["max", "max |x|", "the largest finite result", (sums) => small(sums.max)],
      [
        "over",
        "\u2192Inf f16",
        "share of the results that would be Inf in float16",
        (sums) => percent(sums.share("overflow")),
      ],
      [
        "under",
        "\u21920 f16",
        "share of the results that would be 0 in float16",
        (sums) => percent(sums.share("underflow")),
      ],
    );
  }
  if (rows.some((row) => row.bad)) {
    columns.push(["bad", "NaN, Inf", "how many results are not finite", (sums) => (sums.bad ? count(sums.bad) : "")]);
  }
  if (rows.some((row) => row.error !== null)) {
    columns.push([
      "error",
      "error",
      "the largest relative error of an op against float32",
      (sums) => small(sums.error),
    ]);
  }
  return columns;
}

function alarming(name, sums) {
  if (name === "bad") return sums.bad > 0;
  if (name === "over") return sums.overflow > 0;
  if (name === "under") return sums.share("underflow") > 0.01;
  return name === "error" && sums.error !== null && !(sums.error < 0.1);
}

function treeSection(filter) {
  const columns = treeColumns(filter.rows);
  const body = node("tbody", {});
  const head = node(
    "tr",
    {},
    node("th", { scope: "col" }, isTorch() ? "module" : "part"),
    columns.map(([name, text, title]) => node("th", { scope: "col", class: "number", title }, text)),
    node("th", { scope: "col", title: "bytes of the results by dtype" }, "results by dtype"),
  );
  const open = firstOpen(moduleTree(filter.rows));
  const draw = () => {
    const root = moduleTree(filter.anywhere);
    body.replaceChildren(...treeRows(root, 0, { open, columns, filter, draw, widest: root.sums.written || 1 }));
  };
  filter.listeners.push(draw);
  const tools = node("div", { class: "tools" });
  for (const [text, act] of [
    ["open all", (all) => all.forEach((key) => open.add(key))],
    ["close all", () => open.clear()],
  ]) {
    const button = node("button", { type: "button" }, text);
    button.addEventListener("click", () => {
      act(keysOf(moduleTree(filter.rows)));
      draw();
    });
    tools.append(button);
  }
  const table = node("table", { class: "tree" }, node("thead", {}, head), body);
  return section(
    "modules",
    isTorch() ? "Modules" : "Parts of the program",
    tools,
    node("div", { class: "scroll" }, table),
  );
}

// Open as much as fits on a screen: level by level, but no level that would make more than 30 rows.
function firstOpen(root) {
  const open = new Set();
  let level = [root];
  let shown = root.children.size;
  while (level.length) {
    const next = level.flatMap((module) => [...module.children.values()]).filter((module) => module.children.size);
    shown += next.reduce((sum, module) => sum + module.children.size, 0);
    if (shown > 30) break;
    next.forEach((module) => open.add(module.key));
    level = next;
  }
  return open;
}

function keysOf(module) {
  return [...module.children.values()].flatMap((child) => (child.children.size ? [child.key, ...keysOf(child)] : []));
}

function treeRows(module, depth, view) {
  return [...module.children.values()].flatMap((child) => {
    const isOpen = view.open.has(child.key);
    return [treeRow(child, depth, isOpen, view), ...(isOpen ? treeRows(child, depth + 1, view) : [])];
  });
}

function treeRow(module, depth, isOpen, view) {
  const { filter, columns } = view;
  const chosen = filter.module.length && module.key === filter.module.join("\u0000");
  const fold = () => {
    view.open[isOpen ? "delete" : "add"](module.key);
    view.draw();
    find(module.key)?.focus();
  };
  const find = (key) => [...document.querySelectorAll(".tree button.name")].find((one) => one.dataset.key === key);
  const arrow = module.children.size
    ? node(
        "button",
        {
          class: "arrow",
          type: "button",
          "aria-expanded": isOpen,
          "aria-label": `${isOpen ? "close" : "open"} ${moduleName(module.steps)}`,
          onclick: fold,
        },
        isOpen ? "\u25be" : "\u25b8",
      )
    : node("span", { class: "arrow" });
  const name = node(
    "button",
    { class: "name", type: "button", "data-key": module.key, title: `${moduleName(module.steps)}: show its ops` },
    module.name,
  );
  name.addEventListener("click", () => filter.set({ module: chosen ? [] : module.steps }));
  name.addEventListener("keydown", (event) => {
    if ((event.key === "ArrowRight" && !isOpen) || (event.key === "ArrowLeft" && isOpen)) fold();
  });
  const cell = node("td", { class: "module" }, arrow, name);
  cell.style.paddingLeft = `${depth * 16 + 4}px`;
  const bar = dtypeBar(module.sums);
  bar.style.width = `${Math.max(2, (100 * module.sums.written) / view.widest)}%`;
  return node(
    "tr",
    { class: chosen ? "chosen" : null, "data-path": moduleName(module.steps) },
    cell,
    columns.map(([column, , , text]) =>
      node(
        "td",
        { class: numberClass(text(module.sums), alarming(column, module.sums)), "data-column": column },
        text(module.sums),
      ),
    ),
    node("td", { class: "bars" }, bar),
  );
}

// The page of a search for numbers that are not finite: the op, what went in, what to do, what ran before.

const LARGEST = { float16: 65504, bfloat16: 3.3895e38, float32: 3.4028e38, float64: Number.MAX_VALUE };

function nonfinitePage(data) {
  document.body.dataset.framework = "torch";
  const page = document.getElementById("page");
  const first = data.first;
  const parts = [nonfiniteHeader(data)];
  if (first) parts.push(verdict(first), doSection(first), operandsSection(first), beforeSection(first));
  if (data.parameters.length) {
    const items = data.parameters.map((text) => node("li", {}, text));
    // Past the first op most gradients are gone: their names say little, and the list is long.
    parts.push(
      section("parameters", `Gradients that are not finite (${items.length})`, ...foldedList(items, "plain-list", 12)),
    );
  }
  parts.push(notes(data));
  page.append(...parts.filter(Boolean));
}

function nonfiniteHeader(data) {
  const first = data.first;
  // A script's search has a summary where "all finite" is not all there is to say.
  let title = data.summary || `${count(data.ops)} ops, all finite`;
  if (!first && data.parameters.length) title = "No op made it, and gradients are not finite";
  if (first)
    title = [
      node("span", { class: "bad" }, first.kind),
      " first appears in ",
      node("code", {}, first.op),
      first.path ? [" of ", node("code", {}, first.path)] : "",
    ];
  return node(
    "header",
    {},
    node("div", { class: "title" }, node("h1", {}, title), themeButton()),
    node(
      "p",
      { class: "settings" },
      first
        ? `the first op whose result is not finite though all that went in is; ${many(data.ops, "op")} watched`
        : "numbers that are not finite",
    ),
  );
}

function placeOf(one) {
  return one.file ? `${one.file.split(/[\\/]/).slice(-2).join("/")}:${one.line}` : "";
}

function verdict(first) {
  const counts = [
    [first.nan, "NaN"],
    [first.inf, "Inf"],
  ]
    .filter(([number]) => number)
    .map(([number, what]) => `${count(number)} ${what}`);
  const facts = [
    ["op", first.op + (first.seen_as && first.seen_as !== first.op ? ` (ran as ${first.seen_as})` : "")],
    ["module", first.path || "(outside of modules)"],
    ["line", first.file ? `${first.file}:${first.line}` : "not known"],
    ["pass", first.phase + (first.rank === null ? "" : `, rank ${first.rank}`)],
    ["rule", first.rule],
    [
      "result",
      [
        dtypeMark(first.dtype),
        ` ${shapeText(first.shape)}: `,
        node("b", { class: "bad" }, counts.join(", ")),
        ` of ${count(first.elements)}`,
      ],
    ],
  ];
  return node(
    "div",
    { class: "verdict", id: "verdict" },
    node(
      "dl",
      {},
      facts.map(([name, text]) => [node("dt", {}, name), node("dd", {}, text)]),
    ),
    first.cause ? node("p", { class: "cause", id: "cause" }, prose(first.cause)) : "",
  );
}

function doSection(first) {
  if (!first.advice.length) return null;
  return section(
    "advice",
    "What to do",
    node(
      "ol",
      { class: "plain-list" },
      first.advice.map((text) => node("li", {}, adviceBlock(text))),
    ),
  );
}

function operandsSection(first) {
  const rows = first.operands.map((one) => {
    const [low, high] = [real(one.low), real(one.high)];
    const size = low === null ? null : Math.max(Math.abs(low), Math.abs(high));
    const share = size !== null && LARGEST[one.dtype] ? size / LARGEST[one.dtype] : null;
    return node(
      "tr",
      {},
      node("td", {}, one.name),
      node("td", {}, dtypeMark(one.dtype)),
      node("td", {}, shapeText(one.shape)),
      node("td", { class: "number" }, low === null ? "nothing finite" : small(low)),
      node("td", { class: "number" }, small(high)),
      node("td", { class: numberClass(percent(share), share !== null && share > 0.25) }, percent(share)),
      node("td", { class: one.nan ? "number bad" : "number" }, one.nan ? count(one.nan) : ""),
      node("td", { class: one.inf ? "number bad" : "number" }, one.inf ? count(one.inf) : ""),
    );
  });
  const heads = [
    ["name"],
    ["dtype"],
    ["shape"],
    ["smallest", 1],
    ["largest", 1],
    ["of the dtype's range", 1],
    ["NaN", 1],
    ["Inf", 1],
  ];
  return section("operands", "What went in", listTable(heads, rows));
}

function listTable(heads, ...rows) {
  const head = ([text, number]) => node("th", { class: number ? "number" : null }, text);
  return node(
    "div",
    { class: "scroll" },
    node("table", { class: "list" }, node("thead", {}, node("tr", {}, heads.map(head))), node("tbody", {}, ...rows)),
  );
}

function beforeSection(first) {
  if (!first.before.length) return null;
  const line = (one, mark) =>
    node(
      "tr",
      { class: mark },
      node("td", {}, one.op.replace(/^aten::/, "")),
      node("td", {}, one.path),
      node("td", { class: "dim" }, placeOf(one)),
      node("td", { class: "dim" }, one.phase),
      node(
        "td",
        {},
        one.used.map((dtype) => [dtypeMark(dtype), " "]),
        "\u2192 ",
        one.gave.map((dtype) => [dtypeMark(dtype), " "]),
      ),
    );
  const itself = { ...first, used: first.operands.map((one) => one.dtype), gave: [first.dtype] };
  const heads = ["op", "module", "line", "pass", "operands \u2192 results"].map((text) => [text]);
  const rows = first.before.map((one) => line(one, null));
  return section("before", "What ran before it", listTable(heads, rows, line(itself, "found")));
}

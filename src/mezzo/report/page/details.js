// Everything that is known of one op, beneath the table.

class Details {
  constructor() {
    this.box = node("div", { class: "details", id: "details", hidden: true, "aria-live": "polite" });
  }

  show(row) {
    this.box.hidden = !row;
    this.box.replaceChildren(...(row ? detailParts(row) : []));
    if (row) this.box.scrollIntoView({ block: "nearest" });
  }
}

function detailParts(row) {
  const facts = [
    ["rule", row.rule + (row.reason ? `: ${row.reason}` : "")],
    ["module", row.path],
    ["line", row.file ? `${row.file}:${row.line}${row.function ? ` (${row.function})` : ""}` : ""],
    ["pass", row.phase + (row.rank >= 0 ? `, rank ${row.rank}` : "")],
    ["runs", row.times === 1 ? "" : row.times < 0 ? "the program decides" : `${row.times} times in one call`],
  ].filter(([, text]) => text);
  const list = node(
    "dl",
    {},
    facts.map(([name, text]) => [node("dt", {}, name), node("dd", {}, text)]),
  );
  const parts = [node("div", {}, node("h3", {}, `${row.index + 1}  ${row.op}`), list, operandTable(row))];
  if (row.numbers)
    parts.push(
      node(
        "div",
        {},
        numbersLine(row.numbers),
        exponentPlot([row], Math.min(520, document.body.clientWidth - 60)) || "",
      ),
    );
  return parts;
}

function operandTable(row) {
  const { came, used, gave, kept, names, traced } = row.call;
  const lines = came.map((dtype, index) => {
    let what = "as it came";
    if (dtype !== used[index]) what = kept.includes(index) ? "by a cast kept from before" : "cast here";
    return [
      "in",
      names[index] || "",
      shapeText(row.call.in[index]),
      dtypeMark(dtype),
      dtypeMark(used[index]),
      what,
      traced[0][index],
    ];
  });
  gave.forEach((dtype, index) => {
    lines.push([
      "out",
      "",
      shapeText(row.call.out[index]),
      "",
      dtypeMark(dtype),
      bytes(row.call.bytes[index]),
      traced[1][index],
    ]);
  });
  const plain = lines.some((line) => line[6]);
  const heads = ["", "name", "shape", "came", "dtype", "", ...(plain ? ["without autocast"] : [])];
  return node(
    "table",
    {},
    node(
      "thead",
      {},
      node(
        "tr",
        {},
        heads.map((text) => node("th", {}, text)),
      ),
    ),
    node(
      "tbody",
      {},
      lines.map((line) =>
        node(
          "tr",
          {},
          line.slice(0, heads.length).map((text) => node("td", {}, text)),
        ),
      ),
    ),
  );
}

function numbersLine(numbers) {
  const lines = [
    `${count(numbers.elements)} numbers, |x| from ${small(numbers.min)} to ${small(numbers.max)}`,
    numbers.nan || numbers.inf > numbers.masked
      ? `${count(numbers.nan)} NaN, ${count(numbers.inf - numbers.masked)} Inf`
      : numbers.masked
        ? `${count(numbers.masked)} Inf of a mask, the others finite`
        : "all finite",
    ...DTYPES.map((dtype) => {
      const loss = numbers.losses[dtype];
      const [inf, zero, subnormal] = [loss.overflow, loss.underflow, loss.subnormal].map(percent);
      return `in ${dtype}: ${inf} would be Inf, ${zero} would be 0, ${subnormal} subnormal`;
    }),
    numbers.error === null ? "" : `relative error against float32: ${small(numbers.error)}`,
  ];
  return node(
    "ul",
    { class: "notes" },
    lines.filter(Boolean).map((text) => node("li", {}, text)),
  );
}

// The ops by name: how often, in which dtypes, at what cost.

const FIRST = 12;

function byOp(rows) {
  const found = new Map();
  for (const row of rows) {
    if (!found.has(row.op)) found.set(row.op, { op: row.op, dot: row.call.dot, sums: new Sums(), used: new Map() });
    const one = found.get(row.op);
    one.sums.add(row);
    const dtypes = dtypePair(row.call);
    one.used.set(dtypes, (one.used.get(dtypes) || 0) + 1);
  }
  return [...found.values()].sort(
    (one, other) => other.sums.written + other.sums.moved - one.sums.written - one.sums.moved,
  );
}

// Which floats go in and what comes out, said once for all ops with the same operands.
function dtypePair(call) {
  if (call.pair === undefined) {
    const floats = new Set(call.used.filter(isFloat));
    call.pair = `${[...floats].join("+") || "-"} \u2192 ${[...new Set(call.gave)].join("+") || "-"}`;
  }
  return call.pair;
}

function dtypeCounts(used) {
  const sorted = [...used].sort((one, other) => other[1] - one[1]);
  const parts = sorted.slice(0, 4).map(([dtypes, number]) =>
    node(
      "span",
      { class: "pair" },
      dtypes.split(/([+ ]|\u2192|-)/).map((part) => (/^[a-z]/.test(part) ? dtypeMark(part) : part)),
      ` ${count(number)}`,
    ),
  );
  return [parts, sorted.length > 4 ? ` and ${sorted.length - 4} more` : ""];
}

function byOpSection(filter) {
  const columns = treeColumns(filter.rows);
  const body = node("tbody", {});
  const head = node(
    "tr",
    {},
    node("th", { scope: "col" }, "op"),
    node("th", { scope: "col", title: "float operands \u2192 results, and how often" }, "in which dtypes"),
    columns.map(([, text, title]) => node("th", { scope: "col", class: "number", title }, text)),
  );
  const more = node("button", { type: "button" });
  let all = false;
  const draw = () => {
    const found = byOp(filter.shown);
    body.replaceChildren(...found.slice(0, all ? found.length : FIRST).map((one) => byOpRow(one, columns, filter)));
    more.hidden = found.length <= FIRST;
    more.textContent = all ? `show ${FIRST}` : `show all ${found.length}`;
  };
  more.addEventListener("click", () => {
    all = !all;
    draw();
  });
  filter.listeners.push(draw);
  return section(
    "by-op",
    "By op",
    node("div", { class: "tools" }, more),
    node("div", { class: "scroll" }, node("table", { class: "tree" }, node("thead", {}, head), body)),
  );
}

function byOpRow(one, columns, filter) {
  const wanted = `op:${one.op.toLowerCase()}`;
  const name = node(
    "button",
    { class: "name", type: "button", title: "show these ops" },
    one.dot ? node("b", {}, one.op) : one.op,
  );
  name.addEventListener("click", () => filter.set({ words: filter.words === wanted ? "" : wanted }));
  return node(
    "tr",
    { class: filter.words === wanted ? "chosen" : null, "data-op": one.op },
    node("td", { class: "module" }, name),
    node("td", { class: "dtypes" }, dtypeCounts(one.used)),
    columns.map(([column, , , text]) =>
      node(
        "td",
        { class: numberClass(text(one.sums), alarming(column, one.sums)), "data-column": column },
        text(one.sums),
      ),
    ),
  );
}

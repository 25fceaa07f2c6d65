// The ops in time order. Only the rows in sight are in the page, so that the number of ops does not matter.

const ROW = 22;
const GAP = 8;
const PHASES = { forward: "fwd", backward: "bwd", recomputation: "again", optimizer: "opt" };

function dtypesCell(row) {
  const { came, used, gave, kept } = row.call;
  const operands = came.map((dtype, index) => {
    if (dtype === used[index]) return [dtypeMark(dtype), " "];
    const sign = kept.includes(index) ? "\u00bb" : ">";
    return [node("span", { class: "castmark" }, dtypeMark(dtype), sign, dtypeMark(used[index])), " "];
  });
  return [operands, "\u2192 ", gave.map((dtype) => [dtypeMark(dtype), " "])];
}

// As wide as the longest of the texts, within bounds; what is left over is shared out.
function widthOf(rows, text, least, most) {
  let longest = least;
  for (const row of rows) longest = Math.max(longest, text(row));
  return Math.min(most, longest);
}

function dtypesLength({ came, used, gave }) {
  const operands = came.map(
    (dtype, index) => short(dtype).length + (dtype === used[index] ? 1 : short(used[index]).length + 3),
  );
  return [...operands, 2, ...gave.map((dtype) => short(dtype).length + 1)].reduce((sum, one) => sum + one, 0);
}

// Cut at its left end: the end of a module's name or of a line says most.
function cutLeft(text) {
  return node("bdi", {}, text);
}

// The columns: width in characters; `wide` ones take what is left over.
function tableColumns(rows) {
  const some = (test) => rows.some(test);
  const number = (name, heading, title, width, cell) => ({
    name,
    heading,
    title,
    width,
    number: true,
    key: (row) => row[name],
    cell,
  });
  const text = (name, heading, title, most, cell) => ({
    name,
    heading,
    title,
    wide: true,
    width: widthOf(rows, (row) => row[name].length, heading.length + 2, most),
    key: (row) => row[name],
    cell: cell || ((row) => row[name]),
  });
  const ranks = some((row) => row.rank >= 0);
  const paths = some((row) => row.path);
  const columns = [
    number("index", "#", "the order in which they ran", Math.max(4, String(rows.length).length), (row) =>
      String(row.index + 1),
    ),
    ranks && number("rank", "rank", "the process", 5, (row) => (row.rank < 0 ? "" : String(row.rank))),
    text("op", "op", "the op; a name in bold is a matrix product", 24, opCell),
    some((row) => row.phase !== "forward") && {
      name: "phase",
      heading: "pass",
      title: "forward, backward, run again for a checkpoint, optimizer",
      width: 5,
      key: (row) => row.phase,
      cell: (row) => PHASES[row.phase] || row.phase,
    },
    paths && text("path", "module", "the innermost module", 30, (row) => cutLeft(row.path)),
    {
      ...text("place", "line", "the line of the program", 24, (row) => cutLeft(row.place)),
      key: (row) => row.file && `${row.file}:${String(row.line).padStart(7)}`,
    },
    text("rule", "rule", "what was applied to it", 18),
    {
      name: "dtypes",
      heading: "operands \u2192 results",
      title: "> is a cast, \u00bb a cast that was kept from before",
      wide: true,
      width: widthOf([...new Set(rows.map((row) => row.call))], dtypesLength, 22, 40),
      key: (row) => `${row.call.used}|${row.call.gave}`,
      cell: dtypesCell,
    },
    number("moved", "cast bytes", "bytes that its casts read and wrote", 10, (row) =>
      row.moved ? bytes(row.moved) : "",
    ),
    number("written", "written", "bytes of its results", 9, (row) => (row.call.encloses ? "" : bytes(row.written))),
    ...(some((row) => row.numbers) ? numberColumns(number) : []),
    some((row) => row.bad) &&
      number("bad", "NaN, Inf", "how many results are not finite", 8, (row) => (row.bad ? count(row.bad) : "")),
    some((row) => row.error !== null) &&
      number("error", "error", "relative error against float32", 8, (row) => small(row.error)),
  ];
  return columns.filter(Boolean);
}

function numberColumns(number) {
  return [
    number("max", "max |x|", "the largest finite result", 8, (row) => small(row.max)),
    number("overflow", "\u2192Inf f16", "share of its results that would be Inf in float16", 8, (row) =>
      percent(row.overflow),
    ),
    number("underflow", "\u21920 f16", "share of its results that would be 0 in float16", 8, (row) =>
      percent(row.underflow),
    ),
  ];
}

function opCell(row) {
  const name = row.op.replace(/^aten::/, "");
  return [
    row.call.dot ? node("b", {}, name) : name,
    row.times === 1 ? "" : ` \u00d7${row.times < 0 ? "?" : row.times}`,
  ];
}

class OpsTable {
  constructor(filter, details) {
    Object.assign(this, { filter, details, sorted: [], sort: "index", down: false, chosen: null });
    this.columns = tableColumns(filter.rows);
    this.head = node(
      "div",
      { class: "row head", role: "row" },
      this.columns.map((column) => this.heading(column)),
    );
    this.sheet = node("div", { class: "sheet", role: "rowgroup" });
    this.box = node(
      "div",
      { class: "optable", role: "table", tabindex: "0", "aria-label": "ops", "aria-rowcount": filter.rows.length + 1 },
      this.head,
      this.sheet,
    );
    const widths = this.columns.map(({ width, wide }) => (wide ? `minmax(${width}ch, ${width}fr)` : `${width}ch`));
    this.box.style.setProperty("--columns", widths.join(" "));
    const all = this.columns.reduce((sum, { width }) => sum + width, 0);
    this.box.style.setProperty("--least", `calc(${all}ch + ${this.columns.length * GAP + 12}px)`);
    this.box.addEventListener("scroll", () => requestAnimationFrame(() => this.draw()), { passive: true });
    this.box.addEventListener("keydown", (event) => this.key(event));
    this.sheet.addEventListener("click", (event) => {
      const row = event.target.closest(".row");
      if (row) this.choose(Number(row.dataset.at));
    });
    new ResizeObserver(() => this.draw()).observe(this.box);
    filter.listeners.push(() => this.order());
    filter.reveal = (row) => this.reveal(row);
  }

  heading(column) {
    const button = node("button", { type: "button", title: `${column.title}; click to sort` }, column.heading);
    button.addEventListener("click", () => {
      this.down = this.sort === column.name ? !this.down : Boolean(column.number) && column.name !== "index";
      this.sort = column.name;
      this.order();
    });
    return node(
      "span",
      { class: column.number ? "cell number" : "cell", role: "columnheader", "data-column": column.name },
      button,
    );
  }

  order() {
    const column = this.columns.find((one) => one.name === this.sort);
    const sign = this.down ? -1 : 1;
    const pairs = this.filter.shown.map((row) => [column.key(row), row]);
    if (this.sort !== "index" || this.down)
      pairs.sort((one, other) => compare(one[0], other[0], sign) || one[1].index - other[1].index);
    this.sorted = pairs.map(([, row]) => row);
    for (const cell of this.head.children) {
      const own = cell.dataset.column === this.sort;
      cell.setAttribute("aria-sort", own ? (this.down ? "descending" : "ascending") : "none");
    }
    this.sheet.style.height = `${this.sorted.length * ROW}px`;
    this.chosen = null;
    this.details.show(null);
    this.box.scrollTop = 0;
    this.draw();
  }

  draw() {
    const first = Math.max(0, Math.floor(this.box.scrollTop / ROW) - 8);
    const last = Math.min(this.sorted.length, first + Math.ceil(this.box.clientHeight / ROW) + 16);
    const drawn = [];
    for (let at = first; at < last; at += 1) drawn.push(this.row(at));
    this.sheet.replaceChildren(...drawn);
  }

  row(at) {
    const row = this.sorted[at];
    const cells = this.columns.map((column) => {
      const text = column.cell(row);
      const kind = column.number ? ` ${numberClass(text, row.bad && column.name === "bad")}` : "";
      const title =
        column.wide && column.name !== "dtypes" && row[column.name].length > column.width ? row[column.name] : null;
      return node("span", { class: `cell is-${column.name}${kind}`, role: "cell", title }, text);
    });
    const made = node(
      "div",
      {
        class: at === this.chosen ? "row chosen" : "row",
        role: "row",
        "data-at": at,
        "data-index": row.index,
        "aria-rowindex": at + 2,
      },
      cells,
    );
    made.style.top = `${at * ROW}px`;
    return made;
  }

  choose(at) {
    this.chosen = at === this.chosen ? null : at;
    this.details.show(this.chosen === null ? null : this.sorted[this.chosen]);
    this.draw();
  }

  // Show one op: scroll to it and open its details.
  reveal(row) {
    const at = this.sorted.indexOf(row);
    if (at < 0) return;
    this.chosen = null;
    this.box.scrollTop = Math.max(0, (at - 6) * ROW);
    this.choose(at);
    this.box.scrollIntoView({ block: "nearest" });
  }

  key(event) {
    const step = { ArrowDown: 1, ArrowUp: -1 }[event.key];
    if (event.key === "Escape" && this.chosen !== null) this.choose(this.chosen);
    if (!step || !this.sorted.length || event.target !== this.box) return;
    event.preventDefault();
    const next = this.chosen === null ? 0 : Math.min(this.sorted.length - 1, Math.max(0, this.chosen + step));
    if (next !== this.chosen) this.choose(next);
    const top = next * ROW;
    const room = this.box.clientHeight - 2 * ROW;
    if (top < this.box.scrollTop) this.box.scrollTop = top;
    else if (top > this.box.scrollTop + room) this.box.scrollTop = top - room;
  }
}

// What there is nothing of comes last in either order.
function compare(one, other, sign) {
  if (one === other) return 0;
  if (one === null || one === "") return 1;
  if (other === null || other === "") return -1;
  if (Number.isNaN(one) || Number.isNaN(other))
    return Number.isNaN(one) === Number.isNaN(other) ? 0 : Number.isNaN(one) ? -1 : 1;
  return (one < other ? -1 : 1) * sign;
}

function opsSection(filter) {
  const details = new Details();
  const table = new OpsTable(filter, details);
  const empty = node("p", { class: "dim", hidden: true }, "No op fits the filters.");
  filter.listeners.push(() => (empty.hidden = filter.shown.length > 0));
  return section("ops", "Ops", table.box, empty, details.box);
}

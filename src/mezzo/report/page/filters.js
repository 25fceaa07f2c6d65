// Which ops are shown: one filter for the tree, the plots and the table.

const KINDS = {
  casts: ["with casts", (row) => row.casts > 0],
  dots: ["matrix products", (row) => row.call.dot],
  kept: ["with a kept cast", (row) => row.call.kept.length > 0],
  bad: ["with NaN or Inf", (row) => row.bad > 0],
  high: ["float32 from low", (row) => row.call.came.some(isLow) && row.call.gave.includes("float32")],
};

class Filter {
  constructor(rows, regions) {
    this.rows = rows;
    this.regions = regions;
    this.listeners = [];
    this.setupRows = rows.filter((row) => row.setup).length;
    this.clear();
  }

  clear() {
    Object.assign(this, { words: "", dtype: "", rule: "", phase: "", region: "", kind: "", module: [], setup: false });
  }

  get active() {
    return Boolean(
      this.words || this.dtype || this.rule || this.phase || this.region || this.kind || this.module.length,
    );
  }

  // What to take over; all listeners draw again.
  set(changes) {
    Object.assign(this, changes);
    this.apply();
  }

  apply() {
    const tests = this.tests();
    const elsewhere = this.rows.filter((row) => tests.every((test) => test(row)));
    // The tree and the plots by module show what the other filters leave, so that another module can be chosen.
    this.anywhere = elsewhere;
    this.shown = this.module.length ? elsewhere.filter((row) => within(row.steps, this.module)) : elsewhere;
    for (const listener of this.listeners) listener();
  }

  tests() {
    const tests = [];
    const { dtype, rule, phase, region, kind } = this;
    if (!this.setup && this.setupRows) tests.push((row) => !row.setup);
    if (rule) tests.push((row) => row.rule === rule);
    if (phase) tests.push((row) => row.phase === phase);
    if (region) tests.push((row) => row.region === Number(region));
    if (dtype) tests.push((row) => row.call.used.includes(dtype) || row.call.gave.includes(dtype));
    if (kind) tests.push(KINDS[kind][1]);
    for (const word of this.words
      .toLowerCase()
      .split(/\s+/)
      .filter((one) => one && one !== "-")) {
      const wanted = word[0] !== "-";
      const part = wanted ? word : word.slice(1);
      const has = part.startsWith("op:")
        ? (row) => row.op.toLowerCase() === part.slice(3)
        : (row) => haystack(row).includes(part);
      tests.push((row) => has(row) === wanted);
    }
    return tests;
  }
}

// A finding about several modules has * for the part of the name in which they differ.
function within(steps, module) {
  return module.every((step, index) => steps[index] === step || (step === "*" && index < steps.length));
}

function haystack(row) {
  if (row.text === undefined) {
    const call = row.call;
    const parts = [
      row.op,
      row.path,
      `${row.file}:${row.line}`,
      row.place,
      row.function,
      row.rule,
      row.reason,
      row.phase,
    ];
    row.text = [...parts, ...call.names, ...call.came, ...call.gave].join(" ").toLowerCase();
  }
  return row.text;
}

function choices(rows, values) {
  const counts = new Map();
  for (const row of rows) for (const value of new Set(values(row))) counts.set(value, (counts.get(value) || 0) + 1);
  return [...counts].sort((one, other) => other[1] - one[1]).map(([value, number]) => [value, `${value} (${number})`]);
}

function filterBar(filter) {
  const rows = filter.rows;
  const words = node("input", {
    type: "search",
    id: "words",
    placeholder: "op, module, file:line, rule, weight; -word leaves out",
    title: "press / to come here; op:aten::linear finds that op alone",
    "aria-label": "Filter by text",
    autocomplete: "off",
    spellcheck: "false",
  });
  let wait = 0;
  words.addEventListener("input", () => {
    clearTimeout(wait);
    wait = setTimeout(() => filter.set({ words: words.value }), rows.length > 5000 ? 120 : 0);
  });
  const selects = [];
  const select = (name, label, options) => {
    if (options.length < 2 && name !== "kind") return null;
    const made = node("select", { id: name, "aria-label": label }, node("option", { value: "" }, label));
    for (const [value, text] of options) made.append(node("option", { value }, text));
    made.addEventListener("change", () => filter.set({ [name]: made.value }));
    selects.push([name, made]);
    return made;
  };
  const dtypes = choices(rows, (row) => [...row.call.used, ...row.call.gave].filter(isFloat));
  const kinds = Object.entries(KINDS)
    .filter(([, [, test]]) => rows.some(test))
    .map(([name, [text]]) => [name, text]);
  const regions = filter.regions.map((region, index) => [index, region.name]);
  const module = node("button", {
    id: "module",
    class: "chip",
    type: "button",
    title: "show all modules",
    hidden: true,
  });
  module.addEventListener("click", () => filter.set({ module: [] }));
  const setup = node("button", {
    id: "setup",
    class: "chip",
    type: "button",
    title: "ops that fill parameters before a module has run, where autocast is off",
    hidden: !filter.setupRows,
  });
  setup.addEventListener("click", () => filter.set({ setup: !filter.setup }));
  const clear = node("button", { id: "clear", type: "button" }, "clear");
  clear.addEventListener("click", () => {
    filter.clear();
    filter.apply();
  });
  const number = node("output", { id: "shown", "aria-live": "polite" });
  filter.listeners.push(() => {
    if (words.value !== filter.words) words.value = filter.words;
    for (const [name, made] of selects) {
      made.value = filter[name];
      made.classList.toggle("set", Boolean(filter[name]));
    }
    module.hidden = !filter.module.length;
    module.textContent = `${moduleName(filter.module)} \u00d7`;
    setup.textContent = `${many(filter.setupRows, "initialisation op")}: ${filter.setup ? "hide" : "show"}`;
    clear.hidden = !filter.active;
    number.textContent = filter.shown.length < rows.length
      ? `${count(filter.shown.length)} of ${many(rows.length, "op")}`
      : many(rows.length, "op");
  });
  document.addEventListener("keydown", (event) => {
    if (event.key === "/" && !/INPUT|SELECT|TEXTAREA/.test(event.target.tagName)) {
      event.preventDefault();
      words.focus();
      words.select();
    } else if (event.key === "Escape" && event.target === words) {
      filter.set({ words: "" });
    }
  });
  return node(
    "div",
    { class: "filters", role: "search" },
    words,
    select(
      "phase",
      "any pass",
      choices(rows, (row) => [row.phase]),
    ),
    select("dtype", "any dtype", dtypes),
    select(
      "rule",
      "any rule",
      choices(rows, (row) => [row.rule]),
    ),
    kinds.length ? select("kind", "all ops", kinds) : null,
    select("region", "all regions", regions),
    module,
    setup,
    clear,
    number,
  );
}

function isTorch() {
  return document.body.dataset.framework === "torch";
}

function moduleName(steps) {
  return steps.join(isTorch() ? "." : "/");
}

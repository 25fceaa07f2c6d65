// The ops as objects, from the columns that the file has.

const DTYPES = ["float16", "bfloat16"];

function readNumbers(list) {
  if (!list) return null;
  const [elements, max, min, nan, inf, error] = list.slice(0, 6).map(real);
  const losses = {};
  DTYPES.forEach((dtype, index) => {
    const [overflow, underflow, subnormal] = list.slice(6 + 3 * index, 9 + 3 * index);
    losses[dtype] = { overflow, underflow, subnormal };
  });
  return { elements, max, min, nan, inf, error, losses, first: list[12], counts: list[13], masked: list[14] };
}

function readRows(data) {
  const column = data.columns;
  const text = (name, index) => data.strings[column[name][index]];
  const keys = data.places.map(([, steps]) => steps.join("\u0000"));
  const rows = column.op.map((_, index) => {
    const call = data.calls[column.call[index]];
    const source = data.sources[column.source[index]] || null;
    const [path, steps] = data.places[column.place[index]];
    const key = keys[column.place[index]];
    const numbers = readNumbers(data.numbers[column.numbers[index]]);
    return {
      index,
      op: text("op", index),
      rule: text("rule", index),
      reason: text("reason", index),
      phase: text("phase", index),
      path,
      steps,
      key,
      call,
      numbers,
      file: source ? source[0] : "",
      line: source ? source[1] : 0,
      function: source ? source[2] : "",
      place: source ? source[3] : "",
      region: column.region[index],
      rank: column.rank[index],
      times: column.times[index],
      casts: call.casts,
      moved: call.read + call.cast,
      // What an op that encloses others gives is what they gave.
      written: call.encloses ? 0 : call.bytes.reduce((sum, one) => sum + one, 0),
      max: numbers ? numbers.max : null,
      bad: numbers ? numbers.nan + numbers.inf - numbers.masked : null,
      overflow: numbers ? numbers.losses.float16.overflow : null,
      underflow: numbers ? numbers.losses.float16.underflow : null,
      error: numbers ? numbers.error : null,
      setup: false,
    };
  });
  data.regions.forEach((_, index) => markSetup(rows.filter((row) => row.region === index)));
  return rows;
}

// What makes the parameters: ops in place, and others on their lines, before any module runs and where autocast is off.
function markSetup(rows) {
  const early = rows.slice(
    0,
    Math.max(
      0,
      rows.findIndex((row) => row.path),
    ),
  );
  const outside = early.filter((row) => row.phase === "forward" && row.rule === "autocast off");
  const made = outside.filter((row) => /^aten::[a-z]\w*[a-z]_$/.test(row.op));
  const lines = new Set(made.map((row) => row.place));
  for (const row of outside) row.setup = made.includes(row) || (row.place !== "" && lines.has(row.place));
}

// What a set of ops adds up to; `add` takes one more in.
class Sums {
  constructor() {
    Object.assign(this, { ops: 0, casts: 0, moved: 0, written: 0, low: 0, floats: 0, masked: 0, dtypes: new Map() });
    Object.assign(this, { elements: 0, max: null, bad: 0, error: null, overflow: 0, underflow: 0 });
  }

  add(row) {
    this.ops += 1;
    this.casts += row.casts;
    this.moved += row.moved;
    this.written += row.written;
    row.call.gave.forEach((dtype, index) => {
      if (row.call.encloses) return;
      const size = row.call.bytes[index];
      this.dtypes.set(dtype, (this.dtypes.get(dtype) || 0) + size);
      // By elements and without complex numbers, as the `low_share` of the report's totals.
      const elements = elementsOf(row.call.out[index]);
      if (/^b?float/.test(dtype)) this.floats += elements;
      if (isLow(dtype)) this.low += elements;
    });
    if (row.numbers) this.addNumbers(row.numbers, row.phase !== "optimizer");
  }

  addNumbers(numbers, mayBeLow) {
    this.max = worse(this.max, numbers.max);
    this.bad += numbers.nan + numbers.inf - numbers.masked;
    this.masked += numbers.masked;
    // An optimizer works in the dtype of its parameters, whatever the region's: float16 would lose nothing of it. And
    // the first steps of Adam are the gradients' signs, so that the errors of numbers near 0 would stand above all.
    if (!mayBeLow) return;
    this.error = worse(this.error, numbers.error);
    this.elements += numbers.elements;
    this.overflow += numbers.losses.float16.overflow * numbers.elements;
    this.underflow += numbers.losses.float16.underflow * numbers.elements;
  }

  // Take in other sums; the numbers of a module are those of what is in it.
  merge(other) {
    for (const name of [
      "ops",
      "casts",
      "moved",
      "written",
      "low",
      "floats",
      "masked",
      "elements",
      "bad",
      "overflow",
      "underflow",
    ]) {
      this[name] += other[name];
    }
    for (const [dtype, size] of other.dtypes) this.dtypes.set(dtype, (this.dtypes.get(dtype) || 0) + size);
    this.max = worse(this.max, other.max);
    this.error = worse(this.error, other.error);
  }

  get lowShare() {
    return this.floats ? this.low / this.floats : null;
  }

  share(name) {
    return this.elements ? this[name] / this.elements : null;
  }

  get sortedDtypes() {
    return [...this.dtypes].filter(([, size]) => size > 0).sort(([one], [other]) => byDtype(one, other));
  }

  static of(rows) {
    const sums = new Sums();
    for (const row of rows) sums.add(row);
    return sums;
  }
}

// Without the optimizer's ops, unless there are no others.
function withoutOptimizer(rows) {
  const others = rows.filter((row) => row.phase !== "optimizer");
  return others.length ? others : rows;
}

// The larger of two, NaN above all, none below all.
function worse(one, other) {
  if (one === null || other === null) return one === null ? other : one;
  return Number.isNaN(one) || Number.isNaN(other) ? NaN : Math.max(one, other);
}

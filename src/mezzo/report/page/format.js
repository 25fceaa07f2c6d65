// How numbers and dtypes are said.

const UNITS = ["B", "KiB", "MiB", "GiB", "TiB"];

function bytes(number) {
  let unit = 0;
  let value = number;
  while (value >= 1024 && unit < UNITS.length - 1) {
    value /= 1024;
    unit += 1;
  }
  return unit ? `${value < 99.95 ? value.toFixed(1) : Math.round(value)} ${UNITS[unit]}` : `${number} B`;
}

function count(number) {
  return number.toLocaleString("en-US").replaceAll(",", "\u2009");
}

// "NaN" and "Infinity" come as text: JSON has no such numbers.
function real(value) {
  if (value === null || value === undefined) return null;
  return Number(value);
}

function small(value) {
  if (value === null) return "";
  if (value === 0) return "0";
  if (!Number.isFinite(value)) return Number.isNaN(value) ? "NaN" : value > 0 ? "Inf" : "-Inf";
  const size = Math.abs(value);
  if (size >= 1000 && size < 100000) return String(Math.round(value));
  if (size >= 0.0001 && size < 100000) return String(Number(value.toPrecision(3)));
  return String(Number(value.toPrecision(3)).toExponential()).replace("e+", "e");
}

function percent(share) {
  if (share === null || share === undefined) return "";
  if (share === 0) return "0";
  const value = share * 100;
  if (value < 0.01) return "<0.01%";
  return `${value >= 10 ? value.toFixed(0) : value.toPrecision(2)}%`;
}

// A cell with a number: an alarm stands out, a 0 stands back.
function numberClass(text, alarm) {
  if (alarm) return "number bad";
  return text === "0" ? "number zero" : "number";
}

function many(number, one, several) {
  return `${count(number)} ${number === 1 ? one : several || `${one}s`}`;
}

function short(dtype) {
  if (dtype === "bfloat16") return "bf16";
  return dtype
    .replace(/^float/, "f")
    .replace(/^uint/, "u")
    .replace(/^int/, "i")
    .replace(/^complex/, "c");
}

// Which colour a dtype has: low ones apart, and each of them apart from the other.
function family(dtype) {
  if (dtype === "bfloat16") return "bf16";
  if (dtype === "float16") return "f16";
  if (dtype === "float32") return "f32";
  if (dtype === "float64") return "f64";
  return /^float[468]/.test(dtype) ? "f8" : "other";
}

function isFloat(dtype) {
  return /^(b?float|complex)/.test(dtype);
}

function isLow(dtype) {
  return /^(bfloat16|float16|float[468]_)/.test(dtype);
}

// Sizes known by name only count as 1.
function elementsOf(shape) {
  return shape.reduce((product, size) => product * (typeof size === "number" ? size : 1), 1);
}

const ORDER = ["float64", "float32", "bfloat16", "float16"];

// The same order wherever dtypes stand side by side: the wide floats, the low ones, the rest by name.
function byDtype(one, other) {
  const place = (dtype) => (ORDER.includes(dtype) ? ORDER.indexOf(dtype) : ORDER.length + (isFloat(dtype) ? 0 : 1));
  return place(one) - place(other) || (one < other ? -1 : 1);
}

function dtypeMark(dtype) {
  return node("span", { class: `dtype ${family(dtype)}` }, short(dtype));
}

function shapeText(shape) {
  return shape.length ? shape.join("\u00d7") : "scalar";
}

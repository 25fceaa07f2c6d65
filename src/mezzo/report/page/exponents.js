// How large the numbers are: a histogram of their exponents of 2, over the ranges of float16 and bfloat16.

// The exponents of the smallest subnormal, the smallest normal and the largest number.
const RANGES = { float16: [-24, -14, 15], bfloat16: [-133, -126, 127] };

function exponentCounts(rows) {
  const phases = new Map();
  for (const row of rows) {
    if (!row.numbers || !row.numbers.counts.length) continue;
    const phase = phaseClass(row.phase);
    if (!phases.has(phase)) phases.set(phase, new Map());
    const counts = phases.get(phase);
    row.numbers.counts.forEach((number, offset) => {
      const exponent = row.numbers.first + offset;
      if (number) counts.set(exponent, (counts.get(exponent) || 0) + number);
    });
  }
  return phases;
}

const PHASE_NAMES = { forward: "activations (forward)", backward: "gradients (backward)", optimizer: "optimizer" };

function exponentPlot(rows, width) {
  const phases = exponentCounts(rows);
  if (!phases.size) return null;
  const exponents = [...phases.values()].flatMap((counts) => [...counts.keys()]);
  const low = Math.min(-27, ...exponents) - 1;
  const high = Math.max(18, ...exponents) + 2;
  const [left, top, tall] = [44, 16, 150];
  const x = (exponent) => left + ((width - left - 6) * (exponent - low)) / (high - low);
  const picture = svg("svg", {
    width,
    height: top + tall + 64,
    class: "exponents",
    role: "img",
    "aria-label": "histogram of exponents",
  });
  outside(picture, x, low, high, top, tall);
  const shares = [...phases].map(([phase, counts]) => {
    const all = [...counts.values()].reduce((sum, one) => sum + one, 0);
    return [phase, [...counts].map(([exponent, number]) => [exponent, number, number / all])];
  });
  const least = Math.min(...shares.flatMap(([, bins]) => bins.map(([, , share]) => share)));
  const floor = Math.max(-9, Math.floor(Math.log10(least)) - 0.3);
  const y = (share) => top + tall * (Math.max(floor, Math.log10(share)) / floor);
  for (let power = 0; power >= floor; power -= Math.max(1, Math.ceil(-floor / 5))) {
    picture.append(
      svg("line", { class: "grid", x1: left, x2: width, y1: y(10 ** power), y2: y(10 ** power) }),
      svg(
        "text",
        { class: "tick", x: left - 6, y: y(10 ** power) + 4, "text-anchor": "end" },
        power >= -2 ? `${100 * 10 ** power}%` : `1e${power + 2}%`,
      ),
    );
  }
  for (const [phase, bins] of shares) {
    for (const [exponent, number, share] of bins) {
      picture.append(
        svg(
          "rect",
          {
            class: `bin ${phase}`,
            x: (x(exponent) + 0.5).toFixed(2),
            width: Math.max(1, x(exponent + 1) - x(exponent) - 1).toFixed(2),
            y: y(share).toFixed(2),
            height: Math.max(0, top + tall - y(share)).toFixed(2),
            "data-exponent": exponent,
            "data-count": number,
          },
          svg(
            "title",
            {},
            `2^${exponent} to 2^${exponent + 1}: ${count(number)} numbers, `,
            `${percent(share)} of the ${PHASE_NAMES[phase]}`,
          ),
        ),
      );
    }
  }
  axis(picture, x, low, high, top + tall, width);
  Object.keys(RANGES).forEach((dtype, line) => ruler(picture, dtype, x, low, high, top + tall + 26 + 18 * line));
  const legend = node(
    "p",
    { class: "legend" },
    shares.map(([phase]) => node("span", {}, node("i", { class: `key ${phase}` }), PHASE_NAMES[phase])),
  );
  return node("div", {}, picture, legend);
}

// What float16 turns into 0, keeps with fewer digits, or turns into Inf.
function outside(picture, x, low, high, top, tall) {
  const [smallest, normal, largest] = RANGES.float16;
  const zones = [
    [low, smallest, "lost", "0 in float16"],
    [smallest, normal, "weak", "subnormal"],
    [largest + 1, high, "lost", "Inf"],
  ];
  for (const [from, to, kind, text] of zones) {
    picture.append(
      svg("rect", { class: `zone ${kind}`, x: x(from), width: x(to) - x(from), y: top, height: tall }),
      svg(
        "text",
        { class: "tick", x: (x(from) + x(to)) / 2, y: top - 4, "text-anchor": "middle" },
        x(to) - x(from) > 7 * text.length ? text : "",
      ),
    );
  }
}

function axis(picture, x, low, high, at, width) {
  picture.append(svg("line", { class: "axis", x1: x(low), x2: width, y1: at, y2: at }));
  const step = [2, 5, 10, 20, 50].find((one) => x(one) - x(0) > 34) || 100;
  for (let exponent = Math.ceil(low / step) * step; exponent <= high - 1; exponent += step) {
    picture.append(
      svg(
        "text",
        { class: "tick", x: x(exponent), y: at + 13, "text-anchor": "middle" },
        "2",
        svg("tspan", { dy: -4, class: "power" }, exponent),
      ),
    );
  }
}

function ruler(picture, dtype, x, low, high, at) {
  const [smallest, normal, largest] = RANGES[dtype];
  const clip = (exponent) => x(Math.min(high, Math.max(low, exponent)));
  picture.append(svg("text", { class: "tick", x: x(low) - 6, y: at + 8, "text-anchor": "end" }, short(dtype)));
  for (const [from, to, kind] of [
    [smallest, normal, "weak"],
    [normal, largest + 1, "normal"],
  ]) {
    if (clip(to) - clip(from) <= 0) continue;
    picture.append(
      svg(
        "rect",
        { class: `ruler ${family(dtype)} ${kind}`, x: clip(from), width: clip(to) - clip(from), y: at, height: 9 },
        svg("title", {}, `${dtype}: ${kind === "weak" ? "subnormal" : "normal"} from 2^${from} to 2^${to}`),
      ),
    );
  }
}

function exponentsFigure(filter) {
  return figure(
    "plot-exponents",
    "How large the numbers are, by exponent, with float16's and bfloat16's ranges",
    (width) => exponentPlot(withoutOptimizer(filter.shown), width),
    filter,
  );
}

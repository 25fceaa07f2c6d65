// Plots by module and along the program. They show what the filters leave.

const TOP = 10;

// Bars with their numbers; click on one to see its ops.
function barList(items, text) {
  const largest = Math.max(...items.map((item) => item.length), 0) || 1;
  return node(
    "div",
    { class: "barlist" },
    items.map((item) => {
      const bar = node("span", { class: `fill ${item.kind || ""}`, "data-value": item.value });
      bar.style.width = `${Math.max(0.5, (100 * item.length) / largest)}%`;
      const label = node(
        item.act ? "button" : "span",
        { class: "label", title: item.name, type: item.act ? "button" : null },
        node("bdi", {}, item.name),
      );
      if (item.act) label.addEventListener("click", item.act);
      return node(
        "div",
        { class: "barrow", "data-name": item.name },
        label,
        node("span", { class: "track" }, bar),
        node("span", { class: "number" }, text(item)),
      );
    }),
  );
}

function figure(id, title, draw, filter) {
  const place = node("div", { class: "plot" });
  const made = node("figure", { id }, node("figcaption", {}, title), place);
  const again = () => {
    const drawn = made.clientWidth ? draw(place.clientWidth) : null;
    place.replaceChildren(drawn || node("p", { class: "dim" }, "Nothing here."));
  };
  filter.listeners.push(again);
  let width = 0;
  new ResizeObserver(() => {
    if (Math.abs(made.clientWidth - width) > 2) again();
    width = made.clientWidth;
  }).observe(made);
  return made;
}

function writtenPlot(filter) {
  return figure(
    "plot-written",
    "Results by dtype",
    () => {
      const sums = Sums.of(filter.shown);
      const items = sums.sortedDtypes.map(([dtype, size]) => ({
        name: dtype,
        value: size,
        length: size,
        kind: family(dtype),
        act: () => filter.set({ dtype: filter.dtype === dtype ? "" : dtype }),
      }));
      return items.length
        ? barList(items, (item) => `${bytes(item.value)}  ${percent(item.value / sums.written)}`)
        : null;
    },
    filter,
  );
}

function castPlot(filter) {
  return figure(
    "plot-casts",
    isTorch() ? "Casts by module" : "Casts by part of the program",
    () => {
      const found = byModule(filter.anywhere).filter((one) => one.sums.casts);
      found.sort((one, other) => other.sums.moved - one.sums.moved);
      const items = found.slice(0, TOP).map(({ steps, sums }) => ({
        name: moduleName(steps),
        value: sums.casts,
        size: sums.moved,
        length: sums.moved,
        act: () => filter.set({ module: steps }),
      }));
      return items.length
        ? withRest(
            barList(items, (item) => `${many(item.value, "cast")}, ${bytes(item.size)}`),
            found.length,
          )
        : null;
    },
    filter,
  );
}

// On a logarithmic scale that starts a decade below the smallest.
function errorPlot(filter) {
  return figure(
    "plot-error",
    "Largest error by module, against float32",
    () => {
      const found = byModule(filter.anywhere).filter((one) => one.sums.error !== null && one.sums.error !== 0);
      if (!found.length) return null;
      const size = (one) => (Number.isFinite(one.sums.error) ? Math.log10(one.sums.error) : 1);
      found.sort((one, other) => size(other) - size(one));
      const top = found.slice(0, TOP);
      const floor = size(top[top.length - 1]) - 1;
      const items = top.map((one) => ({
        name: moduleName(one.steps),
        value: one.sums.error,
        length: size(one) - floor,
        kind: one.sums.error < 0.1 ? "" : "warn",
        act: () => filter.set({ module: one.steps }),
      }));
      return withRest(
        barList(items, (item) => small(item.value)),
        found.length,
      );
    },
    filter,
  );
}

function withRest(list, all) {
  if (all > TOP) list.append(node("p", { class: "dim" }, `the first ${TOP} of ${count(all)} modules`));
  return list;
}

function opAndPlace(row) {
  return [row.op.replace(/^aten::/, ""), row.path || row.place].filter(Boolean).join(", ");
}

// One value of each op in time order; of many ops in the same place of the picture, the largest.
function alongPlot(filter, id, title, value, limit) {
  return figure(
    id,
    title,
    (width) => {
      const rows = withoutOptimizer(filter.shown);
      const points = rows
        .map((row) => [row, value(row)])
        .filter(([, one]) => one !== null && one > 0 && Number.isFinite(one));
      if (!points.length) return null;
      const logs = points.map(([, one]) => Math.log10(one));
      const low = Math.floor(logs.reduce((one, other) => Math.min(one, other)));
      const high = Math.max(
        low + 1,
        Math.ceil(
          Math.max(
            logs.reduce((one, other) => Math.max(one, other)),
            limit ? Math.log10(limit) : low,
          ),
        ),
      );
      const [left, bottom, height] = [44, 18, 150];
      const last = rows[rows.length - 1].index;
      const start = rows[0].index;
      const x = (index) => left + ((width - left - 8) * (index - start)) / Math.max(1, last - start);
      const y = (log) => 16 + ((height - bottom - 16) * (high - log)) / (high - low);
      const picture = svg("svg", { width, height, class: "along", role: "img", "aria-label": title });
      const step = Math.max(1, Math.ceil((high - low) / 5));
      for (let power = low; power <= high; power += step) {
        picture.append(
          svg("line", { class: "grid", x1: left, x2: width, y1: y(power), y2: y(power) }),
          svg(
            "text",
            { class: "tick", x: left - 6, y: y(power) + 4, "text-anchor": "end" },
            power >= -2 && power <= 4 ? String(Number((10 ** power).toPrecision(1))) : `1e${power}`,
          ),
        );
      }
      if (limit) {
        picture.append(
          svg("line", { class: "limit", x1: left, x2: width, y1: y(Math.log10(limit)), y2: y(Math.log10(limit)) }),
          svg(
            "text",
            { class: "tick", x: width - 2, y: y(Math.log10(limit)) - 3, "text-anchor": "end" },
            `largest float16, ${limit}`,
          ),
        );
      }
      picture.append(
        svg("text", { class: "tick", x: left, y: height - 4 }, `op ${start + 1}`),
        svg("text", { class: "tick", x: width - 2, y: height - 4, "text-anchor": "end" }, `op ${last + 1}`),
      );
      const seen = new Map();
      points.forEach(([row, one], at) => {
        const column = `${Math.round(x(row.index))} ${row.phase}`;
        const before = seen.get(column);
        if (!before || before.log < logs[at]) seen.set(column, { row, one, log: logs[at] });
      });
      for (const { row, one, log } of seen.values()) {
        picture.append(
          svg(
            "circle",
            {
              class: `dot ${phaseClass(row.phase)}`,
              cx: x(row.index).toFixed(1),
              cy: y(log).toFixed(1),
              r: 2,
              "data-value": one,
              onclick: () => filter.reveal(row),
            },
            svg("title", {}, `${row.index + 1}  ${opAndPlace(row)}: ${small(one)}`),
          ),
        );
      }
      const top = [...seen.values()].reduce((one, other) => (other.log > one.log ? other : one));
      const right = x(top.row.index) > width * 0.6;
      picture.append(
        svg(
          "text",
          {
            class: "tick top",
            x: x(top.row.index) + (right ? 3 : -3),
            y: y(top.log) - 6,
            "text-anchor": right ? "end" : "start",
          },
          `${small(top.one)}  ${opAndPlace(top.row)}`,
        ),
      );
      return node("div", {}, picture, phaseLegend(new Set(points.map(([row]) => row.phase))));
    },
    filter,
  );
}

function phaseClass(phase) {
  return { backward: "backward", optimizer: "optimizer" }[phase] || "forward";
}

function phaseLegend(phases) {
  return node(
    "p",
    { class: "legend" },
    [...phases].map((phase) => node("span", {}, node("i", { class: `key ${phaseClass(phase)}` }), phase)),
  );
}

// The top of the page: what was explained, what it adds up to, what the user may not expect.

const FEW = 6;

function themeButton() {
  const theme = node(
    "button",
    { id: "theme", type: "button", title: "light, dark, or as the system has it" },
    "theme: auto",
  );
  const themes = ["auto", "light", "dark"];
  theme.addEventListener("click", () => {
    const now = document.documentElement.dataset.theme || "auto";
    const next = themes[(themes.indexOf(now) + 1) % themes.length];
    document.documentElement.dataset.theme = next;
    theme.textContent = `theme: ${next}`;
  });
  return theme;
}

function header(data) {
  const regions = data.regions.map((region) => {
    const settings = Object.entries(region.settings).map(([name, value]) =>
      node("span", { class: "setting" }, `${name} `, node("b", {}, value)),
    );
    const times = region.count > 1 ? ` (${region.count} times)` : "";
    return node("p", { class: "settings" }, region.name === data.title ? "" : `${region.name}${times}`, settings);
  });
  return node(
    "header",
    {},
    node(
      "div",
      { class: "title" },
      node("h1", {}, data.title),
      node("span", { class: "framework" }, `mixed precision in ${data.framework}`),
      themeButton(),
    ),
    regions.slice(0, 12),
  );
}

function fact(id, name, value, ...more) {
  return node(
    "div",
    { class: "fact", id },
    node("h3", {}, name),
    node("div", { class: "value" }, value),
    node("div", { class: "more" }, more),
  );
}

// A bar with a part for each dtype, and what the parts are.
function dtypeBar(sums, wide) {
  const bar = node("span", { class: wide ? "bar wide" : "bar" });
  for (const [dtype, size] of sums.sortedDtypes) {
    const part = node("span", {
      class: `part ${family(dtype)}`,
      title: `${dtype}: ${bytes(size)}`,
      "data-bytes": size,
    });
    part.style.flexGrow = String(size / sums.written);
    bar.append(part);
  }
  return bar;
}

function totals(data, rows, filter) {
  const sums = Sums.of(rows);
  const dots = data.totals.dots;
  const dotNumber = dots.reduce((sum, dot) => sum + dot.count, 0);
  const dotLines = dots.slice(0, 4).map((dot) =>
    node(
      "div",
      { class: "line" },
      node("b", {}, count(dot.count)),
      " ",
      dot.used.map((dtype, index) => [index ? " \u00d7 " : "", dtypeMark(dtype)]),
      " \u2192 ",
      dot.gave.map((dtype, index) => [index ? " " : "", dtypeMark(dtype)]),
      dot.runs === dot.count ? "" : ` (run ${count(dot.runs)} times)`,
    ),
  );
  const kept = rows.reduce((sum, row) => sum + row.call.kept.length, 0);
  const rules = Object.entries(data.totals.rules)
    .slice(0, 6)
    .map(([rule, number]) => {
      const button = node(
        "button",
        { class: "plain", type: "button", title: "show these ops" },
        node("b", {}, count(number)),
        ` ${rule}`,
      );
      button.addEventListener("click", () => filter.set({ rule: filter.rule === rule ? "" : rule }));
      return button;
    });
  const legend = sums.sortedDtypes.slice(0, 5).map(([dtype, size]) => [dtypeMark(dtype), ` ${bytes(size)}  `]);
  const facts = [
    fact("fact-ops", "ops", count(sums.ops), rules),
    fact("fact-dots", "matrix products", count(dotNumber), dotLines),
    fact(
      "fact-casts",
      "casts",
      count(sums.casts),
      !sums.casts
        ? ""
        : node(
            "div",
            { class: "line" },
            `read ${bytes(data.totals.cast_bytes_read)}, wrote ${bytes(data.totals.cast_bytes_written)}`,
          ),
      kept ? node("div", { class: "line" }, `${many(kept, "operand")} by a cast kept from before`) : "",
    ),
    fact(
      "fact-written",
      "results written",
      bytes(sums.written),
      dtypeBar(sums, true),
      node("div", { class: "line" }, legend),
      sums.lowShare === null
        ? ""
        : node("div", { class: "line" }, `${percent(sums.lowShare)} of the float results in a low dtype`),
    ),
  ];
  const residuals = data.regions
    .filter((region) => region.residuals)
    .map((region) => node("div", { class: "line" }, region.residuals));
  if (residuals.length) facts.push(fact("fact-residuals", "kept for backward", "", residuals.slice(0, 3)));
  if (sums.max !== null) facts.push(numbersFact(sums, filter));
  return node("div", { class: "facts" }, facts);
}

function numbersFact(sums, filter) {
  const bad = node(
    "button",
    { class: "plain", type: "button", title: "show these ops" },
    sums.bad ? node("b", { class: "bad" }, `${count(sums.bad)} NaN or Inf`) : "no NaN, no Inf",
  );
  if (sums.bad) bad.addEventListener("click", () => filter.set({ kind: filter.kind === "bad" ? "" : "bad" }));
  const masks = node("div", { class: "line" }, `${count(sums.masked)} Inf of masks`);
  return fact(
    "fact-numbers",
    "largest result",
    small(sums.max),
    bad,
    sums.masked ? masks : "",
    !sums.elements
      ? ""
      : node(
          "div",
          { class: "line" },
          `in float16: ${percent(sums.share("overflow"))} would be Inf, ${percent(sums.share("underflow"))} would be 0`,
        ),
    sums.error === null ? "" : node("div", { class: "line" }, `largest error against float32: ${small(sums.error)}`),
  );
}

function findings(data, filter) {
  const all = data.regions.flatMap((region, index) => region.findings.map((finding) => [finding, index]));
  const list = node("ol", { class: "findings" });
  all.forEach(([finding], index) => list.append(findingItem(finding, filter, index >= FEW)));
  const title = all.length ? `Findings (${all.length})` : "Findings";
  if (!all.length) return section("findings", title, node("p", { class: "dim" }, "None."));
  const more = node("button", { type: "button", id: "all-findings" }, `show all ${all.length}`);
  more.addEventListener("click", () => {
    for (const item of list.children) item.hidden = false;
    more.remove();
  });
  return section("findings", title, list, all.length > FEW ? more : null);
}

function findingItem(finding, filter, hidden) {
  const where = [];
  if (finding.steps.length) where.push([moduleName(finding.steps), { module: finding.steps, words: "" }]);
  if (finding.place)
    where.push([
      finding.place + (finding.function ? ` (${finding.function})` : ""),
      { words: finding.place, module: [] },
    ]);
  const links = where.map(([text, change]) => {
    const link = node("button", { class: "plain place", type: "button", title: "show its ops" }, text);
    link.addEventListener("click", () => {
      filter.set({ dtype: "", rule: "", phase: "", region: "", kind: "", setup: true, ...change });
      document.getElementById("ops").scrollIntoView({ block: "start" });
    });
    return link;
  });
  const advice = finding.advice ? adviceBlock(finding.advice) : null;
  return node(
    "li",
    { hidden },
    node(
      "div",
      { class: "finding-head" },
      node("span", { class: "kind" }, finding.kind),
      links,
      finding.count > 1 ? node("span", { class: "dim" }, `${count(finding.count)} times`) : "",
    ),
    node("div", {}, prose(finding.message)),
    advice,
  );
}

// What to do about it: a sentence, with the code in it ready to copy. Code is `marked`, or is the lines after the
// first, or is a call that ends the sentence.
function adviceBlock(text) {
  const [head, ...lines] = text.split("\n");
  const marked = text
    .split("`")
    .filter((_, index) => index % 2)
    .sort((one, other) => other.length - one.length)[0];
  const call = head.match(/^(.*: )?([\w.]+\([^]*\))$/);
  let [body, code] = [node("span", {}, prose(text)), marked];
  if (lines.length) {
    const least = Math.min(...lines.filter((line) => line.trim()).map((line) => line.search(/\S/)));
    code = lines.map((line) => line.slice(least)).join("\n");
    body = node("div", {}, prose(head), node("pre", {}, code));
  } else if (!marked && call) {
    code = call[2];
    body = node("span", {}, call[1] || "", node("code", {}, code));
  }
  return node("div", { class: "advice" }, body, code ? copyButton(code, body.querySelector("pre, code")) : null);
}

// A list of which only the first are in sight.
function foldedList(items, kind, first) {
  const number = items.length - first;
  const rest = items.length > first ? items.splice(first) : [];
  const list = node("ul", { class: kind }, items);
  return rest.length
    ? [list, node("details", {}, node("summary", {}, `${number} more`), node("ul", { class: kind }, rest))]
    : [list];
}

function notes(data) {
  if (!data.notes.length) return null;
  const items = data.notes.map((note) => node("li", {}, prose(note)));
  return section("notes", "Notes", ...foldedList(items, "notes", FEW));
}

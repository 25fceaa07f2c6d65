"use strict";
// How a node is made. Text goes in as text nodes only: what a report says is never read as HTML.

const SVG = "http://www.w3.org/2000/svg";

function fill(made, attributes, children) {
  for (const [name, value] of Object.entries(attributes || {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else made.setAttribute(name, value === true ? "" : String(value));
  }
  for (const child of children.flat(Infinity)) {
    if (child === null || child === undefined || child === false || child === "") continue;
    made.append(child instanceof Node ? child : document.createTextNode(String(child)));
  }
  return made;
}

function node(name, attributes, ...children) {
  return fill(document.createElement(name), attributes, children);
}

function svg(name, attributes, ...children) {
  return fill(document.createElementNS(SVG, name), attributes, children);
}

function section(id, title, ...children) {
  return node(
    "section",
    { id, "aria-labelledby": `${id}-title` },
    node("h2", { id: `${id}-title` }, title),
    ...children,
  );
}

// A button that copies a text. Where the browser has no clipboard for the page, it selects the text instead.
function copyButton(text, from) {
  const button = node("button", { class: "copy", type: "button", title: "copy" }, "copy");
  button.addEventListener("click", async () => {
    try {
      await navigator.clipboard.writeText(text);
      button.textContent = "copied";
    } catch {
      getSelection().selectAllChildren(from);
      button.textContent = "selected";
    }
    setTimeout(() => (button.textContent = "copy"), 1500);
  });
  return button;
}

// Text in which `this` is code.
function prose(text) {
  return text.split("`").map((part, index) => (index % 2 ? node("code", {}, part) : part));
}

/* What all views use: elements, numbers as text. Texts of models are only ever put in as text. */

const SVG = "http://www.w3.org/2000/svg";

/** An HTML element. Attributes that begin with "on" are listeners; children are elements or texts. */
function el(tag, attributes = {}, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

/** The same for SVG. */
function svg(tag, attributes = {}, ...children) {
  return fill(document.createElementNS(SVG, tag), attributes, children);
}

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else element.setAttribute(name, value === true ? "" : String(value));
  }
  element.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return element;
}

const UNITS = ["B", "kB", "MB", "GB", "TB"];

/** 1536 -> "1.54 kB": powers of a thousand, three digits. */
function bytesText(bytes) {
  if (bytes === null || bytes === undefined) return "unknown";
  let place = 0;
  let number = bytes;
  while (number >= 999.5 && place < UNITS.length - 1) {
    number /= 1000;
    place += 1;
  }
  return `${place ? number.toPrecision(3) : number} ${UNITS[place]}`;
}

/** Whole numbers with thin spaces between thousands. */
function countText(count) {
  return Math.round(count).toString().replace(/\B(?=(\d{3})+(?!\d))/g, "\u202f");
}

/** A number with four digits at most; a dash where there is none. */
function numberText(number, digits = 4) {
  if (number === null || number === undefined) return "\u2013";
  if (Number.isInteger(number) && Math.abs(number) < 1e7) return String(number);
  return String(Number(number.toPrecision(digits)));
}

function shareText(share) {
  return share === null || share === undefined ? "\u2013" : `${(100 * share).toFixed(share && share < 0.0995 ? 1 : 0)} %`;
}

/** Microseconds as text with a unit that fits. */
function timeText(us) {
  if (us >= 1e6) return `${(us / 1e6).toPrecision(3)} s`;
  return us >= 1000 ? `${(us / 1000).toPrecision(3)} ms` : `${us.toPrecision(3)} \u00b5s`;
}

function shapeText(shape) {
  if (!shape) return "unknown shape";
  return shape.length ? shape.map((dim) => (dim === null ? "?" : dim)).join(" \u00d7 ") : "scalar";
}

/** "float 8 × 4": the type and the shape of a value. */
function typeText(value) {
  return `${value.dtype || "unknown type"} ${shapeText(value.shape)}`;
}

/** Say something to screen readers, and show it for a moment. */
function tell(text) {
  const status = document.getElementById("status");
  status.textContent = text;
  status.classList.remove("hidden");
  clearTimeout(tell.timer);
  tell.timer = setTimeout(() => status.classList.add("hidden"), 4000);
}

/** A colour of the style sheet, such as "--accent". */
function colour(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

/** A titled part of a view. */
function card(title, ...children) {
  return el("section", { class: "card" }, title ? el("h2", {}, title) : null, ...children);
}

function note(text) {
  return el("p", { class: "note" }, text);
}

function notes(texts) {
  return texts.length ? el("ul", { class: "note" }, ...texts.map((text) => el("li", {}, text))) : null;
}

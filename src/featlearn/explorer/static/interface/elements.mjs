/** Elements of the page, and how numbers are written in it. */

/**
 * @param {string} name @param {Record<string, any>} [attributes] `html` is our own markup; on* are listeners
 * @param {...(Node | string)} children @returns {any} an element of that name
 */
export function element(name, attributes = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (value === undefined || value === false || value === null) continue;
    if (key === "html") made.innerHTML = value;
    else if (key.startsWith("on")) made.addEventListener(key.slice(2), value);
    else made.setAttribute(key, value === true ? "" : String(value));
  }
  made.append(...children);
  return made;
}

/** @param {string} name @param {Record<string, any>} [attributes] @param {...(Node | string)} children @returns {SVGElement} */
export function shape(name, attributes = {}, ...children) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, String(value));
  made.append(...children);
  return made;
}

/** @param {number} value @param {number} [digits] @returns {string} a number for people */
export function written(value, digits = 3) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  if (!Number.isFinite(value)) return value > 0 ? "∞" : "−∞";
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-3 || size >= 1e5)) {
    const [digitsOf, power] = value.toExponential(digits - 1).split("e");
    return `${Number(digitsOf)}·10${superscript(Number(power))}`.replace("-", "−");
  }
  return String(Number(value.toPrecision(digits))).replace("-", "−");
}

const HIGH = { "-": "⁻", 0: "⁰", 1: "¹", 2: "²", 3: "³", 4: "⁴", 5: "⁵", 6: "⁶", 7: "⁷", 8: "⁸", 9: "⁹" };

function superscript(power) {
  return [...String(power)].map((sign) => HIGH[sign]).join("");
}

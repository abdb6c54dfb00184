/** Python code that draws what the page draws. */

/** @param {string} body defines `curves`: name -> (x, y) @param {string[]} [more] lines of imports @returns {string} */
export function script(body, more = []) {
  return `${["import matplotlib.pyplot as plt", "import torch", "", "import featlearn as fl", ...more].join("\n")}

${body.trim()}

for name, (x, y) in curves.items():
    plt.figure()
    plt.plot(x, y)
    plt.title(name)
plt.show()
`;
}

/** @param {number} value @returns {string} a number with all its digits, as Python reads it */
export function number(value) {
  if (Number.isInteger(value)) return `${value}.0`;
  return String(value);
}

/** @param {number[]} values @returns {string} */
export function list(values) {
  return `[${values.map(number).join(", ")}]`;
}

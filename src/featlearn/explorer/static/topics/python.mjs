/** Python code that draws what the page draws. */

/** @param {string} body defines `curves`: name -> (x, y) @returns {string} */
export function script(body) {
  const imports = [...(body.includes("math.") ? ["import math", ""] : []), "import matplotlib.pyplot as plt", "import torch", "", "import featlearn as fl"];
  return `${imports.join("\n")}

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

/** Python that defines `normal`, (rows, columns) of the page's random numbers. @param {number} seed @returns {string} */
export function normals(seed, rows, columns) {
  return `state = 1 + ${seed} * 7919 % 2147483646  # the generator of Park and Miller


def uniform():
    global state
    state = 48271 * state % 2147483647
    return state / 2147483647


for _ in range(8):
    uniform()
numbers = [math.sqrt(-2 * math.log(uniform())) * math.cos(2 * math.pi * uniform()) for _ in range(${rows} * ${columns})]
normal = torch.tensor(numbers, dtype=torch.float64).reshape(${rows}, ${columns})
`;
}

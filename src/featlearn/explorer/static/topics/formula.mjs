/** Formulas from a small part of TeX to MathML, which browsers draw themselves. */

const SIGNS = {
  alpha: "α", beta: "β", gamma: "γ", Delta: "Δ", delta: "δ", eta: "η", kappa: "κ", lambda: "λ", mu: "μ", nu: "ν", Omega: "Ω",
  phi: "φ", rho: "ρ", sigma: "σ", zeta: "ζ", theta: "θ", ell: "ℓ", infty: "∞", top: "⊤",
};
const OPERATORS = { sum: "∑", cdot: "·", approx: "≈", propto: "∝", to: "→", le: "≤", ge: "≥", ne: "≠", quad: "\u2003", times: "×", max: "max", pm: "±", int: "∫" };

/** @param {string} text @returns {string} a displayed formula */
export function displayed(text) {
  return `<math display="block">${parsed(text)}</math>`;
}

/** @param {string} text @returns {string} a formula in a sentence */
export function inline(text) {
  return `<math>${parsed(text)}</math>`;
}

function parsed(text) {
  const tokens = text.match(/\\[A-Za-z]+|\\.|\d+(?:\.\d+)?|[^\s]/g) ?? [];
  let place = 0;
  const atom = () => {
    const token = tokens[place++];
    if (token === "{") {
      const inside = [];
      while (place < tokens.length && tokens[place] !== "}") inside.push(scripted());
      place++;
      return `<mrow>${inside.join("")}</mrow>`;
    }
    if (token === "\\frac") return `<mfrac>${atom()}${atom()}</mfrac>`;
    if (token === "\\sqrt") return `<msqrt>${atom()}</msqrt>`;
    if (token === "\\text") return word();
    if (token.startsWith("\\")) return named(token.slice(1));
    if (/^\d/.test(token)) return `<mn>${token}</mn>`;
    if (/^[A-Za-z]$/.test(token)) return `<mi>${token}</mi>`;
    return operator(token);
  };
  const word = () => {
    let letters = "";
    place++;
    while (tokens[place] !== "}") letters += tokens[place++];
    place++;
    return `<mtext>${letters.replaceAll("~", "\u00a0")}</mtext>`;
  };
  const scripted = () => {
    const base = atom();
    let below = "", above = "";
    while (tokens[place] === "_" || tokens[place] === "^") {
      if (tokens[place++] === "_") below = atom();
      else above = atom();
    }
    if (below && above) return `<msubsup>${base}${below}${above}</msubsup>`;
    return below ? `<msub>${base}${below}</msub>` : above ? `<msup>${base}${above}</msup>` : base;
  };
  const found = [];
  while (place < tokens.length) found.push(scripted());
  return `<mrow>${found.join("")}</mrow>`;
}

function named(name) {
  if (name in SIGNS) return `<mi>${SIGNS[name]}</mi>`;
  if (name in OPERATORS) return operator(OPERATORS[name]);
  return `<mi>${name}</mi>`;
}

function operator(sign) {
  const plain = { "-": "−", "<": "&lt;", ">": "&gt;", "'": "′" }[sign] ?? sign;
  return `<mo${sign === "|" ? ' stretchy="false"' : ""}>${plain}</mo>`;
}

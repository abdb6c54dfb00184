/** Sliders and choices, with their values in words. */
import { element, written } from "./elements.mjs";

/**
 * @typedef {object} Control
 * @property {string} key @property {string} label @property {string} [symbol] @property {number | string} value at first
 * @property {number} [min] @property {number} [max] @property {boolean} [log] @property {boolean} [whole]
 * @property {boolean} [even]
 * @property {string} [hint] @property {string[][]} [options] value and label: a choice in place of a slider
 */

const STEPS = 240;

/** @param {Control} control @param {string} text @returns {number | string | undefined} undefined for no valid value */
export function parsed(control, text) {
  if (control.options) return control.options.some(([value]) => value === text) ? text : undefined;
  const value = Number(text);
  if (text === "" || !Number.isFinite(value)) return undefined;
  return fitted(control, value);
}

/** @param {Control} control @param {number} value @returns {number} inside the limits, whole where it must be */
export function fitted(control, value) {
  const inside = Math.min(control.max, Math.max(control.min, value));
  if (control.even) return 2 * Math.round(inside / 2);
  return control.whole ? Math.round(inside) : Number(inside.toPrecision(6));
}

/** A labeled slider or choice; `set(value)` moves it without calling `changed`. */
export class ControlView {
  /** @param {Control} control @param {number | string} value @param {(value: number | string) => void} changed */
  constructor(control, value, changed) {
    this.control = control;
    const id = `control-${control.key}`;
    this.output = element("output", { for: id });
    this.input = control.options
      ? element("select", { id }, ...control.options.map(([key, label]) => element("option", { value: key }, label)))
      : element("input", { id, type: "range", min: 0, max: this.steps(), step: 1 });
    this.input.addEventListener("input", () => {
      const now = control.options ? this.input.value : this.value(Number(this.input.value));
      this.show(now);
      changed(now);
    });
    const label = element("label", { for: id }, control.label);
    if (control.symbol) label.append(" ", element("i", {}, control.symbol));
    this.box = element("div", { class: "control" }, label, this.output, this.input);
    if (control.hint) {
      this.box.append(element("p", { class: "hint", id: `${id}-hint` }, control.hint));
      this.input.setAttribute("aria-describedby", `${id}-hint`);
    }
    this.set(value);
  }

  steps() {
    const { whole, even, log, min, max } = this.control;
    return whole && !log ? (max - min) / (even ? 2 : 1) : STEPS;
  }

  /** @param {number} place of the slider @returns {number} */
  value(place) {
    const { min, max, log } = this.control, share = place / this.steps();
    return fitted(this.control, Number((log ? min * (max / min) ** share : min + (max - min) * share).toPrecision(3)));
  }

  set(value) {
    const { min, max, log, options } = this.control;
    if (options) this.input.value = String(value);
    else this.input.value = String(Math.round((log ? Math.log(value / min) / Math.log(max / min) : (value - min) / (max - min)) * this.steps()));
    this.show(value);
  }

  show(value) {
    if (this.control.options) return;
    this.output.textContent = written(value);
    this.input.setAttribute("aria-valuetext", written(value));
  }
}

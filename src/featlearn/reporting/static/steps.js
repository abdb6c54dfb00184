"use strict";
/* The step of training that the whole page shows: follow(act), extend(steps), latest(own, step). */
const stepping = (() => {
  const PASS = 8000; // milliseconds from the first step to the last
  const at = (id) => document.getElementById(id);
  const slider = at("step"); // absent where nothing moves
  const still = matchMedia("(prefers-reduced-motion: reduce)");
  const acts = new Set();
  let steps = []; // all that the slider can show, in order
  let chosen = null; // null: the last one, also where further ones arrive
  let timer = 0;

  const words = (step) => `step ${step}`;
  const place = () => (chosen === null ? steps.length - 1 : steps.indexOf(chosen));

  function show() {
    const step = steps[place()];
    slider.max = steps.length - 1;
    slider.value = place();
    slider.setAttribute("aria-valuetext", words(step));
    at("step-shown").textContent = words(step);
    at("step-back").hidden = chosen === null;
  }

  // what is shown changes once a frame at most
  let asked = false;
  function tell() {
    show();
    if (asked) return;
    asked = true;
    requestAnimationFrame(() => {
      asked = false;
      for (const act of acts) act(chosen);
    });
  }

  function choose(step) {
    chosen = step;
    tell();
  }

  // ---- play: a pass takes the same time for few steps and for many; still pictures where motion is not wanted
  function pause() {
    clearTimeout(timer);
    timer = 0;
    at("play").textContent = "Play";
  }

  function advance() {
    const most = still.matches ? 10 : 100; // pictures of a pass
    const next = Math.min(place() + Math.ceil(steps.length / most), steps.length - 1);
    choose(steps[next]);
    if (next === steps.length - 1) pause();
    else timer = setTimeout(advance, pace());
  }
  const pace = () => (still.matches ? 1000 : Math.min(Math.max(PASS / steps.length, PASS / 100), 500));

  function play() {
    if (timer) { pause(); return; }
    if (place() === steps.length - 1) choose(steps[0]);
    at("play").textContent = "Pause";
    timer = setTimeout(advance, pace());
  }

  if (slider) {
    slider.addEventListener("input", () => { pause(); choose(steps[Number(slider.value)]); });
    slider.addEventListener("keydown", (event) => {
      if (event.key !== " ") return;
      event.preventDefault();
      play();
    });
    at("play").addEventListener("click", play);
    at("step-back").addEventListener("click", () => {
      pause();
      choose(null);
      slider.focus(); // the button is gone
    });
  }

  // `act` is called with the step now and whenever it changes, null for the last one; returns what ends that
  function follow(act) {
    acts.add(act);
    act(chosen);
    return () => acts.delete(act);
  }

  // the steps that there are now; a chosen one is kept
  function extend(found) {
    if (!slider) return;
    steps = [...new Set(chosen === null ? found : [...found, chosen])].sort((a, b) => a - b);
    at("steps").hidden = steps.length < 2;
    if (steps.length) show();
  }

  // which of a run's own steps is shown: the latest that is not after the step, else the first
  const latest = (own, step) => (step === null ? own.length - 1 : Math.max(0, own.findLastIndex((at) => at <= step)));
  return { extend, follow, latest };
})();

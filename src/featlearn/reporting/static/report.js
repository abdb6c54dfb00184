"use strict";
/* The charts and matrices of a report: show(root, blocks, zooms), clear(). */
const page = (() => {
  const { build, charts, pressed, redraw, remove, root, toggles } = drawing;
  const { matrixSequence, stepsOf } = matrices;
  let releases = []; // end that matrices follow the step

  function show(element, blocks, zooms = new Map()) {
    for (const block of blocks) {
      const id = `chart-${block.key}`;
      if (block.kind === "chart") build(document.getElementById(id), block, zooms.get(id));
      else releases.push(matrixSequence(document.getElementById(`figure-${block.key}`), block));
    }
    // one button for all lines of a run
    for (const whole of element.querySelectorAll(".runs button"))
      whole.addEventListener("click", () => {
        const shown = !pressed(whole);
        whole.setAttribute("aria-pressed", String(shown));
        for (const { button, show } of toggles)
          if (button.dataset.group === whole.dataset.run) show(button, shown);
      });
    stepping.extend(blocks.flatMap(stepsOf));
    copying.tables(element);
  }

  function clear() {
    [...charts].forEach(remove);
    releases.forEach((release) => release());
    releases = [];
  }

  const data = document.getElementById("blocks"); // absent on the live page
  if (data) show(document, JSON.parse(data.textContent));

  // ---- a link into what is folded opens it
  const reveal = () => {
    const target = location.hash.length > 1 && document.getElementById(decodeURIComponent(location.hash.slice(1)));
    if (!target) return;
    const folds = [target.querySelector(":scope > details.fold")];
    for (let at = target; at; at = at.parentElement) if (at.tagName === "DETAILS") folds.push(at);
    for (const one of folds) if (one) one.open = true;
    target.scrollIntoView();
  };
  addEventListener("hashchange", reveal);
  reveal();

  // ---- print
  let opened = [];
  addEventListener("beforeprint", () => {
    root.classList.add("print");
    opened = [...document.querySelectorAll("details:not([open])")];
    opened.forEach((one) => { one.open = true; });
    redraw();
    charts.forEach(({ plot }) => plot.redraw(false, true));
  });
  addEventListener("afterprint", () => {
    root.classList.remove("print");
    opened.forEach((one) => { one.open = false; });
    redraw();
    charts.forEach(({ plot }) => plot.redraw(false, true));
  });
  root.classList.add("drawn");
  return { clear, show };
})();

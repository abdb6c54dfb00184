"use strict";
(() => {
  const { build, charts, pressed, redraw, root, toggles } = drawing;
  const { matrixSequence, stepsOf } = matrices;
  const blocks = JSON.parse(document.getElementById("blocks").textContent);

  // one button for all lines of a run
  for (const whole of document.querySelectorAll(".runs button"))
    whole.addEventListener("click", () => {
      const shown = !pressed(whole);
      whole.setAttribute("aria-pressed", String(shown));
      for (const { button, show } of toggles)
        if (button.dataset.group === whole.dataset.run) show(button, shown);
    });

  for (const block of blocks) {
    if (block.kind === "chart") build(document.getElementById(`chart-${block.key}`), block);
    else matrixSequence(document.getElementById(`figure-${block.key}`), block);
  }
  stepping.extend(blocks.flatMap(stepsOf));
  copying.tables(document);

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
})();

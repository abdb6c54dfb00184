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
    // the step on the strip of time
    for (const now of element.querySelectorAll(".strip .now"))
      releases.push(stepping.follow((step) => {
        const end = Number(now.dataset.end), place = `${100 * Math.log1p(step ?? end) / Math.log1p(end)}%`;
        now.setAttribute("x1", place);
        now.setAttribute("x2", place);
      }));
    stepping.extend(blocks.flatMap(stepsOf));
    copying.tables(element);
    select(chosen);
  }

  function clear() {
    [...charts].forEach(remove);
    releases.forEach((release) => release());
    releases = [];
  }

  // ---- tabs
  const tabs = () => [...document.querySelectorAll("[role=tab]")];
  const panel = (tab) => document.getElementById(tab.getAttribute("aria-controls"));
  let chosen = "panel-curves";
  function select(id) {
    chosen = id;
    for (const tab of tabs()) {
      const open = panel(tab).id === id;
      tab.setAttribute("aria-selected", String(open));
      tab.tabIndex = open ? 0 : -1;
      panel(tab).hidden = !open;
    }
  }
  addEventListener("keydown", (event) => {
    if (event.target.matches?.(".term") && ["Enter", " "].includes(event.key)) {
      event.preventDefault();
      event.target.click();
    }
    const move = { ArrowLeft: -1, ArrowRight: 1 }[event.key], all = tabs(), at = all.indexOf(document.activeElement);
    if (!move || at < 0) return;
    const next = all[(at + move + all.length) % all.length];
    select(panel(next).id);
    next.focus();
  });
  addEventListener("click", async ({ target }) => {
    const one = target.closest?.("[role=tab], .term, [data-copy]");
    if (one?.role === "tab") select(panel(one).id);
    else if (one?.matches(".term")) {
      const meaning = one.nextElementSibling;
      meaning.hidden = !meaning.hidden;
      one.setAttribute("aria-expanded", String(!meaning.hidden));
    } else if (one) {
      const words = one.dataset.words ??= one.textContent;
      one.textContent = await copying.copy(one.dataset.copy) ? "Copied" : "Could not copy";
      setTimeout(() => { one.textContent = words; }, 2000);
    }
  });

  const data = document.getElementById("blocks"); // absent on the live page
  if (data) show(document, JSON.parse(data.textContent));

  // ---- a link into a tab, or into what is folded, opens it
  const reveal = () => {
    const target = location.hash.length > 1 && document.getElementById(decodeURIComponent(location.hash.slice(1)));
    if (!target) return;
    const home = target.closest("[role=tabpanel]");
    if (home) select(home.id);
    const folds = [target.querySelector(":scope > details.fold")];
    for (let at = target; at; at = at.parentElement) if (at.tagName === "DETAILS") folds.push(at);
    for (const one of folds) if (one) one.open = true;
    target.scrollIntoView();
  };
  addEventListener("hashchange", reveal);
  reveal();

  // ---- print: the first screen and the curves; with ?print=all everything
  const all = new URLSearchParams(location.search).get("print") === "all";
  let opened = [], before = chosen;
  const again = () => {
    redraw();
    charts.forEach(({ plot }) => plot.redraw(false, true));
  };
  addEventListener("beforeprint", () => {
    root.classList.add("print");
    before = chosen;
    select("panel-curves");
    if (all) {
      root.classList.add("print-all");
      tabs().forEach((tab) => { panel(tab).hidden = false; });
      opened = [...document.querySelectorAll("details:not([open])")];
      opened.forEach((one) => { one.open = true; });
    }
    again();
  });
  addEventListener("afterprint", () => {
    root.classList.remove("print", "print-all");
    opened.forEach((one) => { one.open = false; });
    opened = [];
    select(before);
    again();
  });
  root.classList.add("drawn");
  return { clear, show };
})();

"use strict";
/* Matrices of our pages, which follow the step: matrixSequence(figure, block). */
const matrices = (() => {
  const { decoded, figureTools, ofPictures } = copying;
  const ONE = [[68, 1, 84], [71, 45, 123], [59, 82, 139], [44, 114, 142], [33, 145, 140], [40, 174, 128], [94, 201, 98],
    [173, 220, 48], [253, 231, 37]];
  const TWO = [[33, 102, 172], [103, 169, 207], [209, 229, 240], [247, 247, 247], [253, 219, 199], [239, 138, 98],
    [178, 24, 43]];
  const ramp = (stops) => Array.from({ length: 256 }, (_, level) => {
    const place = level / 255 * (stops.length - 1), i = Math.min(Math.floor(place), stops.length - 2);
    return stops[i].map((c, k) => Math.round(c + (stops[i + 1][k] - c) * (place - i)));
  });
  const ramps = [ramp(ONE), ramp(TWO)];

  function paint(canvas, picture, colors) {
    const [rows, columns] = picture.size;
    canvas.width = columns;
    canvas.height = rows;
    const ctx = canvas.getContext("2d");
    const image = ctx.createImageData(columns, rows);
    const span = picture.high > picture.low ? picture.high - picture.low : 1;
    decoded(picture.values).forEach((value, i) => {
      const level = Math.min(Math.max(Math.round((value - picture.low) / span * 255), 0), 255);
      image.data.set([...colors[level], 255], 4 * i);
    });
    ctx.putImageData(image, 0, 0);
    canvas.setAttribute("aria-label", picture.label);
    canvas.closest(".picture").querySelector(".range").textContent = picture.range;
  }

  // each run at its latest step; returns what ends that
  function matrixSequence(figure, block) {
    const colors = ramps[block.diverging ? 1 : 0];
    const shown = [...figure.querySelectorAll("canvas")].map((canvas) => ({ canvas, sequence: Number(canvas.dataset.sequence), picture: null }));
    figureTools(figure, () => ofPictures(block, shown));
    return stepping.follow((step) => {
      for (const one of shown) {
        const pictures = block.sequences[one.sequence];
        const at = "moves" in one.canvas.dataset ? stepping.latest(pictures.map((each) => each.step), step) : 0;
        if (one.picture !== pictures[at]) paint(one.canvas, pictures[at], colors);
        one.picture = pictures[at];
      }
    });
  }

  // steps of training at which a chart or a sequence of matrices has something to show
  const stepsOf = (block) => block.kind === "sequence" ? block.sequences.flat().map(({ step }) => step)
    : block.lines.flatMap(({ frames, group, y }) => frames ? frames.steps
      : block.xAxis === "steps" && group !== undefined ? block.x.filter((_, i) => y[i] !== null) : []);
  return { matrixSequence, stepsOf };
})();

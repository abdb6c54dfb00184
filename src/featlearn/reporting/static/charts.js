"use strict";
/* Charts and matrices of our pages: build(box, block) and matrixSequence(figure, block). */
const drawing = (() => {
  const root = document.documentElement;
  const DASHES = [[], [7, 4], [2, 3], [8, 3, 2, 3]];
  const variable = (name) => getComputedStyle(root).getPropertyValue(name).trim();
  const charts = [];
  const toggles = [];
  const pressed = (button) => button.getAttribute("aria-pressed") === "true";

  // ---- axes: steps are drawn as log(1 + step), so that step 0 has a place
  const axis = {
    steps: { to: (x) => Math.log10(1 + x), from: (v) => 10 ** v - 1 },
    log: { to: (x) => Math.log10(x), from: (v) => 10 ** v },
    linear: { to: (x) => x, from: (v) => v },
  };
  const short = (value) => {
    if (value === null || value === undefined || !Number.isFinite(value)) return "–";
    const size = Math.abs(value);
    if (size !== 0 && (size < 1e-3 || size >= 1e5)) return value.toExponential(size >= 1e5 ? 0 : 1).replace("e+", "e");
    return String(Number(value.toPrecision(4)));
  };
  const decades = (scale, low, high, width) => {
    // 0, 1, 10, 100 ... and, where there is room, 2 and 5 in between
    const dense = width / Math.max(high - low, 0.1) > 150;
    const found = scale.from(0) === 0 && low <= 0 ? [0] : [];
    for (let power = 0; power < 16; power++)
      for (const digit of dense ? [1, 2, 5] : [1]) {
        const place = scale.to(digit * 10 ** power);
        if (place >= low - 1e-9 && place <= high + 1e-9) found.push(place);
      }
    return found;
  };

  // whole steps of a logarithmic axis, so that its ticks are round numbers
  const limits = ({ yAxis, yLimits: [low, high] }) => yAxis === "log" ? uPlot.rangeLog(low, high, 10, false) : [low, high];

  // x, then each line after the band around it
  function columns(block) {
    const ys = block.lines.flatMap((line) => (line.low ? [line.high, line.low, line.y] : [line.y]));
    // what is not positive has no place on a logarithmic axis
    const placed = block.yAxis === "log" ? ys.map((y) => y.map((v) => (v > 0 ? v : null))) : ys;
    return [block.x.map(axis[block.xAxis].to), ...placed];
  }

  function build(box, block) {
    const scale = axis[block.xAxis];
    const series = [{}];
    const bands = [];
    const owners = [null]; // which line a series belongs to
    block.lines.forEach((line, i) => {
      const stroke = () => variable(`--c${line.color}`);
      if (line.low) {
        const quiet = { width: 0, points: { show: false }, spanGaps: true };
        series.push({ ...quiet, label: "high" }, { ...quiet, label: "low" });
        owners.push(i, i);
        bands.push({ series: [series.length - 2, series.length - 1], fill: () => `${variable(`--c${line.color}`)}33` });
      }
      const alone = line.y.filter((y) => y !== null).length === 1;
      series.push({
        label: line.label, stroke, width: 2, dash: DASHES[line.dash], spanGaps: true,
        points: { show: alone, size: 7, fill: stroke },
      });
      owners.push(i);
    });
    const grid = { stroke: () => variable("--grid"), width: 1 };
    const ink = () => variable("--soft");
    const options = {
      width: width(box), height: height(box), padding: [block.marks.length ? 28 : 10, 14, 0, 0],
      legend: { show: false },
      cursor: { drag: { x: false, y: false }, points: { size: 7 }, y: false },
      scales: {
        x: { time: false },
        y: { distr: block.yAxis === "log" ? 3 : 1, ...(block.yLimits ? { range: () => limits(block) } : least(block)) },
      },
      axes: [
        {
          stroke: ink, grid, ticks: grid, font: "12px system-ui, sans-serif", label: block.xLabel, labelSize: 20,
          labelFont: "12px system-ui, sans-serif", size: 30,
          ...(block.xAxis === "linear" ? {} : {
            splits: (u, i, low, high) => decades(scale, low, high, u.bbox.width / devicePixelRatio),
            values: (u, splits) => splits.map((v) => short(Math.round(scale.from(v)))),
          }),
        },
        {
          stroke: ink, grid: { ...grid, filter: coarse(block) }, ticks: { ...grid, filter: coarse(block) },
          font: "12px system-ui, sans-serif", size: 58, label: block.yLabel,
          labelSize: 20, labelFont: "12px system-ui, sans-serif",
          values: (u, splits) => splits.map((v) => (v === null ? "" : short(v))),
        },
      ],
      series, bands,
      hooks: { drawClear: [(u) => windows(u, block, scale)], draw: [(u) => levels(u, block), (u) => marks(u, block, scale)],
               setCursor: [(u) => readout(u, block, box)] },
    };
    const plot = new uPlot(options, columns(block), box);
    const chart = { box, plot };
    charts.push(chart);
    observer.observe(box);
    const legend = [...box.parentElement.querySelectorAll(".legend button")];
    const meant = ({ dataset: { line, kind, group } }, i) => line !== undefined ? Number(line) === i
      : kind !== undefined ? kind === block.lines[i].kind : Number(group) === block.lines[i].group;
    // a line is shown unless a button that means it is off
    const update = () => owners.forEach((owner, i) => {
      if (owner === null) return;
      const shown = legend.every((button) => pressed(button) || !meant(button, owner));
      if (plot.series[i].show !== shown) plot.setSeries(i, { show: shown });
    });
    const show = (button, shown) => {
      button.setAttribute("aria-pressed", String(shown));
      update();
    };
    legend.forEach((button) => button.addEventListener("click", () => show(button, !pressed(button))));
    toggles.push(...legend.map((button) => ({ button, show })));
    return chart;
  }

  function windows(u, block, scale) {
    for (const stretch of block.windows) {
      const left = u.valToPos(scale.to(stretch.begin), "x", true);
      const right = u.valToPos(scale.to(stretch.end), "x", true);
      u.ctx.save();
      u.ctx.fillStyle = variable("--window");
      u.ctx.fillRect(left, u.bbox.top, right - left, u.bbox.height);
      u.ctx.restore();
    }
  }

  // lines of a logarithmic grid that spans decades: one a decade
  const coarse = (block) => (u, splits) => {
    const wide = block.yAxis === "log" && u.scales.y.max > 100 * u.scales.y.min;
    return wide ? splits.map((v) => (Math.abs(Math.log10(v) % 1) < 1e-9 ? v : null)) : splits;
  };

  // what an axis shows at least, with a little room above
  function least(block) {
    if (!block.least) return {};
    const [low, high] = block.least;
    return { range: (u, from, to) => [Math.min(low, from ?? low), Math.max(high, 1.05 * (to ?? high))] };
  }

  function levels(u, block) {
    const ctx = u.ctx, ratio = devicePixelRatio;
    ctx.save();
    ctx.font = `${11 * ratio}px system-ui, sans-serif`;
    ctx.textAlign = "left";
    ctx.lineJoin = "round";
    for (const level of block.levels) {
      const y = Math.round(u.valToPos(level.at, "y", true)), left = u.bbox.left;
      if (y < u.bbox.top || y > u.bbox.top + u.bbox.height) continue;
      ctx.strokeStyle = ctx.fillStyle = variable("--soft");
      ctx.lineWidth = 1.5 * ratio;
      ctx.setLineDash([1.5 * ratio, 4 * ratio]);
      ctx.beginPath();
      ctx.moveTo(left, y);
      ctx.lineTo(left + u.bbox.width, y);
      ctx.stroke();
      ctx.setLineDash([]);
      ctx.strokeStyle = variable("--paper"); // a rim, so that words are readable over lines
      ctx.lineWidth = 3 * ratio;
      ctx.strokeText(level.label, left + 4 * ratio, y - 5 * ratio);
      ctx.fillText(level.label, left + 4 * ratio, y - 5 * ratio);
    }
    ctx.restore();
  }

  function marks(u, block, scale) {
    const ctx = u.ctx, ratio = devicePixelRatio;
    ctx.save();
    ctx.font = `600 ${11 * ratio}px system-ui, sans-serif`;
    ctx.textAlign = "center";
    let before = -Infinity, raised = false;
    block.marks.forEach((mark, i) => {
      const x = Math.round(u.valToPos(scale.to(mark.at), "x", true));
      if (x < u.bbox.left || x > u.bbox.left + u.bbox.width) return;
      ctx.strokeStyle = ctx.fillStyle = block.marks.some((m) => m.color !== mark.color)
        ? variable(`--c${mark.color}`) : variable("--soft");
      ctx.lineWidth = ratio;
      ctx.setLineDash([3 * ratio, 3 * ratio]);
      ctx.beginPath();
      ctx.moveTo(x, u.bbox.top);
      ctx.lineTo(x, u.bbox.top + u.bbox.height);
      ctx.stroke();
      raised = x - before < 11 * ratio && !raised; // letters that would touch stand in two rows
      before = x;
      ctx.fillText(String.fromCharCode(97 + (i % 26)), x, u.bbox.top - (raised ? 16 : 5) * ratio);
    });
    ctx.restore();
  }

  function readout(u, block, box) {
    const line = box.parentElement.querySelector(".readout");
    const i = u.cursor.idx;
    if (i === null || i === undefined) { line.textContent = ""; return; }
    const parts = block.lines.filter((l) => l.y[i] !== null).map((l) => `${l.label} ${short(l.y[i])}`);
    line.textContent = `${block.xLabel} ${short(block.x[i])}: ${parts.join(", ")}`;
  }

  const width = (box) => Math.max(200, Math.floor(box.clientWidth));
  const height = (box) => Math.round(Math.min(330, Math.max(220, width(box) * 0.58)));

  // ---- matrix sequences
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
    const levels = atob(picture.bytes);
    for (let i = 0; i < levels.length; i++) {
      const color = colors[levels.charCodeAt(i)];
      image.data.set([color[0], color[1], color[2], 255], 4 * i);
    }
    ctx.putImageData(image, 0, 0);
    canvas.setAttribute("aria-label", picture.label);
    canvas.closest(".picture").querySelector(".range").textContent = picture.range;
  }

  function matrixSequence(figure, block) {
    const colors = ramps[block.diverging ? 1 : 0];
    const canvases = [...figure.querySelectorAll("canvas")];
    for (const canvas of canvases) paint(canvas, block.sequences[canvas.dataset.sequence][canvas.dataset.picture], colors);
    const slider = figure.querySelector("input[type=range]");
    if (!slider) return;
    const output = figure.querySelector("output");
    slider.addEventListener("input", () => {
      const step = block.steps[Number(slider.value)];
      output.textContent = `step ${short(step)}`;
      slider.setAttribute("aria-valuetext", `step ${short(step)}`);
      for (const canvas of canvases) {
        const sequence = block.sequences[canvas.dataset.sequence];
        const index = Math.max(0, sequence.findLastIndex((picture) => picture.step <= step));
        paint(canvas, sequence[index], colors);
      }
    });
  }

  // ---- what changes around the charts: the width, the scheme, and print
  const redraw = () => charts.forEach(({ box, plot }) => plot.setSize({ width: width(box), height: height(box) }));
  const observer = new ResizeObserver((entries) => {
    for (const { target } of entries) {
      const chart = charts.find(({ box }) => box === target);
      if (chart && chart.plot.width !== width(target))
        chart.plot.setSize({ width: width(target), height: height(target) });
    }
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () =>
    charts.forEach(({ plot }) => plot.redraw(false, true)));
  const remove = (chart) => {
    observer.unobserve(chart.box);
    chart.plot.destroy();
    charts.splice(charts.indexOf(chart), 1);
  };
  return { build, charts, columns, matrixSequence, pressed, redraw, remove, root, short, toggles };
})();

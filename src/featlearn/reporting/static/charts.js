"use strict";
/* Charts of our pages, which follow the step: build(box, block, zoom), remove(chart). */
const drawing = (() => {
  const { decoded, figureTools, ofChart } = copying;
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
    return found.length > 2 ? found : round(scale, low, high);
  };
  // where few decades are in sight: about five round numbers
  const round = (scale, low, high) => {
    const [from, to] = [scale.from(low), scale.from(high)];
    const rough = (to - from) / 5, power = 10 ** Math.floor(Math.log10(rough));
    const apart = Math.max(1, power * [1, 2, 5, 10].find((digit) => digit * power >= rough));
    const found = [];
    for (let at = Math.ceil(from / apart) * apart; at <= to; at += apart) found.push(scale.to(at));
    return found;
  };
  const whole = (value) => (Number(short(value)) === value ? short(value) : String(value));

  // whole steps of a logarithmic axis, so that its ticks are round numbers
  const limits = ({ yAxis, yLimits: [low, high] }) => yAxis === "log" ? uPlot.rangeLog(low, high, 10, false) : [low, high];

  // x, then each line after the band around it
  function columns(block) {
    const ys = block.lines.flatMap((line) => (line.low ? [line.high, line.low, line.y] : [line.y]));
    // what is not positive has no place on a logarithmic axis
    const placed = block.yAxis === "log" ? ys.map((y) => y.map((v) => (v > 0 ? v : null))) : ys;
    return [block.x.map(axis[block.xAxis].to), ...placed];
  }

  // a logarithmic axis becomes linear at a click, and stays so in newer reports
  const rescales = new Map();
  function rescale(chart) {
    const { block, box } = chart, other = block.yAxis === "log" ? "linear" : "log";
    const button = Object.assign(document.createElement("button"), { type: "button", className: "rescale", textContent: `${other[0].toUpperCase()}${other.slice(1)} axis` });
    button.addEventListener("click", () => {
      rescales.set(block.key, other);
      remove(chart);
      build(box, block, chart.zoom);
      box.parentElement.querySelector(".rescale").focus();
    });
    return button;
  }

  function build(box, block, zoom = null) {
    if (block.yAxis === "log" && !rescales.has(block.key)) rescales.set(block.key, "log");
    block.yAxis = rescales.get(block.key) ?? block.yAxis;
    const scale = axis[block.xAxis];
    const moves = block.lines.some((line) => line.frames);
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
      // measurements may lie far apart: few of them are drawn as points
      const few = block.xAxis === "steps" && line.y.filter((y) => y !== null).length <= 60;
      series.push({
        label: line.label, stroke, width: 2, dash: DASHES[line.dash], spanGaps: true,
        points: { show: few, size: 5, fill: stroke },
      });
      owners.push(i);
    });
    const grid = { stroke: () => variable("--grid"), width: 1 };
    const ink = () => variable("--soft");
    const options = {
      width: width(box), height: height(box), padding: [block.marks.length ? 28 : 10, 14, 0, 0],
      legend: { show: false },
      cursor: {
        drag: { x: true, y: false, setScale: false, dist: 5 }, points: { size: 7 }, y: false,
        bind: { dblclick: () => () => magnify(chart, null) },
      },
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
            values: (u, splits) => splits.map((v) => whole(Math.round(scale.from(v)))),
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
      hooks: { drawClear: [(u) => windows(u, block, scale)], draw: [(u) => levels(u, block), (u) => marks(u, block, scale), () => mark(chart)],
               setCursor: [() => readout(chart)], setSelect: [(u) => selected(chart)] },
    };
    const figure = box.parentElement;
    const legend = [...figure.querySelectorAll(".legend button")];
    const chart = { box, block, zoom: null, step: null, legend, line: Object.assign(document.createElement("div"), { className: "step-line", hidden: true }) };
    const plot = chart.plot = new uPlot(options, columns(block), box);
    plot.over.append(chart.line);
    charts.push(chart);
    observer.observe(box);
    figureTools(figure, () => ofChart(block), () => magnify(chart, null), rescales.has(block.key) ? [rescale(chart)] : []);
    if (zoom) magnify(chart, zoom);
    if (block.xAxis === "steps") chart.release = stepping.follow((step) => { chart.step = step; values(chart); });
    if (moves) chart.release = stepping.follow((step) => move(chart, step));
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
    const { signal } = chart.end = new AbortController();
    legend.forEach((button) => button.addEventListener("click", () => show(button, !pressed(button)), { signal }));
    toggles.push(...legend.map((button) => ({ button, show })));
    update();
    return chart;
  }

  // ---- zoom along x
  function selected(chart) {
    const { left, width } = chart.plot.select;
    if (width < 5) return;
    chart.plot.setSelect({ left: 0, width: 0, top: 0, height: 0 }, false);
    magnify(chart, [left, left + width].map((x) => chart.plot.posToVal(x, "x")));
  }

  // null returns to everything
  function magnify(chart, zoom) {
    chart.zoom = zoom;
    const back = chart.box.parentElement.querySelector(".tools .back");
    if (!zoom && back === document.activeElement) back.nextElementSibling.focus();
    back.hidden = !zoom;
    refresh(chart);
  }

  // draw the numbers of the block anew; a zoom stays
  function refresh({ plot, block, zoom }) {
    plot.setData(columns(block), !zoom);
    if (zoom) plot.setScale("x", { min: zoom[0], max: zoom[1] });
  }

  addEventListener("keydown", (event) => {
    if (event.key !== "Escape") return;
    const zoomed = charts.filter(({ zoom }) => zoom);
    const near = zoomed.filter(({ box }) => box.parentElement.matches(":hover, :focus-within"));
    for (const chart of near.length ? near : zoomed) magnify(chart, null);
  });

  // ---- the step of the page
  // the latest number of a line at the step or before it
  function latest({ block, step }, line) {
    const i = block.x.findLastIndex((x, i) => x <= step && line.y[i] !== null);
    if (i < 0) return "–";
    return block.x[i] === step || line.group === undefined ? short(line.y[i]) : `${short(line.y[i])} at ${whole(block.x[i])}`;
  }

  function mark({ plot, block, step, line }) {
    if (!plot) return; // not yet drawn
    const x = step === null ? NaN : plot.valToPos(axis[block.xAxis].to(step), "x");
    line.hidden = !(x >= 0 && x <= plot.bbox.width / devicePixelRatio);
    if (!line.hidden) line.style.transform = `translateX(${x}px)`;
  }

  // the lines of which a button of the legend says the numbers: its own, or those of its run, in the order of the styles
  function linesOf({ block, legend }, { dataset: { line, kind, group } }) {
    if (kind !== undefined) return [];
    if (line !== undefined) return [block.lines[line]];
    const kinds = legend.map((one) => one.dataset.kind).filter((one) => one !== undefined);
    return kinds.map((one) => block.lines.find((each) => each.group === Number(group) && each.kind === one));
  }

  // numbers at the step: on the buttons of the legend, and below the chart where lines have none
  function values(chart) {
    mark(chart);
    for (const one of chart.legend) {
      const told = linesOf(chart, one).map((line) => (line ? latest(chart, line) : "–"));
      if (!told.length) continue;
      if (!one.querySelector(".value")) one.append(Object.assign(document.createElement("span"), { className: "value" }));
      one.querySelector(".value").textContent = chart.step === null ? "" : told.join(" · ");
    }
    readout(chart);
  }

  // lines that are there at several steps: each at its latest one
  function move(chart, step) {
    const { block, legend } = chart;
    block.lines.forEach((line, i) => {
      if (!line.frames) return;
      const at = stepping.latest(line.frames.steps, step), length = block.x.length;
      line.y = decoded(line.frames.values).slice(at * length, (at + 1) * length).map((v) => (Number.isNaN(v) ? null : v));
      line.name ??= line.label.slice(0, line.label.length - line.kind.length);
      line.label = `${line.name}step ${line.frames.steps[at]}`;
      const one = legend.find(({ dataset }) => dataset.line === String(i) || dataset.kind === line.kind);
      one.lastChild.textContent = one.dataset.line ? line.label : step === null ? line.kind : `step ${step}, or the latest before`;
    });
    readout(chart);
    refresh(chart);
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

  // numbers under the pointer, else those at the step that stand on no button
  function readout(chart) {
    const { plot, block, box, step, legend } = chart;
    const line = box.parentElement.querySelector(".readout");
    const i = plot?.cursor.idx ?? null;
    if (i !== null) {
      const parts = block.lines.filter((l) => l.y[i] !== null).map((l) => `${l.label} ${short(l.y[i])}`);
      line.textContent = `${block.xLabel} ${whole(block.x[i])}: ${parts.join(", ")}`;
    } else if (block.lines.some((l) => l.frames)) {
      const moving = block.lines.filter((l) => l.frames).map(({ label }) => label);
      line.textContent = moving.length > 1 ? moving.join(", ") : "";
    } else if (step !== null) {
      const said = new Set(legend.flatMap((one) => linesOf(chart, one)));
      const left = block.lines.filter((l) => !said.has(l));
      const parts = left.map((l) => `${l.label} ${latest(chart, l)}`);
      line.textContent = parts.length ? `${block.xLabel} ${whole(step)}: ${parts.join(", ")}` : "";
    } else line.textContent = "";
  }

  const width = (box) => Math.max(200, Math.floor(box.clientWidth));
  const height = (box) => box.closest(".live-first") ? 190 : Math.round(Math.min(330, Math.max(220, width(box) * 0.58)));

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
    chart.release?.();
    chart.end.abort();
    chart.plot.destroy();
    charts.splice(charts.indexOf(chart), 1);
    toggles.splice(0, toggles.length, ...toggles.filter(({ button }) => !chart.legend.includes(button)));
  };
  return { build, charts, pressed, redraw, remove, root, toggles };
})();

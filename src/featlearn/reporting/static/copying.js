"use strict";
/* Numbers as CSV on the clipboard, and the buttons of figures and tables. */
const copying = (() => {
  const make = (name, properties = {}) => Object.assign(document.createElement(name), properties);

  // a name that a spreadsheet would take for a formula is quoted
  function field(value) {
    if (value === null || value === undefined) return "";
    const plain = typeof value === "number" || (value !== "" && Number.isFinite(Number(value))) ? String(value)
      : String(value).replace(/^[=+\-@]/, "'$&");
    return /[",\r\n]/.test(plain) ? `"${plain.replaceAll('"', '""')}"` : plain;
  }
  const csv = (rows) => rows.map((row) => `${row.map(field).join(",")}\n`).join("");

  function ofChart(block) {
    const columns = [[block.xLabel, block.x]];
    for (const { label, y, low, high, error } of block.lines) {
      columns.push([label, y]);
      if (error) columns.push([`${label}, standard error`, error]);
      else if (low) columns.push([`${label}, lowest`, low], [`${label}, highest`, high]);
    }
    return csv([columns.map(([name]) => name), ...block.x.map((_, i) => columns.map(([, values]) => values[i]))]);
  }

  // rows of all matrices that are shown, each with its run and step
  function ofPictures(block, shown) {
    const width = Math.max(...shown.map(({ picture }) => picture.size[1]));
    const rows = [["run", "step", block.rows, ...Array(width).keys()]];
    for (const { sequence, picture } of shown) {
      const values = decoded(picture.values), [height, length] = picture.size;
      for (let i = 0; i < height; i++)
        rows.push([block.runs[sequence], picture.step, i, ...values.slice(i * length, (i + 1) * length)]);
    }
    return csv(rows);
  }

  // numbers of a table in full; an error has a column of its own
  function ofTable(table) {
    const text = (cell) => [...cell.childNodes].map((part) => part.textContent.trim()).filter(Boolean).join(", ");
    const rows = [...table.rows], body = rows.slice(1);
    const erring = [...rows[0].cells].map((_, i) => body.some((row) => row.cells[i]?.dataset.error));
    const spread = (row, value, error) => [...row.cells].flatMap((cell, i) =>
      erring[i] ? [value(cell), error(cell)] : [value(cell)]);
    const known = (cell) => cell.dataset.value ?? (text(cell) === "–" ? "" : text(cell));
    return csv([spread(rows[0], text, (cell) => `${text(cell)}, standard error`),
      ...body.map((row) => spread(row, known, (cell) => cell.dataset.error ?? ""))]);
  }

  // an array of numbers that the page holds as base64
  const known = new WeakMap();
  function decoded(packed) {
    if (!known.has(packed)) {
      const [[bits, text]] = Object.entries(packed);
      const bytes = Uint8Array.from(atob(text), (sign) => sign.charCodeAt(0));
      known.set(packed, Array.from(bits === "64" ? new Float64Array(bytes.buffer) : new Float32Array(bytes.buffer)));
    }
    return known.get(packed);
  }

  // ---- the clipboard; a page from a disk, or in an old browser, has none
  function selected(text) {
    const area = make("textarea", { value: text, className: "unseen", readOnly: true });
    const before = document.activeElement;
    document.body.append(area);
    area.select();
    const done = document.execCommand("copy");
    area.remove();
    before?.focus({ preventScroll: true });
    return done;
  }
  async function copy(text) {
    try {
      await navigator.clipboard.writeText(text);
      return true;
    } catch { // also where there is no clipboard
      return selected(text);
    }
  }

  // `of` names what is copied to those who do not see where the button stands
  function button(of, write) {
    const made = make("button", { type: "button", className: "copy", textContent: "Copy CSV" });
    made.setAttribute("aria-label", `Copy CSV: ${of}`);
    made.addEventListener("click", async () => {
      const said = await copy(write()) ? "Copied" : "Could not copy";
      made.textContent = said;
      made.setAttribute("aria-label", `${said}: ${of}`);
      status.textContent = `${said}: ${of}`;
      clearTimeout(made.timer);
      made.timer = setTimeout(() => {
        made.textContent = "Copy CSV";
        made.setAttribute("aria-label", `Copy CSV: ${of}`);
        status.textContent = "";
      }, 2000);
    });
    return made;
  }
  const status = make("p", { className: "unseen" });
  status.setAttribute("role", "status");
  document.body.append(status);

  // ---- buttons of a figure
  function figureTools(figure, write, back, more = []) {
    figure.querySelector(".tools")?.remove();
    const row = make("div", { className: "tools" });
    const title = figure.querySelector("h3").textContent;
    if (back) {
      const made = make("button", { type: "button", className: "back", textContent: "Reset zoom", hidden: true });
      made.addEventListener("click", back);
      row.append(made);
    }
    row.append(...more, button(title, write));
    figure.querySelector("figcaption").append(row);
  }

  // buttons for tables; that of a chart has the numbers of the table below it
  function tables(root) {
    for (const box of root.querySelectorAll(".scroll:has(> table)")) {
      if (box.closest("figure")?.querySelector(".chart")) continue;
      const row = make("div", { className: "tools" });
      row.append(button(box.getAttribute("aria-label"), () => ofTable(box.querySelector("table"))));
      box.before(row);
    }
  }
  return { copy, decoded, figureTools, ofChart, ofPictures, tables };
})();

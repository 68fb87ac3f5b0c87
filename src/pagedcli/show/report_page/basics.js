"use strict";
/* Data, words, colours, canvases and tables: what the other files use. */
const data = JSON.parse(document.getElementById("trace-data").textContent);
const $ = id => document.getElementById(id);
const columns = data.columns, engine = data.engine, summary = data.summary, requests = data.requests;
const R = Object.fromEntries(data.requestColumns.map((name, i) => [name, i]));  // R.label: place in a row of requests
const requestOf = new Map(requests.map(row => [row[R.seq_id], row]));
const numPoints = columns.used.length, numFrames = data.frames.length, numBlocks = engine.num_blocks;
const numGroups = engine.groups.length;  // of layers

const number = new Intl.NumberFormat("en");
const compact = new Intl.NumberFormat("en", { notation: "compact", maximumFractionDigits: 1 });
const show = x => x === null || x === undefined ? "-" : number.format(x);
const percent = x => x === null || x === undefined || Number.isNaN(x) ? "-" : x.toFixed(1) + " %";
const plural = (n, word) => show(n) + " " + word + (n === 1 ? "" : "s");
function bytes(n) {
  let unit = 0;
  while (n >= 1024 && unit < 4) { n /= 1024; unit++; }
  return n.toFixed(unit ? 1 : 0) + " " + ["B", "KiB", "MiB", "GiB", "TiB"][unit];
}
function seconds(s) {
  if (s === null || s === undefined) return "-";
  if (s === 0) return "0";
  if (s < .001) return (s * 1e6).toFixed(0) + " µs";
  if (s < 1) return (s * 1000).toPrecision(3) + " ms";
  return s < 100 ? s.toFixed(2) + " s" : show(Math.round(s)) + " s";
}
function element(tag, text, className) {
  const node = document.createElement(tag);
  if (text !== undefined) node.textContent = text;
  if (className) node.className = className;
  return node;
}
function linkTo(text, onClick) {
  const button = element("button", text, "link");
  button.addEventListener("click", onClick);
  return button;
}

/* ---- points: a point is one step, or a group of them in a long run; the last frame is the end of the run */
const stepOf = point => data.firstStep + point * data.group;
const pointOf = step => (step - data.firstStep) / data.group;
const endTime = numPoints ? (columns.start_ns[numPoints - 1] + columns.busy_ns[numPoints - 1]) / 1e9 : 0;
const timeAt = point => point >= numPoints ? endTime : columns.start_ns[Math.max(0, Math.floor(point))] / 1e9;
function stepName(frame) {
  if (frame >= numPoints) return "the end";
  if (data.group === 1) return "step " + show(stepOf(frame));
  return `steps ${show(stepOf(frame))}-${show(Math.min(stepOf(frame) + data.group, data.firstStep + data.numSteps) - 1)}`;
}
const moment = frame => `${stepName(frame)}, ${seconds(timeAt(frame))}`;

/* ---- colours: read from the style, so that light and dark need no second list */
const colour = {};
function readColours() {
  const style = getComputedStyle(document.documentElement);
  for (const name of ["card", "text", "muted", "grid", "accent", "empty", "empty-edge", "cached", "partial", "used", "shared",
    "waiting", "prefill", "decode", "preempted", "curve2", "series0", "series1", "series2", "series3", "series4", "series5"]) colour[name] = style.getPropertyValue("--" + name).trim();
}
readColours();

function fitCanvas(canvas, cssHeight) {
  const width = canvas.clientWidth || canvas.parentElement.clientWidth, height = cssHeight || canvas.clientHeight;
  const ratio = window.devicePixelRatio || 1;
  if (cssHeight) canvas.style.height = cssHeight + "px";
  canvas.width = Math.round(width * ratio);
  canvas.height = Math.round(height * ratio);
  const context = canvas.getContext("2d");
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  context.clearRect(0, 0, width, height);
  return [context, width, height];
}
function legend(id, entries, draw) {
  $(id).replaceChildren(...entries.map(([key, words]) => {
    const item = element("span"), canvas = element("canvas");
    canvas.width = canvas.height = 32;
    const context = canvas.getContext("2d");
    context.scale(2, 2);
    draw(context, key);
    item.append(canvas, words);
    return item;
  }));
}

/* ---- the tooltip */
const tip = element("div", "", "tip");
tip.hidden = true;
document.body.append(tip);
function showTip(event, text) {
  tip.hidden = !text;
  if (!text) return;
  tip.textContent = text;
  tip.style.left = Math.min(event.clientX + 14, innerWidth - tip.offsetWidth - 8) + "px";
  tip.style.top = Math.min(event.clientY + 16, innerHeight - tip.offsetHeight - 8) + "px";
}

/* ---- tables: headers are [words, is a number]; a cell is text, a number or a node */
function table(id, headers, rows, sort) {
  const head = element("tr");
  headers.forEach(([words, isNumber], i) => {
    const cell = element("th", sort ? undefined : words, isNumber ? "n" : "");
    cell.scope = "col";
    if (sort) {
      const sorted = sort.column === i, button = element("button", words + (sorted ? sort.up ? " ▲" : " ▼" : ""));
      button.addEventListener("click", () => sort.by(i));
      cell.append(button);
      if (sorted) cell.setAttribute("aria-sort", sort.up ? "ascending" : "descending");
    }
    head.append(cell);
  });
  const body = element("tbody");
  for (const row of rows) {
    const line = element("tr", undefined, row.className || "");
    (row.cells || row).forEach((value, i) => {
      const cell = element("td", undefined, headers[i][1] ? "n" : "text");
      if (value instanceof Node) cell.append(value);
      else cell.textContent = typeof value === "number" ? show(value) : value ?? "-";
      line.append(cell);
    });
    body.append(line);
  }
  const top = element("thead");
  top.append(head);
  $(id).replaceChildren(top, body);
}

/* A table of many rows with search, sorting and pages; `columns` are { words, number, value(row), cell(row) }. Its
   elements are `id`, `id`-search, -previous, -next and -words. `keep(row)` filters, `note()` follows the page number. */
const PAGE = 100;
function pagedTable(id, rows, columns, { what, textOf, keep = () => true, note = () => "", classOf = () => "" }) {
  let page = 0, order = rows;
  const texts = new Map();  // lower case, made when a row is first searched
  const textOfRow = row => { if (!texts.has(row)) texts.set(row, textOf(row).toLowerCase()); return texts.get(row); };
  const sort = { column: null, up: true, by(column) {
    sort.up = sort.column === column ? !sort.up : !columns[column].number;  // numbers: the largest first
    sort.column = column;
    const value = columns[column].value, sign = sort.up ? 1 : -1, last = sort.up ? Infinity : -Infinity;
    const key = row => value(row) ?? (columns[column].number ? last : "");
    order = rows.map(row => [key(row), row]).sort(([a], [b]) => a < b ? -sign : a > b ? sign : 0).map(([, row]) => row);
    page = 0;
    draw();
  } };
  function draw() {
    const wanted = $(id + "-search").value.trim().toLowerCase();
    const found = order.filter(row => keep(row) && (!wanted || textOfRow(row).includes(wanted)));
    const pages = Math.max(1, Math.ceil(found.length / PAGE));
    page = Math.max(0, Math.min(page, pages - 1));
    const shown = found.slice(page * PAGE, (page + 1) * PAGE);
    table(id, columns.map(column => [column.words, column.number]),
      shown.map(row => ({ className: classOf(row), cells: columns.map(column => (column.cell || column.value)(row)) })), sort);
    $(id + "-words").textContent = `${show(found.length)} of ${show(rows.length)} ${what}, page ${page + 1} of ${pages}${note()}`;
    $(id + "-previous").disabled = page === 0;
    $(id + "-next").disabled = page >= pages - 1;
  }
  function turn(by) { page += by; draw(); }
  $(id + "-search").addEventListener("input", () => { page = 0; draw(); });
  $(id + "-previous").addEventListener("click", () => turn(-1));
  $(id + "-next").addEventListener("click", () => turn(1));
  draw();
  return { draw, sort };
}

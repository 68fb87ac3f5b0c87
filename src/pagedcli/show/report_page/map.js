/* The block pool and the block tables at one frame. */
let current = 0;

/* ---- the pool and the tables at any frame: the changes since a key frame */
const NUM_CELLS = 16 * numGroups;  // what a block can be
const KEY_EVERY = Math.max(50, Math.ceil(numFrames / Math.max(8, Math.min(200, 4e7 / numBlocks))));
const keyFrames = [], keyTables = [];
const pool = numGroups > 16 ? new Uint16Array(numBlocks) : new Uint8Array(numBlocks);  // of each block: group * 16 + state
const stateOf = cell => cell & 15, groupOf = cell => cell >> 4;
let tables = new Map();  // sequence -> its blocks; the arrays are never changed, so a key frame shares them
let poolFrame = -1;
function applyFrame(frame) {
  for (const packed of data.frames[frame]) pool[Math.floor(packed / NUM_CELLS)] = packed % NUM_CELLS;
  for (const [seq, kept, ...blocks] of data.tables[frame]) {
    if (kept + blocks.length) tables.set(seq, (tables.get(seq) || []).slice(0, kept).concat(blocks));
    else tables.delete(seq);
  }
}
function buildKeyFrames() {
  for (let frame = 0; frame < numFrames; frame++) {
    applyFrame(frame);
    if (frame % KEY_EVERY === 0) { keyFrames.push(pool.slice()); keyTables.push(new Map(tables)); }
  }
  poolFrame = numFrames - 1;
}
function goToFrame(frame) {
  if (poolFrame > frame || frame - poolFrame > KEY_EVERY) {
    const key = Math.floor(frame / KEY_EVERY);
    pool.set(keyFrames[key]);
    tables = new Map(keyTables[key]);
    poolFrame = key * KEY_EVERY;
  }
  while (poolFrame < frame) applyFrame(++poolFrame);
}

/* ---- the map: a block is told apart by lightness and shape, not by colour alone */
const CELLS = [[0, "empty"], [1, "cached, free to reuse"], [2, "in use, being filled"], [3, "in use, full"], [4, "shared by so many sequences"]];
const stateWords = code => code < 4 ? CELLS[code][1] : `shared by ${code - 2 > 10 ? "11 or more" : code - 2} sequences`;
const cellWords = (cell, groupWords) => stateWords(stateOf(cell)) + (numGroups > 1 && stateOf(cell) ? ", " + groupWords(groupOf(cell)) : "");
function drawCell(context, x, y, size, code) {
  const inner = size >= 5 ? size - 1 : size;
  context.fillStyle = colour[["empty", "cached", "empty", "used"][code] || "shared"];
  context.fillRect(x, y, inner, inner);
  if (code === 0 && size >= 8) {
    context.strokeStyle = colour["empty-edge"]; context.lineWidth = 1; context.strokeRect(x + .5, y + .5, inner - 1, inner - 1);
  } else if (code === 1 && size >= 8) {
    context.fillStyle = colour.card; context.beginPath(); context.arc(x + inner / 2, y + inner / 2, inner / 5, 0, 7); context.fill();
  } else if (code === 2) {
    context.fillStyle = colour.partial; context.fillRect(x, y + inner * .45, inner, inner * .55);
  } else if (code > 3 && size >= 10) {
    context.fillStyle = colour.card; context.font = `bold ${Math.floor(inner * .8)}px system-ui, sans-serif`;
    context.textAlign = "center"; context.textBaseline = "middle";
    context.fillText(code - 2 > 9 ? "+" : String(code - 2), x + inner / 2, y + inner / 2 + .5);
  }
}

/* ---- several groups of layers: the map shows the state, the groups by number and colour, or the state of one group */
const GROUP_CELLS = [[0, "empty"], [1, "cached, free to reuse"], [2, "in use"]];
const isFaint = cell => isOneGroup() && stateOf(cell) !== 0 && groupOf(cell) !== +colourBy;
let colourBy = "state";  // or "group", or the number of a group
const isOneGroup = () => colourBy !== "state" && colourBy !== "group";
const groupColour = group => colour["series" + group % 6];
function drawGroupCell(context, x, y, size, cell) {
  const inner = size >= 5 ? size - 1 : size, isCached = stateOf(cell) === 1, digits = String(groupOf(cell));
  if (stateOf(cell) === 0) { drawCell(context, x, y, size, 0); return; }
  context.fillStyle = groupColour(groupOf(cell));
  context.fillRect(x, y, inner, inner);
  if (isCached) { context.fillStyle = colour.card; context.fillRect(x + 1.5, y + 1.5, inner - 3, inner - 3); }
  if (size < 10) return;
  context.fillStyle = isCached ? groupColour(groupOf(cell)) : colour.card;
  context.font = `bold ${Math.floor(inner * (digits.length > 1 ? .55 : .8))}px system-ui, sans-serif`;
  context.textAlign = "center"; context.textBaseline = "middle";
  context.fillText(digits, x + inner / 2, y + inner / 2 + .5);
}
function drawMapCell(context, x, y, size, cell) {
  if (colourBy === "group") { drawGroupCell(context, x, y, size, cell); return; }
  context.globalAlpha = isFaint(cell) ? .15 : 1;
  drawCell(context, x, y, size, stateOf(cell));
  context.globalAlpha = 1;
}
function drawMapLegend() {
  if (colourBy === "group") legend("map-legend", GROUP_CELLS, (context, cell) => drawGroupCell(context, 0, 0, 17, cell));
  else legend("map-legend", isOneGroup() ? [...CELLS, ["other", "of another group"]] : CELLS, (context, code) => {
    context.globalAlpha = code === "other" ? .15 : 1;
    drawCell(context, 0, 0, 17, code === "other" ? 3 : code);
  });
}
const groupNote = size => colourBy !== "group" ? "" : size < 10 ? "The blocks are too small for the number of their group: choose a group to see only its blocks. " : "The number is the group's. ";
function drawGroups() {
  const used = Array(numGroups).fill(0), cached = used.slice();
  for (const cell of pool) if (stateOf(cell)) (stateOf(cell) === 1 ? cached : used)[groupOf(cell)]++;
  const name = group => {
    const cell = element("span", undefined, "group"), swatch = element("canvas");
    swatch.width = swatch.height = 32;
    const context = swatch.getContext("2d");
    context.scale(2, 2);
    drawGroupCell(context, 0, 0, 17, group * 16 + 2);
    if (colourBy === "group") cell.append(swatch);
    cell.append(String(group));
    return cell;
  };
  table("groups", [["group", false], ["layers", false], ["window", true], ["KV heads", true], ["used of a block", true],
    ["blocks in use", true], ["cached", true], ["unused in these", true]], data.groups.map((group, i) => [
    name(i), group.layers || "-", group.window ?? "none", group.heads, group.usedBytes === null ? null : `${bytes(group.usedBytes)} of ${bytes(engine.block_bytes)}`,
    used[i], cached[i], group.usedBytes === null ? null : bytes(used[i] * (engine.block_bytes - group.usedBytes))]));
}
if (numGroups > 1) {
  $("groups-section").hidden = $("colour-choice").hidden = false;
  const option = (value, words) => Object.assign(element("option", words), { value });
  $("colour-by").append(option("state", "state"), option("group", "group of layers"), ...data.groups.map((_, i) => option(i, `state, of group ${i} only`)));
  $("colour-by").addEventListener("change", event => { colourBy = event.target.value; drawMapLegend(); drawMap(); });
}

let mapGrid = { size: 12, perRow: 1 };
function drawMap() {
  const canvas = $("map"), width = canvas.clientWidth || canvas.parentElement.clientWidth;
  let size = Math.floor(Math.min(18, Math.max(2, Math.sqrt(width * 330 / numBlocks))));
  if (numBlocks / Math.floor(width / size) * size > 900) size = 1;
  const perRow = Math.floor(width / size), rows = Math.ceil(numBlocks / perRow);
  const [context] = fitCanvas(canvas, rows * size + 1);
  mapGrid = { size, perRow };
  if (size <= 4) {  // a hundred thousand small cells: neighbours of one state are one rectangle
    const names = ["empty", "cached", "partial", "used", "shared"];
    const kindOf = cell => (colourBy === "state" ? 0 : cell & ~15) + Math.min(stateOf(cell), 4);
    for (let start = 0; start < numBlocks;) {
      const kind = kindOf(pool[start]), rowEnd = Math.min(numBlocks, (Math.floor(start / perRow) + 1) * perRow);
      let end = start + 1;
      while (end < rowEnd && kindOf(pool[end]) === kind) end++;
      const byGroup = colourBy === "group" && stateOf(kind);
      context.fillStyle = byGroup ? groupColour(groupOf(kind)) : colour[names[stateOf(kind)]];
      context.globalAlpha = isFaint(kind) ? .15 : byGroup && stateOf(kind) === 1 ? .4 : 1;
      context.fillRect(start % perRow * size, Math.floor(start / perRow) * size, (end - start) * size, size);
      start = end;
    }
    context.globalAlpha = 1;
  } else for (let block = 0; block < numBlocks; block++) drawMapCell(context, block % perRow * size, Math.floor(block / perRow) * size, size, pool[block]);
  if (selectedBlock !== null) {
    context.strokeStyle = colour.text; context.lineWidth = 2; context.setLineDash([]);
    context.strokeRect(selectedBlock % perRow * size, Math.floor(selectedBlock / perRow) * size, Math.max(4, size), Math.max(4, size));
  }
  const counts = [0, 0, 0, 0, 0];
  for (const cell of pool) counts[Math.min(stateOf(cell), 4)]++;
  const used = counts[2] + counts[3] + counts[4];
  $("pool-words").textContent = `${moment(current)}: in use ${show(used)} (${show(counts[4])} shared, ${show(counts[2])} being filled) + cached ${show(counts[1])} + empty ${show(counts[0])} = ${show(numBlocks)} blocks`;
  canvas.setAttribute("aria-label", $("pool-words").textContent);
  $("map-note").textContent = `In the order of block ids, ${show(perRow)} in a row; a block holds ${plural(engine.block_size, "token")}${numGroups > 1 ? " of one group of layers" : ""}. ${groupNote(size)}Point at a block to see who holds it.`;
  if (numGroups > 1) drawGroups();
  drawTables();
  drawBlock();
}
const hasPlaces = engine.groups.every(group => group.window === null) && numGroups === 1;  // the tables here leave out what a window has passed
function holdersOf(block) {
  const holders = [];
  for (const [seq, blocks] of tables) {
    const place = blocks.indexOf(block);
    if (place >= 0) holders.push(`${requestOf.get(seq)[R.label]} (seq ${seq}${hasPlaces ? ", its block " + place : ""})`);
  }
  return holders;
}
function blockAt(event) {
  const column = Math.floor(event.offsetX / mapGrid.size), block = Math.floor(event.offsetY / mapGrid.size) * mapGrid.perRow + column;
  return column >= mapGrid.perRow || block < 0 || block >= numBlocks ? null : block;
}
function blockWords(block) {
  const holders = holdersOf(block), more = holders.length > 6 ? ` and ${holders.length - 6} more` : "";
  return `block ${block}: ${cellWords(pool[block], group => data.groups[group].words)}` + (holders.length ? `; held by ${holders.slice(0, 6).join(", ")}${more}` : "");
}
const mapTip = event => blockAt(event) === null ? "" : blockWords(blockAt(event));

/* ---- one block: its state at this step, and the steps that changed it */
let selectedBlock = null;
const MOST_CHANGES = 60;
function changesOf(block) {
  const changes = [];
  data.frames.forEach((frame, i) => { for (const packed of frame) if (Math.floor(packed / NUM_CELLS) === block) changes.push([i, packed % NUM_CELLS]); });
  return changes;
}
function selectBlock(block) {
  selectedBlock = block;
  $("block-story").replaceChildren();
  if (block !== null) {
    const changes = changesOf(block);
    changes.slice(0, MOST_CHANGES).forEach(([frame, cell], i) => {
      const words = `${stepName(frame)}: ${cellWords(cell, group => "group " + group)}`;
      $("block-story").append(i ? "; " : "", linkTo(words, () => setFrame(frame)));
    });
    if (changes.length > MOST_CHANGES) $("block-story").append(`; and ${show(changes.length - MOST_CHANGES)} more changes`);
    if (!changes.length) $("block-story").textContent = "It was empty all the time.";
  }
  drawMap();
}
function drawBlock() {
  const typed = $("block-search").value.trim();
  $("block-words").textContent = selectedBlock !== null ? blockWords(selectedBlock) : typed ? `There is no block ${typed}: they are numbered from 0 to ${show(numBlocks - 1)}.` : "";
}
$("block-search").addEventListener("input", event => {
  const typed = event.target.value.trim();
  selectBlock(/^\d+$/.test(typed) && +typed < numBlocks ? +typed : null);
});
$("map").addEventListener("click", event => {
  const block = blockAt(event);
  if (block !== null) { $("block-search").value = block; selectBlock(block); }
});
$("map").addEventListener("pointermove", event => showTip(event, mapTip(event)));
$("map").addEventListener("pointerleave", event => showTip(event, ""));

/* ---- block tables: adjacent ids with the same number of owners as a range, owners above 1 after a × */
const MOST_TABLES = 30;
function blockRanges(blocks) {
  const owners = block => Math.max(1, stateOf(pool[block]) - 2), runs = [];
  for (const block of blocks) {
    const last = runs[runs.length - 1];
    if (last && last[1] + 1 === block && last[2] === owners(block)) last[1] = block;
    else runs.push([block, block, owners(block)]);
  }
  return runs.map(([first, last, count]) => (first === last ? first : first + "-" + last) + (count > 1 ? "×" + (count > 10 ? "11+" : count) : "")).join(" ");
}
function statusAt(row, step) {
  const phase = row[R.phases].find(([, first, last]) => first <= step && step <= last);
  return phase ? data.statuses[phase[0]] : "";
}
function drawTables() {
  const step = current >= numPoints ? Infinity : stepOf(current), running = [...tables].sort(([a], [b]) => a - b);
  table("tables", [["request", false], ["seq", true], ["state", false], ["blocks", true], ["block table (×: owners)", false]],
    running.slice(0, MOST_TABLES).map(([seq, blocks]) => {
      const row = requestOf.get(seq);
      return [linkTo(row[R.label], () => jumpTo(seq)), seq, statusAt(row, step), blocks.length, blockRanges(blocks)];
    }));
  $("tables-words").textContent = running.length > MOST_TABLES ? `and ${show(running.length - MOST_TABLES)} more` : running.length ? "" : "No sequence holds a block.";
}

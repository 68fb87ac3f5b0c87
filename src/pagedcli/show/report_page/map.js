/* The block pool and the block tables at one frame. */
let current = 0;

/* ---- the pool and the tables at any frame: the changes since a key frame */
const KEY_EVERY = Math.max(50, Math.ceil(numFrames / Math.max(8, Math.min(200, 4e7 / numBlocks))));
const keyFrames = [], keyTables = [];
const pool = new Uint8Array(numBlocks);
let tables = new Map();  // sequence -> its blocks; the arrays are never changed, so a key frame shares them
let poolFrame = -1;
function applyFrame(frame) {
  for (const packed of data.frames[frame]) pool[Math.floor(packed / 16)] = packed % 16;
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
const cellWords = code => code < 4 ? CELLS[code][1] : `shared by ${code - 2 > 10 ? "11 or more" : code - 2} sequences`;
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
    for (let start = 0; start < numBlocks;) {
      const kind = Math.min(pool[start], 4), rowEnd = Math.min(numBlocks, (Math.floor(start / perRow) + 1) * perRow);
      let end = start + 1;
      while (end < rowEnd && Math.min(pool[end], 4) === kind) end++;
      context.fillStyle = colour[names[kind]];
      context.fillRect(start % perRow * size, Math.floor(start / perRow) * size, (end - start) * size, size);
      start = end;
    }
  } else for (let block = 0; block < numBlocks; block++) drawCell(context, block % perRow * size, Math.floor(block / perRow) * size, size, pool[block]);
  if (selectedBlock !== null) {
    context.strokeStyle = colour.text; context.lineWidth = 2; context.setLineDash([]);
    context.strokeRect(selectedBlock % perRow * size, Math.floor(selectedBlock / perRow) * size, Math.max(4, size), Math.max(4, size));
  }
  const counts = [0, 0, 0, 0, 0];
  for (let block = 0; block < numBlocks; block++) counts[Math.min(pool[block], 4)]++;
  const used = counts[2] + counts[3] + counts[4];
  $("pool-words").textContent = `${moment(current)}: in use ${show(used)} (${show(counts[4])} shared, ${show(counts[2])} being filled) + cached ${show(counts[1])} + empty ${show(counts[0])} = ${show(numBlocks)} blocks`;
  canvas.setAttribute("aria-label", $("pool-words").textContent);
  $("map-note").textContent = `In the order of block ids, ${show(perRow)} in a row; a block holds ${plural(engine.block_size, "token")}. Point at a block to see who holds it.`;
  drawTables();
  drawBlock();
}
function holdersOf(block) {
  const holders = [];
  for (const [seq, blocks] of tables) {
    const place = blocks.indexOf(block);
    if (place >= 0) holders.push(`${requestOf.get(seq)[R.label]} (seq ${seq}, its block ${place})`);
  }
  return holders;
}
function blockAt(event) {
  const column = Math.floor(event.offsetX / mapGrid.size), block = Math.floor(event.offsetY / mapGrid.size) * mapGrid.perRow + column;
  return column >= mapGrid.perRow || block < 0 || block >= numBlocks ? null : block;
}
function blockWords(block) {
  const holders = holdersOf(block), more = holders.length > 6 ? ` and ${holders.length - 6} more` : "";
  return `block ${block}: ${cellWords(pool[block])}` + (holders.length ? `; held by ${holders.slice(0, 6).join(", ")}${more}` : "");
}
const mapTip = event => blockAt(event) === null ? "" : blockWords(blockAt(event));

/* ---- one block: its state at this step, and the steps that changed it */
let selectedBlock = null;
const MOST_CHANGES = 60;
function changesOf(block) {
  const changes = [];
  data.frames.forEach((frame, i) => { for (const packed of frame) if (Math.floor(packed / 16) === block) changes.push([i, packed % 16]); });
  return changes;
}
function selectBlock(block) {
  selectedBlock = block;
  $("block-story").replaceChildren();
  if (block !== null) {
    const changes = changesOf(block);
    for (const [frame, code] of changes.slice(0, MOST_CHANGES)) $("block-story").append(linkTo(`${stepName(frame)}: ${cellWords(code)}`, () => setFrame(frame)), "; ");
    if (changes.length > MOST_CHANGES) $("block-story").append(`and ${show(changes.length - MOST_CHANGES)} more changes`);
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
  const owners = block => pool[block] > 3 ? pool[block] - 2 : 1, runs = [];
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

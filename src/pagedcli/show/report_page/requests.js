/* The tables of requests and of prefix lookups. */
function jumpTo(seq) {
  selectedSeq = seq;
  const row = requestOf.get(seq);
  if (!inRange(row)) setRange(0, numPoints - 1);
  setFrame(pointOf(row[R.first_step]), true);
  scrollToRow(timelineRows.indexOf(row));
  requestTable.draw();
  $("h-timeline").scrollIntoView({ block: "center" });
}
let onlySelected = data.selected.length > 0;  // until something is searched
const cellOf = {  // how values are drawn, by name or type
  label: row => linkTo(row[R.label], () => jumpTo(row[R.seq_id])),
  float: (row, name) => seconds(row[R[name]]),
};
const requestTable = pagedTable("requests", requests, data.requestTable.map(([name, words, kind]) => {
  const cell = cellOf[name] || cellOf[kind];
  return { words, number: kind !== "text", value: row => row[R[name]], ...(cell && { cell: row => cell(row, name) }) };
}), {
  what: "sequences",
  textOf: row => `${row[R.label]} seq ${row[R.seq_id]} ${row[R.end]}`,
  keep: row => inRange(row) && (!onlySelected || data.selected.includes(row[R.seq_id])),
  note: () => (isZoomed() ? `; active in ${stepName(Math.floor(from))} to ${stepName(Math.ceil(to))}` : "") + (onlySelected ? "; only the one asked for" : ""),
  classOf: row => row[R.seq_id] === selectedSeq ? "selected" : "",
});
function drawSlowest() {
  $("slowest").replaceChildren(...data.slowest.map(([seq, label, why]) => {
    const item = element("li");
    item.append(linkTo(label, () => jumpTo(seq)), ` took ${why}`);
    return item;
  }));
}

/* ---- prefix lookups */
function shareCell(part, whole) {
  const cell = element("span");
  if (!whole) { cell.textContent = "-"; return cell; }
  const bar = element("span", undefined, "share");
  bar.style.width = Math.round(90 * part / whole) + "px";
  cell.append(bar, percent(100 * part / whole));
  return cell;
}
const QUOTED = ["hit", "late_hit", "evicted", "in_flight"];  // rows whose figures the sentences at the top have, with the ceiling
function drawTotals() {
  const { first, own } = data.explain.totals;
  const words = data.explain.partWords;
  const parts = Object.entries(words).filter(([key]) => !["num_tokens", "ideal"].includes(key));
  const cells = (words, key) => [words, first[key], shareCell(first[key], first.num_tokens), own[key], shareCell(own[key], own.num_tokens)];
  const classOf = key => QUOTED.includes(key) ? "quoted" : "";
  const rows = parts.filter(([key]) => key === "hit" || first[key] || own[key]).map(([key, words]) => ({ className: classOf(key), cells: cells(words, key) }));
  rows.push({ className: "strong", cells: cells(words.num_tokens, "num_tokens") });
  rows.push({ className: "strong quoted", cells: cells(words.ideal, "ideal") });
  table("totals", [["tokens that were", false], ["tokens, first lookups", true], ["share", false], ["tokens, later lookups (preempted, n > 1)", true], ["share", false]], rows);
  const longest = data.explain.longestSharedPrefix;
  const sizes = [...new Set([engine.block_size, 16, 256])].sort((a, b) => a - b);
  $("explain-words").textContent = `Minimum cacheable prefix: ${plural(engine.block_size, "token")} (one block). Longest shared prefix seen: ${plural(longest, "token")} = ${sizes.map(size => plural(Math.floor(longest / size), "block") + " at block size " + size).join(", ")}.`;
  const reasons = Object.entries(data.explain.reasonWords).filter(([key]) => first.reasons[key] || own.reasons[key]);
  table("reasons", [["why they ended there", false], ["first lookups", true], ["later lookups (preempted, n > 1)", true]],
    reasons.map(([key, words]) => [words, first.reasons[key] || 0, own.reasons[key] || 0]));
}
if (data.explain.snapshots.length) {
  $("snapshots-section").hidden = false;
  table("snapshots", data.explain.snapshotColumns.map(([, words, kind]) => [words, kind !== "text"]), data.explain.snapshots);
}
if (data.explain.salts.length) {
  $("salts-section").hidden = false;
  table("salts", data.explain.saltColumns.map(([, words, kind]) => [words, kind !== "text"]), data.explain.salts);
}
const lookupPart = (lookup, wanted) => lookup[data.explain.lookupColumns.findIndex(([name]) => name === wanted)];
const lookupText = lookup => [lookupPart(lookup, "why"), lookupPart(lookup, "divergence")].filter(Boolean).join(". ");
const lookupColumns = data.explain.lookupColumns.map(([name, words, kind], place) => ({ name, words, number: kind !== "text", value: lookup => lookup[place] }));
pagedTable("lookups", data.explain.lookups, [
  ...lookupColumns.filter(({ name }) => !["reason", "why", "divergence"].includes(name)),
  { words: "why it ended there", number: false, value: lookupText },
], {
  what: "lookups",
  textOf: lookup => `${lookup[2]} seq ${lookup[1]} step ${lookup[0]} ${lookup[3]} ${lookupPart(lookup, "reason").replaceAll("_", " ")} ${lookupText(lookup)}`,
  note() {
    const left = data.explain.numLookups - data.explain.lookups.length;
    return left ? ` (${show(left)} that lost least are left out)` : "";
  },
});

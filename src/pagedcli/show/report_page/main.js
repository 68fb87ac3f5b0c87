/* The head of the page, and what moves the shown step and the range. */
const pending = new Set();
function redraw(ids) {
  if (!pending.size) requestAnimationFrame(() => {
    if (pending.has("map")) drawMap();
    for (const chart of charts) if (pending.has(chart.id)) chart.draw();
    pending.clear();
  });
  for (const id of ids) pending.add(id);
}
const redrawAll = () => redraw(["map", ...charts.map(chart => chart.id)]);
function setFrame(frame, keepRows) {
  const slider = $("slider");
  current = Math.max(+slider.min, Math.min(+slider.max, Math.round(frame)));
  goToFrame(current);
  slider.value = current;
  slider.setAttribute("aria-valuetext", moment(current));
  $("step-name").textContent = moment(current);
  if (!keepRows) showRunningRows();
  redrawAll();
}
/* zooming moves the slider, the timelines and the table of requests together */
function setRange(first, last) {
  from = Math.max(0, first); to = Math.min(numPoints - 1, last);
  if (to - from < 4) to = Math.min(numPoints - 1, from + 4);
  if (to <= from) to = from + 1;
  $("whole").hidden = !isZoomed();
  $("slider").min = Math.floor(from);
  $("slider").max = isZoomed() ? Math.min(numPoints - 1, Math.ceil(to)) : numFrames - 1;
  timelineRows = isZoomed() ? requests.filter(inRange) : requests;
  requestTable.draw();
  setFrame(current);
}
function zoom(factor) {
  const half = (to - from) * factor / 2, middle = Math.min(current, numPoints - 1);
  setRange(Math.max(0, middle - half), Math.min(numPoints - 1, middle + half));
}
for (const chart of charts) {
  const canvas = $(chart.id), left = chart.left || (() => LEFT);
  const pointAt = event => from + (event.offsetX - left()) / Math.max(1, canvas.clientWidth - left() - RIGHT) * (to - from);
  const clamp = point => Math.max(0, Math.min(numPoints - 1, Math.floor(point + .5)));
  let dragFrom = null;
  canvas.addEventListener("pointermove", event => {
    $(chart.id + "-readout").textContent = chart.readout(clamp(pointAt(event)), event);
    if (dragFrom !== null && Math.abs(event.offsetX - dragFrom.x) > 4) {
      chart.draw();
      const context = canvas.getContext("2d");
      context.globalAlpha = .2; context.fillStyle = colour.accent;
      context.fillRect(dragFrom.x, TOP, event.offsetX - dragFrom.x, canvas.clientHeight - TOP - BOTTOM);
      context.globalAlpha = 1;
    }
  });
  canvas.addEventListener("pointerdown", event => { dragFrom = { x: event.offsetX, point: pointAt(event) }; canvas.setPointerCapture(event.pointerId); });
  canvas.addEventListener("pointerup", event => {
    if (dragFrom === null) return;
    const end = pointAt(event);
    if (Math.abs(event.offsetX - dragFrom.x) > 4) setRange(Math.min(end, dragFrom.point), Math.max(end, dragFrom.point));
    else setFrame(clamp(end), chart.id === "timeline");
    dragFrom = null;
  });
  canvas.addEventListener("pointercancel", () => { dragFrom = null; });
}
$("timeline-box").addEventListener("scroll", () => redraw(["timeline"]));
new ResizeObserver(() => redraw(["timeline"])).observe($("timeline-box"));
$("whole").addEventListener("click", () => setRange(0, numPoints - 1));
$("zoom-in").addEventListener("click", () => zoom(.5));
$("zoom-out").addEventListener("click", () => zoom(2));
$("slider").addEventListener("input", event => setFrame(+event.target.value));
$("back").addEventListener("click", () => setFrame(current - 1));
$("forward").addEventListener("click", () => setFrame(current + 1));
let timer = null;
$("play").addEventListener("click", () => {
  const slider = $("slider");
  if (timer !== null) { clearInterval(timer); timer = null; }
  else {
    if (current >= +slider.max) setFrame(+slider.min);
    timer = setInterval(() => {
      setFrame(current + Math.max(1, Math.round((slider.max - slider.min) / 400)));
      if (current >= +slider.max) $("play").click();
    }, 100);
  }
  $("play").textContent = timer === null ? "Play" : "Pause";
  $("play").setAttribute("aria-pressed", String(timer !== null));
});
document.querySelector("details").addEventListener("toggle", event => {
  if (!event.target.open) return;
  const every = Math.max(1, Math.ceil(numPoints / 200)), rows = [];
  for (let i = 0; i < numPoints; i += every) rows.push([stepName(i), seconds(timeAt(i)), at("used", i), at("shared", i), at("cached", i), derived.empty[i], at("running", i), at("waiting", i), percent(derived.cumulative[i]), percent(derived.rolling[i]), percent(derived.waste[i])]);
  table("steps-table", [["step", false], ["time", true], ["in use", true], ["shared", true], ["cached", true], ["empty", true], ["running", true], ["waiting", true], ["hits, run", true], ["hits, last 100", true], ["waste", true]], rows);
});

/* ---- keys, wherever the focus is, but for fields that take them */
const KEYS = {
  ArrowLeft: event => setFrame(current - (event.shiftKey ? 10 : 1)), ArrowRight: event => setFrame(current + (event.shiftKey ? 10 : 1)),
  Home: () => setFrame(+$("slider").min), End: () => setFrame(+$("slider").max), " ": () => $("play").click(),
  "+": () => zoom(.5), "=": () => zoom(.5), "-": () => zoom(2), 0: () => setRange(0, numPoints - 1),
  b: () => $("block-search").focus(), "/": () => $("requests-search").focus(),
};
document.addEventListener("keydown", event => {
  const on = event.target, act = KEYS[event.key];
  if (!act || event.ctrlKey || event.altKey || event.metaKey || (on instanceof HTMLInputElement && on.type !== "range")) return;
  if (event.key === " " && (on instanceof HTMLButtonElement || on.tagName === "SUMMARY")) return;
  event.preventDefault();
  act(event);
});

/* ---- the head of the page */
const goTo = id => $(id).scrollIntoView({ block: "center" });
const peak = columns.used.reduce((best, used, i) => used > columns.used[best] ? i : best, 0);
const sources = [  // of the sentences of the story
  ["the step of the peak", () => { setFrame(peak); goTo("h-map"); }],
  ["its rows", () => goTo("totals")],
];
function drawHead() {
  $("title").textContent = "KV cache of " + data.file;
  const lineOf = (sentence, source) => {
    const line = element("p");  // --flags are not broken after their dashes
    line.append(...sentence.split(/(--[\w-]+)/).map((part, at) => at % 2 ? element("span", part, "flag") : part));
    if (source) line.append(" ", linkTo(...source));
    return line;
  };
  const verdicts = data.verdicts.map((sentence, i) => lineOf(sentence, i ? null : ["the lookups", () => goTo("h-explain")]));
  verdicts.forEach(line => line.classList.add("verdict"));
  $("story").replaceChildren(...verdicts, ...data.story.map((sentence, i) => lineOf(sentence, sources[i])));
  $("engine").textContent = `${engine.model} on ${engine.device}, ${engine.dtype}, attention ${engine.backend}; ${plural(numBlocks, "block")} of ${plural(engine.block_size, "token")} (${bytes(numBlocks * engine.block_bytes)})${numGroups > 1 ? ` for ${numGroups} groups of layers` : ""}; at most ${show(engine.max_num_seqs)} sequences and ${show(engine.max_num_batched_tokens)} tokens per step; prefix caching ${engine.enable_prefix_caching ? "on" : "off"}, eviction ${engine.eviction}`;
  const notes = [...data.notes];
  if (data.group > 1) notes.push(`the run is long: each point stands for ${data.group} steps`);
  if (summary.num_failed_steps) notes.push(`${plural(summary.num_failed_steps, "step")} failed, and the sequences running in them waited again`);
  if (data.numUnfinished) notes.push(`${plural(data.numUnfinished, "sequence")} had not finished when the trace ended`);
  $("notes").textContent = notes.length ? "Note: " + notes.join("; ") + "." : "";
  const others = summary.hit_rates.run.from_others, own = summary.hit_rates.run.own;
  const tiles = [
    [show(requests.length), `sequences in ${plural(data.numSteps, "step")}, ${seconds(endTime)}`],
    [show(summary.num_generated_tokens), "tokens generated"],
    [others.token_rate === null ? "-" : percent(100 * others.token_rate), `prefix hits from other requests, of the tokens looked up in this run (${show(others.tokens_hit)} of ${show(others.tokens)})`],
    [show(own.tokens_hit), "tokens found in a request's own blocks, after a preemption or for n > 1"],
    [show(summary.num_preemptions), `preemptions; ${plural(summary.num_recomputed_tokens, "token")} recomputed`],
    [percent(100 * summary.peak_used_blocks / numBlocks), `of the pool in use at the peak (${show(summary.peak_used_blocks)} of ${show(numBlocks)} blocks)`],
    [show(summary.num_duplicate_blocks), "blocks with content that another block already had"],
  ];
  $("tiles").replaceChildren(...tiles.map(([value, words]) => { const tile = element("div", undefined, "tile"); tile.append(element("b", value), element("span", words)); return tile; }));
  $("footer").textContent = `Written by pagedcli ${engine.pagedcli_version} from ${data.file}. The page is self-contained and loads nothing.`;
  if (data.refused.length) {
    $("refused-section").hidden = false;
    table("refused", [["request", false], ["code", false], ["message", false]], data.refused.map(event => [event.row_id ?? event.request_id, event.code, event.message]));
  }
}
const swatch = (context, key) => { context.fillStyle = colour[key]; context.fillRect(1, 3, 14, 10); context.strokeStyle = colour["empty-edge"]; context.lineWidth = 1; context.strokeRect(1.5, 3.5, 13, 9); };
function drawLegends() {
  drawMapLegend();
  legend("occupancy-legend", OCCUPANCY_WORDS, swatch);
  legend("timeline-legend", data.statuses.map(status => [status, status]), (context, status) => drawPhase(context, 0, 1, 16, 14, status));
  for (const chart of charts) if (chart.drawLegend) chart.drawLegend();
}
buildKeyFrames();
drawHead();
drawLegends();
drawSlowest();
drawTotals();
$("slider").max = numFrames - 1;
setFrame(Math.max(0, columns.used.indexOf(columns.used.reduce((a, b) => Math.max(a, b), 0))));
if (data.selected.length) jumpTo(data.selected[0]);
$("requests-search").addEventListener("input", () => { onlySelected = false; requestTable.draw(); });
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { readColours(); drawLegends(); redrawAll(); });
addEventListener("resize", redrawAll);
document.documentElement.dataset.ready = "yes";

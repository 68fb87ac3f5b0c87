/* Charts over the steps, all with one cursor and one range. */
let from = 0, to = Math.max(1, numPoints - 1);
const LEFT = 56, RIGHT = 14, TOP = 20, BOTTOM = 38;
const timelineLeft = () => innerWidth < 600 ? 84 : 150;  // room for the ids
const charts = [];
const xOf = (point, width, left = LEFT) => left + (point - from) / Math.max(1e-9, to - from) * (width - left - RIGHT);

function niceTicks(low, high, most) {
  const span = Math.max(1e-9, high - low), raw = span / most, power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].map(f => f * power).find(s => s >= raw);
  const ticks = [];
  for (let tick = Math.ceil(low / step) * step; tick <= high + step * 1e-6; tick += step) ticks.push(tick);
  return ticks;
}
/* steps, and below each the time since the run's first step */
function drawStepAxis(context, width, height, left = LEFT) {
  context.fillStyle = colour.muted; context.font = "12px system-ui, sans-serif"; context.textBaseline = "alphabetic";
  context.textAlign = "left";
  context.fillText("step", 4, height - 22);
  context.fillText("time", 4, height - 6);
  context.textAlign = "center";
  for (const tick of niceTicks(stepOf(from), stepOf(to), Math.max(2, (width - left) / 110))) {
    if (!Number.isInteger(tick)) continue;
    const x = Math.min(width - 30, xOf(pointOf(tick), width, left));
    context.fillText(number.format(tick), x, height - 22);
    context.fillText(seconds(timeAt(pointOf(tick))), x, height - 6);
  }
}
function drawAxes(context, width, height, top, format, unit) {
  context.font = "12px system-ui, sans-serif"; context.fillStyle = colour.muted; context.strokeStyle = colour.grid; context.lineWidth = 1; context.setLineDash([]);
  const yOf = value => height - BOTTOM - value / top * (height - TOP - BOTTOM);
  context.textAlign = "left"; context.textBaseline = "alphabetic";
  context.fillText(unit, 4, 12);
  context.textAlign = "right"; context.textBaseline = "middle";
  for (const tick of niceTicks(0, top, Math.max(2, height / 45))) {
    const y = Math.round(yOf(tick)) + .5;
    context.beginPath(); context.moveTo(LEFT, y); context.lineTo(width - RIGHT, y); context.stroke();
    context.fillText(format(tick), LEFT - 6, y);
  }
  drawStepAxis(context, width, height);
  return yOf;
}
function drawCursor(context, width, height, left = LEFT) {
  const x = xOf(Math.min(current, numPoints - 1), width, left);
  if (x < left - 1 || x > width - RIGHT + 1) return;
  context.strokeStyle = colour.text; context.lineWidth = 1; context.setLineDash([4, 3]);
  context.beginPath(); context.moveTo(x, TOP); context.lineTo(x, height - BOTTOM); context.stroke();
  context.setLineDash([]);
}
/* the points that fall on one pixel column are drawn as their mean */
function* buckets(width) {
  const first = Math.max(0, Math.floor(from)), last = Math.min(numPoints - 1, Math.ceil(to));
  const perPixel = Math.max(1, Math.floor((last - first + 1) / (width - LEFT - RIGHT)));
  for (let start = first; start <= last; start += perPixel) yield [start, Math.min(last, start + perPixel - 1)];
}
function meanOf(values, start, end) {
  let sum = 0, count = 0;
  for (let i = start; i <= end; i++) if (values[i] !== null) { sum += values[i]; count++; }
  return count ? sum / count : null;
}
function areaChart(id, layers, readout) {
  charts.push({ id, readout, draw() {
    const [context, width, height] = fitCanvas($(id));
    const yOf = drawAxes(context, width, height, numBlocks, t => show(Math.round(t)), "blocks");
    const spans = [...buckets(width)];
    const base = spans.map(() => 0);
    for (const [name, values] of layers) {
      context.fillStyle = colour[name];
      context.beginPath();
      const low = base.slice();
      spans.forEach(([start, end], i) => { base[i] += meanOf(values, start, end); });
      spans.forEach(([start], i) => context[i ? "lineTo" : "moveTo"](xOf(start, width), yOf(base[i])));
      for (let i = spans.length - 1; i >= 0; i--) context.lineTo(xOf(spans[i][0], width), yOf(low[i]));
      context.fill();
      if (spans.length === 1) context.fillRect(LEFT, yOf(base[0]), width - LEFT - RIGHT, yOf(low[0]) - yOf(base[0]));
    }
    drawCursor(context, width, height);
  } });
}
const stroke = (context, key) => { context.strokeStyle = colour[key.name]; context.lineWidth = 2; context.setLineDash(key.dash || []); context.beginPath(); context.moveTo(0, 8); context.lineTo(16, 8); context.stroke(); };
function lineChart(id, lines, { format, unit, readout, top }) {
  const styles = [{ name: "accent" }, { name: "curve2", dash: [5, 3] }];
  const drawLegend = () => legend(id + "-legend", lines.map(([words], i) => [styles[i], words]), stroke);
  charts.push({ id, readout, drawLegend, draw() {
    const [context, width, height] = fitCanvas($(id));
    const spans = [...buckets(width)];
    const drawn = lines.map(([, values]) => spans.map(([start, end]) => meanOf(values, start, end)));
    const highest = Math.max(0, ...drawn.map(points => points.reduce((a, b) => Math.max(a, b ?? 0), 0)));
    const yOf = drawAxes(context, width, height, top || highest * 1.08 || 1, format, unit);
    drawn.forEach((points, i) => {
      context.strokeStyle = colour[styles[i].name]; context.lineWidth = 1.6; context.setLineDash(styles[i].dash || []);
      context.beginPath();
      let pen = false;
      points.forEach((value, k) => {
        if (value === null) { pen = false; return; }
        const x = xOf(spans[k][0], width);
        if (pen) context.lineTo(x, yOf(value)); else { context.moveTo(x, yOf(value)); context.lineTo(x + .01, yOf(value)); }
        pen = true;
      });
      context.stroke();
    });
    drawCursor(context, width, height);
  } });
}

/* ---- columns made from columns */
const at = (name, i) => columns[name][i];
const derived = { exclusive: [], empty: [], cumulative: [], rolling: [], waste: [], speed: [] };
(function derive() {
  const windowPoints = Math.max(1, Math.round(100 / data.group));
  let hit = 0, looked = 0, rollingHit = 0, rollingLooked = 0, sampled = 0, busy = 0;
  for (let i = 0; i < numPoints; i++) {
    derived.exclusive.push(at("used", i) - at("shared", i));
    derived.empty.push(numBlocks - at("used", i) - at("cached", i));
    hit += at("hit_tokens", i); looked += at("lookup_tokens", i);
    rollingHit += at("hit_tokens", i); rollingLooked += at("lookup_tokens", i);
    sampled += at("sampled", i); busy += at("busy_ns", i);
    if (i >= windowPoints) {
      rollingHit -= at("hit_tokens", i - windowPoints); rollingLooked -= at("lookup_tokens", i - windowPoints);
      sampled -= at("sampled", i - windowPoints); busy -= at("busy_ns", i - windowPoints);
    }
    derived.cumulative.push(looked ? 100 * hit / looked : null);
    derived.rolling.push(rollingLooked ? Math.min(100, 100 * rollingHit / rollingLooked) : null);
    derived.waste.push(at("used", i) ? 100 * at("unfilled_slots", i) / (at("used", i) * engine.block_size) : null);
    derived.speed.push(busy ? sampled * 1e9 / busy : null);
  }
})();
const OCCUPANCY = [["shared", columns.shared], ["used", derived.exclusive], ["cached", columns.cached], ["empty", derived.empty]];
const OCCUPANCY_WORDS = [["shared", "in use, shared"], ["used", "in use by one"], ["cached", "cached, free to reuse"], ["empty", "empty"]];
areaChart("occupancy", OCCUPANCY, i => `${moment(i)}: in use ${show(at("used", i))} (${show(at("shared", i))} shared, which saves ${show(at("saved", i))}), cached ${show(at("cached", i))}, empty ${show(derived.empty[i])}; evicted ${show(at("evicted", i))}, preempted ${show(at("preempted", i))}`);
lineChart("hits", [["run so far, from other requests", derived.cumulative], ["last 100 steps, from other requests", derived.rolling]], {
  format: show, unit: "%", top: 100,
  readout: i => `${moment(i)}: run so far ${percent(derived.cumulative[i])}, last 100 steps ${percent(derived.rolling[i])}; own blocks again: ${plural(at("self_hit_tokens", i), "token")}` });
lineChart("waste", [["unfilled slots", derived.waste]], {
  format: t => +t.toFixed(2), unit: "%",
  readout: i => `${moment(i)}: ${percent(derived.waste[i])}, ${plural(at("unfilled_slots", i), "slot")}, ${bytes(at("unfilled_slots", i) * engine.block_bytes / engine.block_size)}` });
lineChart("speed", [["mean of the last 100 steps, without observers", derived.speed]], {
  format: t => compact.format(t), unit: "tokens/s",
  readout: i => `${moment(i)}: ${derived.speed[i] === null ? "-" : show(Math.round(derived.speed[i]))} tokens/s; ${plural(at("new_tokens", i), "token")} computed, ${show(at("sampled", i))} generated` });
lineChart("seqs", [["running", columns.running], ["waiting", columns.waiting]], {
  format: t => compact.format(t), unit: "sequences",
  readout: i => `${moment(i)}: ${show(at("running", i))} running, ${show(at("waiting", i))} waiting` });

/* ---- timelines: one row per sequence that is active in the range; only visible rows are drawn */
const ROW = 16;
let timelineRows = requests, selectedSeq = null;
const isZoomed = () => from > 0 || to < numPoints - 1;
const inRange = row => !isZoomed() || (row[R.last_step] >= stepOf(from) && row[R.first_step] < stepOf(to) + data.group);
function drawPhase(context, x, y, width, height, status) {
  const middle = y + height / 2;
  context.fillStyle = colour[status];
  if (status === "waiting" || status === "preempted") context.fillRect(x, middle - 1, width, 2);
  if (status === "preempted") for (let tick = x; tick < x + width; tick += 6) context.fillRect(tick, y + 2, 2, height - 4);
  if (status === "prefill") context.fillRect(x, y + 1, width, height - 2);
  if (status === "decode") context.fillRect(x, y + 3, width, height - 6);
}
function shortened(text, width) {
  const most = Math.max(4, Math.floor(width / 6.6));
  return text.length <= most ? text : text.slice(0, most - 1) + "…";
}
function drawTimeline() {
  const box = $("timeline-box"), visible = Math.max(140, box.clientHeight), left = timelineLeft();
  $("timeline-space").style.height = Math.max(0, timelineRows.length * ROW + BOTTOM + TOP - visible) + "px";
  const [context, width, height] = fitCanvas($("timeline"), visible);
  const firstRow = Math.floor(box.scrollTop / ROW), shift = box.scrollTop - firstRow * ROW;
  const numRows = Math.ceil((height - BOTTOM - TOP) / ROW) + 1;
  context.save();
  context.beginPath(); context.rect(0, TOP, width, height - BOTTOM - TOP); context.clip();
  for (let i = 0; i < numRows && firstRow + i < timelineRows.length; i++) {
    const row = timelineRows[firstRow + i], y = TOP + i * ROW - shift;
    if (row[R.seq_id] === selectedSeq) { context.fillStyle = colour.accent; context.globalAlpha = .22; context.fillRect(0, y - 1, width, ROW); context.globalAlpha = 1; }
    for (const [status, first, last] of row[R.phases]) {
      const x = Math.max(left, xOf(pointOf(first), width, left)), end = Math.min(width - RIGHT, xOf(pointOf(last + 1), width, left));
      if (end >= left && x <= width - RIGHT) drawPhase(context, x, y, Math.max(1, end - x), ROW - 2, data.statuses[status]);
    }
    context.fillStyle = colour.muted; context.font = "11px system-ui, sans-serif"; context.textAlign = "right"; context.textBaseline = "middle";
    context.fillText(shortened(row[R.label], left - 8), left - 6, y + ROW / 2 - 1);
  }
  context.restore();
  drawStepAxis(context, width, height, left);
  drawCursor(context, width, height, left);
}
charts.push({ id: "timeline", left: timelineLeft, draw: drawTimeline, readout(i, event) {
  const row = timelineRows[Math.floor((event.offsetY - TOP + $("timeline-box").scrollTop) / ROW)];
  if (!row) return "";
  const steps = row[R.phases].map(([status, first, last]) => `${data.statuses[status]} ${first === last ? first : first + "-" + last}`);
  return `${row[R.label]} (seq ${row[R.seq_id]}): ${plural(row[R.num_prompt], "prompt token")}, ${row[R.num_output]} generated, ${row[R.end]}, ${seconds(row[R.total_s])}; steps: ${steps.join(", ")}`;
} });
function scrollToRow(index) {
  const box = $("timeline-box");
  box.scrollTop = Math.max(0, index * ROW - box.clientHeight / 3);
}
function showRunningRows() {
  const box = $("timeline-box"), step = stepOf(Math.min(current, numPoints - 1));
  const runs = row => row[R.first_step] <= step && step <= row[R.last_step];
  const firstRow = Math.floor(box.scrollTop / ROW), numRows = Math.floor((box.clientHeight - BOTTOM - TOP) / ROW);
  if (timelineRows.slice(firstRow, firstRow + numRows).some(runs)) return;
  const index = timelineRows.findIndex(runs);
  if (index >= 0) scrollToRow(index);
}

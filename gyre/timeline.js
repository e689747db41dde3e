"use strict";
// Draws the runs of the page from the numbers in #data; gyre/timeline_page.py says how they are packed.
// Times are in tenths of a second since the beginning of the run.

const DATA = JSON.parse(document.getElementById("data").textContent);
const element = (id) => document.getElementById(id);
const chart = element("chart"), base = element("base"), over = element("over"), tip = element("tip");
const LEFT = 62, RIGHT = 14, TOP = 18, GAP = 26, AXIS = 20, WATER = 170, READY = 80;
const STACK_ORDER = [2, 3, 1, 4, 0, 5, 6]; // from the bottom: training, moves, rollout, not there
const STACK_OVER = 140; // cells; above that their rows would be too thin to read
const ROWS_AT_MOST = 4000;

let run, view, layout, colours, drag = null;

// -- what is packed -------------------------------------------------------------------------------------------------
function unpackRows(rows) {
  const total = rows.reduce((sum, row) => sum + row.length / 2, 0);
  const unpacked = {
    first: new Int32Array(rows.length + 1), start: new Int32Array(total), end: new Int32Array(total),
    state: new Uint8Array(total), reason: new Int32Array(total),
  };
  let i = 0;
  rows.forEach((row, rank) => {
    unpacked.first[rank] = i;
    for (let k = 0, t = 0; k < row.length; k += 2, i++) {
      unpacked.start[i] = t;
      unpacked.end[i] = t += row[k];
      unpacked.state[i] = row[k + 1] % 8;
      unpacked.reason[i] = Math.floor(row[k + 1] / 8);
    }
  });
  unpacked.first[rows.length] = i;
  return unpacked;
}

function unpackSteps(packed) {
  const times = [], values = [];
  for (let k = 0, t = 0; k < packed.length; k += 2) {
    times.push(t += packed[k]);
    values.push(packed[k + 1]);
  }
  return { times, values };
}

function unpack(packed) {
  const curves = {};
  for (const name in packed.curves) curves[name] = unpackSteps(packed.curves[name]);
  return { ...packed, n: packed.rows.length, segments: unpackRows(packed.rows), curves };
}

// The index of the last entry in [low, high) of a rising list that is not above t; low - 1 where all are.
function lastAt(list, t, low = 0, high = list.length) {
  while (low < high) {
    const middle = (low + high) >> 1;
    if (list[middle] <= t) low = middle + 1; else high = middle;
  }
  return low - 1;
}

function valueAt(steps, t) {
  const i = lastAt(steps.times, t);
  return i < 0 ? 0 : steps.values[i];
}

// -- words ----------------------------------------------------------------------------------------------------------
const two = (n) => String(n).padStart(2, "0");

function clock(tenths, fine = true) {
  const s = tenths / 10, h = Math.floor(s / 3600), m = Math.floor(s / 60) % 60;
  const rest = fine ? (s % 60).toFixed(1).padStart(4, "0") : two(Math.round(s) % 60);
  return h ? `${h}:${two(m)}:${rest}` : `${m}:${rest}`;
}

function cellName(rank) {
  if (rank >= run.cells) return `engine ${rank}`;
  return rank ? `cell ${rank}` : "cell 0 (core)";
}

// -- where things are -----------------------------------------------------------------------------------------------
const stacked = () => run.n > ROWS_AT_MOST || element("stack").checked;
const span = () => view.b - view.a;
const xOf = (t) => LEFT + (t - view.a) / span() * layout.w;
const tOf = (x) => Math.min(view.b, Math.max(view.a, view.a + (x - LEFT) / layout.w * span()));

function place() {
  const row = Math.max(1, Math.min(22, Math.floor(420 / Math.max(1, run.n))));
  const gantt = stacked() ? 300 : Math.max(40, row * run.n);
  const water = TOP + gantt + GAP, ready = water + WATER + GAP;
  layout = { w: Math.max(100, chart.clientWidth - LEFT - RIGHT), row, gantt, water, ready, bottom: ready + READY };
  for (const canvas of [base, over]) {
    const ratio = window.devicePixelRatio || 1, height = layout.bottom + AXIS;
    canvas.width = (layout.w + LEFT + RIGHT) * ratio;
    canvas.height = height * ratio;
    canvas.style.height = `${height}px`;
    canvas.getContext("2d").setTransform(ratio, 0, 0, ratio, 0, 0);
  }
}

function takeColours() {
  const style = getComputedStyle(document.documentElement);
  colours = {};
  for (const name of ["page", "text", "dim", "line", "mark", "capacity", "water", "running", "ready"])
    colours[name] = style.getPropertyValue(`--${name}`).trim();
  colours.states = DATA.states.map((_, i) => style.getPropertyValue(`--s${i}`).trim());
}

// -- cells ----------------------------------------------------------------------------------------------------------
function eachVisible(rank, visit) {
  const { first, start, end } = run.segments;
  const last = first[rank + 1];
  for (let i = Math.max(first[rank], lastAt(start, view.a, first[rank], last)); i < last && start[i] < view.b; i++)
    if (end[i] > view.a) visit(i, Math.max(start[i], view.a), Math.min(end[i], view.b));
}

function drawRows(g) {
  const gap = layout.row > 5 ? 1 : 0;
  for (let rank = 0; rank < run.n; rank++)
    eachVisible(rank, (i, a, b) => {
      g.fillStyle = colours.states[run.segments.state[i]];
      g.fillRect(xOf(a), TOP + rank * layout.row, xOf(b) - xOf(a), layout.row - gap);
    });
  g.fillStyle = colours.dim;
  g.textAlign = "right";
  for (let rank = 0, free = 0; rank < run.n; rank++) {
    const y = TOP + (rank + 0.5) * layout.row;
    if (y < free && rank !== 0) continue;
    g.fillText(rank < run.cells ? `cell ${rank}` : `engine ${rank}`, LEFT - 8, y);
    free = y + 13;
  }
}

// How many cells are in each state, over the time of each column of pixels.
function occupancy() {
  const columns = new Float64Array(layout.w * 8), scale = layout.w / span();
  for (let rank = 0; rank < run.n; rank++)
    eachVisible(rank, (i, a, b) => {
      const from = (a - view.a) * scale, to = (b - view.a) * scale, state = run.segments.state[i];
      for (let c = Math.floor(from); c < to && c < layout.w; c++)
        columns[c * 8 + state] += Math.min(to, c + 1) - Math.max(from, c);
    });
  return columns;
}

function drawStack(g) {
  const columns = occupancy(), scale = layout.gantt / Math.max(1, run.n);
  const level = new Float64Array(layout.w).fill(TOP + layout.gantt);
  for (const state of STACK_ORDER) {
    g.fillStyle = colours.states[state];
    for (let c = 0; c < layout.w; c++) {
      const h = columns[c * 8 + state] * scale;
      if (h > 0) g.fillRect(LEFT + c, level[c] -= h, 1, h + 0.3);
    }
  }
  ticks(g, TOP, layout.gantt, run.n, "");
}

// -- curves ---------------------------------------------------------------------------------------------------------
function ticks(g, top, height, most, title) {
  const rough = Math.max(1, most) / 3, power = 10 ** Math.floor(Math.log10(rough));
  const step = Math.max(1, [1, 2, 5, 10].map((k) => k * power).find((k) => k >= rough));
  g.strokeStyle = colours.line;
  g.fillStyle = colours.dim;
  g.textAlign = "right";
  g.lineWidth = 1;
  for (let value = 0; value <= most; value += step) {
    const y = Math.round(top + height * (1 - value / Math.max(1, most))) + 0.5;
    g.beginPath();
    g.moveTo(LEFT - 4, y);
    g.lineTo(LEFT + layout.w, y);
    g.stroke();
    g.fillText(value.toLocaleString("en"), LEFT - 8, y);
  }
  g.textAlign = "left";
  g.fillStyle = colours.text;
  g.fillText(title, LEFT, top - 9);
}

function trace(g, steps, top, height, most) {
  const y = (value) => top + height * (1 - value / Math.max(1, most));
  let i = Math.max(0, lastAt(steps.times, view.a));
  g.beginPath();
  g.moveTo(LEFT, y(valueAt(steps, view.a)));
  for (; i < steps.times.length && steps.times[i] <= view.b; i++) {
    if (steps.times[i] < view.a) continue;
    const x = xOf(steps.times[i]);
    g.lineTo(x, y(i ? steps.values[i - 1] : 0));
    g.lineTo(x, y(steps.values[i]));
  }
  g.lineTo(LEFT + layout.w, y(valueAt(steps, view.b)));
}

function line(g, steps, top, height, most, colour, width) {
  trace(g, steps, top, height, most);
  g.strokeStyle = colour;
  g.lineWidth = width;
  g.stroke();
}

function area(g, steps, top, height, most, colour) {
  trace(g, steps, top, height, most);
  g.lineTo(LEFT + layout.w, top + height);
  g.lineTo(LEFT, top + height);
  g.closePath();
  g.globalAlpha = 0.2;
  g.fillStyle = colour;
  g.fill();
  g.globalAlpha = 1;
  line(g, steps, top, height, most, colour, 1);
}

const highest = (...names) => names.reduce((most, name) => run.curves[name].values.reduce((a, b) => Math.max(a, b), most), 1);

function drawCurves(g) {
  const most = highest("capacity", "waterlevel"), groups = highest("ready");
  ticks(g, layout.water, WATER, most, "executions: waterlevel and running, against the slots in rollout");
  area(g, run.curves.capacity, layout.water, WATER, most, colours.capacity);
  line(g, run.curves.running, layout.water, WATER, most, colours.running, 1);
  line(g, run.curves.waterlevel, layout.water, WATER, most, colours.water, 1.8);
  ticks(g, layout.ready, READY, groups, "groups that are ready and not taken");
  area(g, run.curves.ready, layout.ready, READY, groups, colours.ready);
}

// -- time -----------------------------------------------------------------------------------------------------------
function drawAxis(g) {
  const steps = [0.1, 0.2, 0.5, 1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 28800, 86400];
  const rough = span() / 10 / Math.max(2, layout.w / 90);
  const step = 10 * (steps.find((s) => s >= rough) || 86400 * Math.ceil(rough / 86400));
  g.fillStyle = colours.dim;
  g.strokeStyle = colours.line;
  g.textAlign = "center";
  for (let t = Math.ceil(view.a / step) * step; t <= view.b; t += step) {
    const x = Math.round(xOf(t)) + 0.5;
    g.beginPath();
    g.moveTo(x, layout.bottom);
    g.lineTo(x, layout.bottom + 4);
    g.stroke();
    g.fillText(clock(t, step < 10), x, layout.bottom + 12);
  }
}

function mark(g, t, label, colour, dash, state) {
  if (t < view.a || t > view.b) return;
  const x = Math.round(xOf(t)) + 0.5;
  g.strokeStyle = g.fillStyle = colour;
  g.lineWidth = 1;
  g.setLineDash(dash);
  g.beginPath();
  g.moveTo(x, TOP - 2);
  g.lineTo(x, layout.bottom);
  g.stroke();
  g.setLineDash([]);
  const width = g.measureText(label).width, from = Math.min(x, LEFT + layout.w - width);
  if (from < state.free) return;
  g.textAlign = "left";
  g.fillText(label, from, 8);
  state.free = from + width + 6;
}

function drawMarks(g) {
  const marks = run.attempts.map(([t, number]) => [t, `attempt ${number}`, colours.text, []]);
  const shown = run.published.filter(([t]) => t >= view.a && t <= view.b);
  // Lines closer than 4 pixels would be a wall; every k-th then.
  const every = Math.max(1, Math.ceil(shown.length / (layout.w / 4)));
  shown.forEach(([t, version], i) => i % every || marks.push([t, `v${version}`, colours.mark, [3, 3]]));
  const state = { free: 0 };
  for (const [t, label, colour, dash] of marks.sort((a, b) => a[0] - b[0])) mark(g, t, label, colour, dash, state);
}

function draw() {
  place();
  const g = base.getContext("2d");
  g.font = "11px system-ui, sans-serif";
  g.textBaseline = "middle";
  if (stacked()) drawStack(g); else drawRows(g);
  drawCurves(g);
  drawAxis(g);
  drawMarks(g);
  hide();
}

let waiting = false;
function redraw() {
  if (waiting) return;
  waiting = true;
  requestAnimationFrame(() => { waiting = false; draw(); });
}

// -- pointing at things ---------------------------------------------------------------------------------------------
function aboutCell(rank, t) {
  const { first, start, end, state, reason } = run.segments;
  const i = lastAt(start, t, first[rank], first[rank + 1]);
  if (i < first[rank]) return [];
  const lines = [`${cellName(rank)}: ${DATA.states[state[i]]}`];
  lines.push(`since ${clock(start[i])}, for ${clock(end[i] - start[i])}`);
  const why = run.reasons[reason[i]];
  return why ? [...lines, `because: ${why}`] : lines;
}

function aboutCells(t) {
  const { first, start, state } = run.segments, counts = DATA.states.map(() => 0);
  for (let rank = 0; rank < run.n; rank++) {
    const i = lastAt(start, t, first[rank], first[rank + 1]);
    if (i >= first[rank]) counts[state[i]]++;
  }
  return counts.map((count, i) => [count, DATA.states[i]]).filter(([count]) => count)
    .map(([count, name]) => `${count.toLocaleString("en")} ${name}`);
}

function about(y, t) {
  const now = run.unix ? ` (${new Date((run.start + t / 10) * 1000).toLocaleString()})` : "";
  const lines = [clock(t) + now];
  const inside = y >= TOP && y < TOP + layout.gantt;
  const rank = Math.floor((y - TOP) / layout.row);
  if (inside && stacked()) lines.push(...aboutCells(t));
  else if (inside && rank < run.n) lines.push(...aboutCell(rank, t));
  const at = (name) => valueAt(run.curves[name], t).toLocaleString("en");
  lines.push(`waterlevel ${at("waterlevel")}, running ${at("running")}, capacity ${at("capacity")}`);
  lines.push(`groups ready ${at("ready")}`);
  return lines.join("\n");
}

function hide() {
  over.getContext("2d").clearRect(0, 0, over.width, over.height);
  tip.hidden = true;
}

function point(x, y) {
  const g = over.getContext("2d");
  hide();
  if (x < LEFT || x > LEFT + layout.w) return;
  if (drag !== null) {
    g.globalAlpha = 0.2;
    g.fillStyle = colours.text;
    g.fillRect(Math.min(x, drag), TOP, Math.abs(x - drag), layout.bottom - TOP);
    g.globalAlpha = 1;
  }
  g.strokeStyle = colours.text;
  g.lineWidth = 1;
  g.beginPath();
  g.moveTo(Math.round(x) + 0.5, TOP);
  g.lineTo(Math.round(x) + 0.5, layout.bottom);
  g.stroke();
  tip.textContent = about(y, tOf(x));
  tip.hidden = false;
  const right = x + 16 + tip.offsetWidth > chart.clientWidth;
  tip.style.left = `${right ? Math.max(0, x - 16 - tip.offsetWidth) : x + 16}px`;
  tip.style.top = `${Math.max(0, Math.min(y + 12, layout.bottom - tip.offsetHeight))}px`;
}

function show(a, b) {
  const whole = Math.max(1, run.length), width = Math.min(whole, Math.max(10, b - a));
  a = Math.min(Math.max(0, a), whole - width);
  view = { a, b: a + width };
  redraw();
}

const zoom = (by, t = (view.a + view.b) / 2) => show(t - (t - view.a) * by, t + (view.b - t) * by);
const all = () => show(0, run.length);

over.addEventListener("pointermove", (event) => point(event.offsetX, event.offsetY));
over.addEventListener("pointerleave", hide);
over.addEventListener("pointerdown", (event) => {
  if (event.button !== 0 || event.pointerType === "touch") return;
  drag = event.offsetX;
  over.setPointerCapture(event.pointerId);
});
over.addEventListener("pointerup", (event) => {
  const from = drag;
  drag = null;
  if (from !== null && Math.abs(event.offsetX - from) > 4) {
    const [a, b] = [tOf(from), tOf(event.offsetX)].sort((p, q) => p - q);
    show(a, b);
  }
});
over.addEventListener("pointercancel", () => { drag = null; hide(); });
over.addEventListener("dblclick", all);
over.addEventListener("wheel", (event) => {
  if (!event.ctrlKey && !event.shiftKey) return; // the page is scrolled by the wheel alone
  event.preventDefault();
  const turn = event.deltaY || event.deltaX;
  if (event.ctrlKey) zoom(turn > 0 ? 1.25 : 0.8, tOf(event.offsetX));
  else show(view.a + Math.sign(turn) * span() * 0.1, view.b + Math.sign(turn) * span() * 0.1);
}, { passive: false });
over.addEventListener("keydown", (event) => {
  const step = span() * 0.1;
  const does = {
    ArrowLeft: () => show(view.a - step, view.b - step), ArrowRight: () => show(view.a + step, view.b + step),
    "+": () => zoom(0.5), "-": () => zoom(2), 0: all,
  }[event.key];
  if (!does) return;
  event.preventDefault();
  does();
});
element("in").addEventListener("click", () => zoom(0.5));
element("out").addEventListener("click", () => zoom(2));
element("all").addEventListener("click", all);
element("stack").addEventListener("change", redraw);

// -- which run ------------------------------------------------------------------------------------------------------
function choose(index) {
  run = unpack(DATA.runs[index]);
  element("stack").checked = run.n > STACK_OVER;
  element("stack").disabled = run.n > ROWS_AT_MOST;
  element("empty").hidden = run.length > 0;
  chart.hidden = run.length <= 0;
  for (const cell of document.querySelectorAll("[data-run]"))
    cell.classList.toggle("chosen", Number(cell.dataset.run) === index);
  if (run.length > 0) all();
}

const pick = element("pick");
if (pick) pick.addEventListener("change", () => choose(Number(pick.value)));
takeColours();
window.addEventListener("resize", redraw);
window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { takeColours(); redraw(); });
choose(0);

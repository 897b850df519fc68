
"use strict";
// Text of a trace is set as text only, so that it cannot become markup.
const at = (id) => document.getElementById(id);
const traces = JSON.parse(at("data").textContent);
// A link may name another one than the first.
const traceIndex = Number(location.hash.slice(1)) in traces ? Number(location.hash.slice(1)) : 0;
const data = traces[traceIndex];
const SVG = "http://www.w3.org/2000/svg";
const OTHERS = 8;

function el(tag, className, text) {
  const node = document.createElement(tag);
  if (className) node.className = className;
  if (text !== undefined) node.textContent = text;
  return node;
}
function draw(parent, tag, attributes, text) {
  const node = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  if (text !== undefined) node.textContent = text;
  parent.append(node);
  return node;
}
function put(node, text) {
  if (node.textContent !== text) node.textContent = text;
}
const clamp = (value, low, high) => Math.min(Math.max(value, low), high);

// ---- Text and numbers

const KIB = 1024, MIB = KIB * 1024, GIB = MIB * 1024;
function bytes(count) {
  if (count >= GIB) return `${(count / GIB).toFixed(2)} GiB`;
  if (count >= MIB) return `${(count / MIB).toFixed(1)} MiB`;
  if (count >= KIB) return `${(count / KIB).toFixed(1)} KiB`;
  return count ? `${count} B` : "0";
}
const whole = (count) => String(count).replace(/\B(?=(\d{3})+$)/g, "\u202f");
const many = (count, one, more = `${one}s`) => `${whole(count)} ${count === 1 ? one : more}`;
function percent(part, all) {
  const share = all ? 100 * part / all : 0;
  return share > 0 && share < 0.1 ? "< 0.1 %" : `${share.toFixed(share < 10 ? 1 : 0)} %`;
}
// `path:line function`, as the function and where it is.
function parted(text) {
  const [, path, name] = /^(.*?:\d+) (.+)$/.exec(text) ?? [];
  return name ? [name, path] : [text, ""];
}
function brief(text) {
  const [name, path] = parted(text);
  return path ? `${name}, ${path.split("/").pop()}` : name;
}
const hex = (addr) => `0x${addr.toString(16)}`;
function summed(differences) {
  let sum = 0;
  return differences.map((difference) => sum += difference);
}
// The last of a rising list that is `value` or less.
function lastUpTo(list, value) {
  let [low, high] = [0, list.length];
  while (low < high) {
    const middle = (low + high) >> 1;
    if (list[middle] <= value) low = middle + 1; else high = middle;
  }
  return low - 1;
}
function phaseAt(step) {
  const phase = lastUpTo(data.phases.map((one) => one[1]), step);
  return phase < 0 ? "" : data.phases[phase][0];
}
// People count from one.
const stepWords = (step) => `step ${whole(step + 1)} of ${whole(data.steps)}${phaseAt(step) ? ` · ${phaseAt(step)}` : ""}`;

// ---- What is said first

put(at("name"), data.name);
const facts = data.total === data.usable || !data.total ? bytes(data.usable) : `${bytes(data.total)}, ${bytes(data.usable)} usable`;
put(at("facts"), `· ${many(data.steps, "step")}${data.runs.length ? ` · on ${facts}` : ""}`);
document.title = `${data.name} · Poorwill replay`;
const said = data.answer || data.name;
// The first sentence. A point between backticks ends none, and the next sentence may begin with one.
const [verdict] = /^(?:`[^`]*`|[^`])*?\.(?= [A-Z`])/.exec(said) ?? [said];
// What is between backticks is to be copied.
function say(node, text) {
  node.replaceChildren(...text.split("`").map((piece, index) => index % 2 ? el("code", "", piece) : piece));
}
say(at("answer"), verdict);
say(at("reasons"), said.slice(verdict.length).trim());
const chooser = at("trace");
chooser.append(...traces.map((one, index) => new Option(`${one.name}: ${one.answer.split(":")[0]}`, String(index))));
chooser.value = String(traceIndex);
at("traces").hidden = traces.length < 2;
chooser.onchange = () => { location.hash = chooser.value; };
// The script runs anew for each recording, also on the way back. Who chose by keyboard goes on from there.
addEventListener("hashchange", () => {
  history.replaceState(document.activeElement === chooser ? "chooser" : null, "");
  location.reload();
});
const NOTES = 3;
function showNotes(count) {
  const shown = data.notes.slice(0, count).map((note) => {
    const item = el("li");
    say(item, note);
    return item;
  });
  if (count < data.notes.length) {
    const item = el("li"), button = el("button", "", `${many(data.notes.length - count, "more note")}`);
    button.type = "button";
    button.onclick = () => showNotes(data.notes.length);
    item.append(button);
    shown.push(item);
  }
  at("notes").replaceChildren(...shown);
}
showNotes(data.notes.length <= NOTES + 1 ? data.notes.length : NOTES);

// ---- Series: live bytes, the card, and what each setup has mapped

const live = summed(data.live);
const peakLive = live.reduce((most, value) => Math.max(most, value), 0);
const series = [
  ...data.runs.map((run) => ({ kind: "line", name: run.name, run, look: run.look, values: summed(run.mapped), isShown: true })),
  { kind: "live", name: "live bytes", values: live, isShown: true },
  { kind: "usable", name: "usable on the card", values: [], isShown: true },
];

function sample(one) {
  const svg = document.createElementNS(SVG, "svg");
  svg.setAttribute("viewBox", "0 0 34 14");
  svg.setAttribute("aria-hidden", "true");
  if (one.kind === "live") draw(svg, "rect", { class: "swatch-live", x: 0, y: 1, width: 34, height: 12 });
  else draw(svg, "path", { class: one.kind === "usable" ? "usable" : `line l${one.look}`, d: "M0 7H34" });
  return svg;
}

// Long names break where settings begin.
function broken(name) {
  const node = el("span");
  for (const piece of name.split(/(?<=[:,_])/)) node.append(piece, el("wbr"));
  return node;
}
function cell(row, className, label) {
  const node = el("div", className);
  node.setAttribute("role", "cell");
  if (label) node.dataset.label = label;
  row.append(node);
  return node;
}

for (const one of series) {
  const row = el("div", "series-row");
  row.setAttribute("role", "row");
  const button = el("button", "toggle");
  button.type = "button";
  button.setAttribute("aria-pressed", "true");
  button.append(sample(one), broken(one.name));
  button.onclick = () => {
    one.isShown = !one.isShown;
    button.setAttribute("aria-pressed", String(one.isShown));
    drawChart();
  };
  cell(row).append(button);
  one.reading = cell(row, "number", "At cursor");
  const peak = cell(row, "number", "Peak"), kept = cell(row, "number", "Kept at the end"), verdict = cell(row);
  if (one.kind === "line") {
    const { run } = one;
    peak.append(bytes(run.peak[1]));
    peak.append(el("small", "", `${bytes(run.peak[1] - run.peak[2])} unused`));
    kept.append(bytes(run.held), el("small", "", `${bytes(run.held - Math.min(run.live, run.held))} unused`));
    if (run.failure) {
      verdict.append(el("span", "chip bad", `fails at step ${whole(run.failure[0] + 1)}`));
      verdict.append(el("small", "", `asks ${bytes(run.failure[1])}, ${bytes(Math.max(run.usable - run.failure[2], 0))} unmapped`));
      kept.replaceChildren("–");
    } else {
      verdict.append(el("span", "chip", data.ended ? `fits up to step ${whole(data.ended)}` : "fits"));
      if (run.retries) verdict.append(el("small", "", `${many(run.retries, "retry", "retries")} with all cache given back`));
    }
  } else if (one.kind === "live") {
    peak.append(bytes(peakLive));
    kept.append(bytes(live.at(-1) ?? 0));
  } else {
    peak.append(bytes(data.usable));
    kept.append("–");
  }
  at("series-rows").append(row);
}

// ---- Chart

const chart = at("chart");
// The cursor is always at a step whose values are exact.
let cursor = Math.max(lastUpTo(data.points, data.runs[0]?.peak[0] ?? 0), 0);
let chosen = Math.max(data.moments.findIndex(([step]) => step === data.runs[0]?.peak[0]), 0);
let scale = null;
let overlay = null;

function tickOf(extent, most) {
  for (let power = 1; ; power *= 10) {
    for (const digit of [1, 2, 5]) if (extent <= digit * power * most) return digit * power;
  }
}

function stairs(values) {
  let path = "", y = null;
  values.forEach((value, index) => {
    const next = scale.y(value).toFixed(1);
    if (next === y) return;
    path += y === null ? `M${scale.x(data.points[index]).toFixed(1)} ${next}` : `H${scale.x(data.points[index]).toFixed(1)}V${next}`;
    y = next;
  });
  if (!values.length) return "";
  const end = values.length < data.points.length ? data.points[values.length - 1] + 1 : data.steps;
  return `${path}H${scale.x(end).toFixed(1)}`;
}

function label(parent, className, x, y, text, width) {
  const node = draw(parent, "text", { class: className, x, y }, text);
  // About as wide as letters are; exact widths would have the page laid out for each.
  const letters = Math.floor((width - 8) / 6.6);
  if (letters < 3) node.remove();
  else if (text.length > letters) node.textContent = `${text.slice(0, letters - 1)}…`;
}

function drawChart() {
  const { clientWidth: width, clientHeight: height } = chart;
  const svg = document.createElementNS(SVG, "svg");
  svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
  svg.setAttribute("aria-hidden", "true");
  const [highest, hasUsable] = data.ceiling;
  const unit = highest >= 2 * GIB ? GIB : highest >= 2 * MIB ? MIB : highest >= 2 * KIB ? KIB : 1;
  const unitName = { [GIB]: "GiB", [MIB]: "MiB", [KIB]: "KiB", 1: "B" }[unit];
  const tick = tickOf(highest / unit, 6);
  const roof = Math.max(highest * (data.claims.length ? 1.1 : 1.04), tick * unit);
  const ticks = [];
  for (let value = 0; value * unit <= roof; value += tick) ticks.push([value, value ? `${whole(value)} ${unitName}` : "0"]);
  // Letters of 12 pixels are about 7 wide.
  const widest = ticks.reduce((most, [, text]) => Math.max(most, text.length), 0);
  const left = Math.ceil(widest * 7) + 8, right = width - 6, top = 24, bottom = height - 24;
  scale = {
    left, right, top, bottom,
    x: (step) => left + (right - left) * step / Math.max(data.steps, 1),
    y: (value) => bottom - (bottom - top) * clamp(value / roof, 0, 1),
  };
  data.phases.forEach(([name, from], number) => {
    const x = scale.x(from), end = scale.x(data.phases[number + 1]?.[1] ?? data.steps);
    if (end - x < 1) return;
    if (number % 2 === 0) draw(svg, "rect", { class: "band", x, y: 0, width: end - x, height: bottom });
    draw(svg, "path", { class: "band-edge", d: `M${x} 0V${bottom}` });
    label(svg, "", x + 6, 15, name, end - x);
  });
  for (const [value, text] of ticks) {
    const y = Math.round(scale.y(value * unit)) + 0.5;
    draw(svg, "path", { class: value ? "grid" : "axis", d: `M${left} ${y}H${right}` });
    draw(svg, "text", { class: "end", x: left - 6, y: y + 4 }, text);
  }
  const stepTick = tickOf(data.steps, width < 500 ? 3 : 8);
  for (let step = 0; step <= data.steps; step += stepTick) {
    const x = scale.x(step), isLast = x > right - 24;
    draw(svg, "path", { class: "axis", d: `M${x} ${bottom}v4` });
    draw(svg, "text", { class: isLast ? "end" : "middle", x: isLast ? right : x, y: bottom + 18 }, whole(step));
  }
  const [liveOne, usableOne] = series.slice(-2);
  if (liveOne.isShown && live.length) {
    draw(svg, "path", { class: "area", d: `${stairs(live)}V${bottom}H${scale.x(data.points[0])}Z` });
  }
  data.claims.forEach((claim, number) => {
    claim.shelves.forEach(({ from, to, base }, index) => {
      const x = scale.x(from), y = scale.y(base + claim.bytes), high = scale.y(base) - y, wide = scale.x(to) - x;
      const box = draw(svg, "rect", { class: "claim", x, y, width: Math.max(wide, 1), height: Math.max(high, 1) });
      draw(box, "title", {}, `${claim.name}: ${bytes(claim.bytes)}`);
      // A thin one is named above, where there is nothing but the card's end.
      if (index === 0) {
        const isThin = high < 15, text = `${claim.name} ${bytes(claim.bytes)}`;
        const isFree = !isThin || number === data.claims.length - 1;
        if (isFree) label(svg, "claim-label halo", x + 6, isThin ? y - 5 : y + 14, text, right - x);
      }
    });
  });
  if (usableOne.isShown && data.runs.length) {
    const y = hasUsable ? Math.round(scale.y(data.usable)) + 0.5 : top + 2;
    if (hasUsable) draw(svg, "path", { class: "usable", d: `M${left} ${y}H${right}` });
    draw(svg, "text", { class: "usable-label halo", x: left + 6, y: hasUsable ? y + 15 : y + 9 }, `${bytes(data.usable)} usable${hasUsable ? "" : " ↑"}`);
  }
  // The first ones lie on top.
  for (const one of series.filter(({ kind, isShown }) => kind === "line" && isShown).reverse()) {
    draw(svg, "path", { class: `line l${one.look}`, d: stairs(one.values), "data-setup": one.name });
    if (one.run.failure) {
      const [step, asked, mapped] = one.run.failure;
      const mark = draw(svg, "path", { class: "failure", d: `M${scale.x(step)} ${scale.y(mapped)}m-5-5l10 10m0-10l-10 10` });
      draw(mark, "title", {}, `${one.name} fails at step ${whole(step + 1)}: it asks for ${bytes(asked)}`);
    }
  }
  overlay = draw(svg, "g", {});
  chart.replaceChildren(svg);
  drawCursor();
}

function drawCursor() {
  if (!data.steps) return;
  const step = data.points[cursor] ?? 0, x = Math.round(scale.x(step + 0.5)) + 0.5;
  overlay.replaceChildren();
  const moment = scale.x((data.moments[chosen]?.[0] ?? 0) + 0.5);
  draw(overlay, "path", { class: "chosen-line", d: `M${moment} ${scale.top - 2}V${scale.bottom}` });
  draw(overlay, "path", { class: "chosen", d: `M${moment - 6} ${scale.bottom + 7}h12l-6 -8z` });
  draw(overlay, "path", { class: "cursor", d: `M${x} ${scale.top - 2}V${scale.bottom}` });
  for (const one of series) {
    const value = one.kind === "usable" ? data.usable : one.values[cursor];
    put(one.reading, value === undefined ? "failed" : bytes(value));
    if (one.kind === "usable" || value === undefined || !one.isShown) continue;
    draw(overlay, "circle", { class: `dot ${one.kind === "live" ? "live" : `l${one.look}`}`, cx: x, cy: scale.y(value), r: 4 });
  }
  put(at("cursor-at"), `Cursor after ${stepWords(step)}`);
  chart.setAttribute("aria-valuenow", String(step));
  const words = series.filter(({ isShown }) => isShown).map(({ name, reading }) => `${name} ${reading.textContent}`);
  chart.setAttribute("aria-valuetext", `after ${stepWords(step)}: ${words.join(", ")}`);
}

function moveCursor(index) {
  cursor = clamp(index, 0, Math.max(data.points.length - 1, 0));
  drawCursor();
}
function pointAt(event) {
  const along = (event.clientX - chart.getBoundingClientRect().left - scale.left) / (scale.right - scale.left);
  const step = clamp(along, 0, 1) * data.steps - 0.5, before = lastUpTo(data.points, step);
  const isNearer = step - data.points[before] <= data.points[before + 1] - step;
  return before < 0 ? 0 : isNearer || before + 1 >= data.points.length ? before : before + 1;
}
const nearestMoment = (step) => data.moments.reduce((best, [other], index) =>
  Math.abs(other - step) < Math.abs(data.moments[best][0] - step) ? index : best, 0);
function chooseAtCursor() {
  if (data.steps) choose(nearestMoment(data.points[cursor]));
}
chart.setAttribute("aria-valuemax", String(Math.max(data.steps - 1, 0)));
chart.addEventListener("pointermove", (event) => moveCursor(pointAt(event)));
chart.addEventListener("click", (event) => { moveCursor(pointAt(event)); chooseAtCursor(); });
chart.addEventListener("keydown", (event) => {
  const page = Math.max(Math.round(data.points.length / 20), 1);
  const to = {
    ArrowLeft: cursor - 1, ArrowDown: cursor - 1, ArrowRight: cursor + 1, ArrowUp: cursor + 1,
    PageDown: cursor - page, PageUp: cursor + page, Home: 0, End: data.points.length - 1,
  }[event.key];
  if (event.key === "Enter" || event.key === " ") chooseAtCursor();
  else if (to === undefined) return;
  else moveCursor(to);
  event.preventDefault();
});

// ---- One moment

const setups = at("setup"), named = at("named"), slider = at("moment");
setups.append(...data.runs.map((run, index) => new Option(run.name, String(index))));
named.append(new Option("–", ""));
data.moments.forEach(([, names], index) => names.forEach((name) => named.append(new Option(name, String(index)))));
slider.max = String(Math.max(data.moments.length - 1, 0));
for (const control of [setups, named, slider]) control.disabled = !data.moments.length || !data.runs.length && control === setups;

setups.onchange = () => { reserve(); showMap(); };
named.onchange = () => { if (named.value) choose(Number(named.value)); };
slider.oninput = () => choose(Number(slider.value));

let frame = 0;
function choose(index) {
  chosen = clamp(index, 0, Math.max(data.moments.length - 1, 0));
  const [step, names] = data.moments[chosen] ?? [0, []];
  slider.value = String(chosen);
  slider.setAttribute("aria-valuetext", `after ${stepWords(step)}${names.length ? `: ${names.join(", ")}` : ""}`);
  const stays = named.value && Number(named.value) === chosen;
  if (!stays) named.selectedIndex = Math.max([...named.options].findIndex((option) => option.value === String(chosen)), 0);
  put(at("moment-at"), data.steps ? `After ${stepWords(step)}` : "There are no steps.");
  drawCursor();
  frame ||= requestAnimationFrame(() => { frame = 0; showMap(); showHolders(); });
}

// ---- Addresses

const canvas = at("map"), ROW_GAP = 3, HEIGHT = 420;
// Few rows are higher.
let rowHeight = 12;
const SEGMENT_GAP = 0.004, UNMAPPED_MAX = 0.2;
let map = null;
let part = -1;

function decoded(numbers) {
  const pieces = [], sums = { live: 0, cached: 0, unmapped: 0, segments: 0 };
  for (let next = 0; next < numbers.length;) {
    const [addr, pool, segments, count] = numbers.slice(next, next += 4);
    const cells = [];
    let offset = 0;
    for (let index = 0; index < count; index += 1) {
      const kind = numbers[next], size = numbers[next + 1] * data.unit;
      const cell = { addr: addr + offset, owner: -1, live: 0, cached: 0, unmapped: 0, parts: 1 };
      if (kind < 0) {
        cell.owner = -1 - kind;
        cell.live = size;
        cell.cached = numbers[next + 2] * data.unit;
        cell.unmapped = numbers[next + 3] * data.unit;
        cell.parts = numbers[next + 4];
        next += 5;
      } else {
        if (kind === 0) cell.cached = size;
        else if (kind === 1) cell.unmapped = size;
        else [cell.owner, cell.live] = [kind - 2, size];
        next += 2;
      }
      cell.bytes = cell.live + cell.cached + cell.unmapped;
      offset += cell.bytes;
      sums.live += cell.live;
      sums.cached += cell.cached;
      sums.unmapped += cell.unmapped;
      cells.push(cell);
    }
    sums.segments += segments;
    pieces.push({ addr, pool, segments, cells, bytes: offset });
  }
  return { pieces, sums };
}

// Segments follow each other like words, and break at the end of a row.
function placed(pieces) {
  const rects = [], cells = [];
  let row = 0, x = 0;
  for (const piece of pieces) {
    if (x > 1 - SEGMENT_GAP * 2) { row += 1; x = 0; }
    for (const cell of piece.cells) {
      const number = cells.push({ cell, piece }) - 1;
      const isEmpty = cell.unmapped === cell.bytes;
      let left = isEmpty ? Math.min(cell.bytes / data.row, UNMAPPED_MAX) : cell.bytes / data.row;
      while (left > 1e-9) {
        if (x >= 1 - 1e-9) { row += 1; x = 0; }
        const wide = Math.min(left, 1 - x);
        rects.push({ row, from: x, to: x + wide, number, isEnd: left - wide <= 1e-9 });
        x += wide;
        left -= wide;
      }
    }
    x += SEGMENT_GAP;
  }
  return { rects, cells, rows: pieces.length ? row + 1 : 0 };
}

// As many rows as the moments of this setup need, so that nothing moves when another one is chosen.
const reserved = new Map();
function reserve() {
  const maps = data.maps[Number(setups.value)] ?? [];
  if (!reserved.has(maps)) reserved.set(maps, maps.reduce((most, numbers) => Math.max(most, placed(decoded(numbers).pieces).rows), 4));
  rowHeight = clamp(Math.floor(HEIGHT / reserved.get(maps)) - ROW_GAP, 10, 22);
  canvas.style.height = `${reserved.get(maps) * (rowHeight + ROW_GAP)}px`;
}

const colours = new Map();
function colour(name) {
  if (!colours.has(name)) {
    const probe = el("span");
    probe.style.color = `var(--${name})`;
    document.body.append(probe);
    colours.set(name, getComputedStyle(probe).color);
    probe.remove();
  }
  return colours.get(name);
}
function hatch(pen, dpr) {
  const size = 5 * dpr, tile = el("canvas");
  tile.width = tile.height = size;
  const on = tile.getContext("2d");
  on.fillStyle = colour("cached-back");
  on.fillRect(0, 0, size, size);
  on.strokeStyle = colour("cached");
  on.lineWidth = 1.2 * dpr;
  on.beginPath();
  for (const shift of [-size, 0, size]) {
    on.moveTo(shift - 1, size + 1);
    on.lineTo(shift + size + 1, -1);
  }
  on.stroke();
  return pen.createPattern(tile, "repeat");
}

function showMap() {
  const index = Number(setups.value || 0), run = data.runs[index], numbers = data.maps[index]?.[chosen];
  map = null;
  part = -1;
  put(at("map-reading"), "");
  if (!numbers) {
    const why = run?.failure ? `${run.name} failed before, at step ${whole(run.failure[0] + 1)}.` : "There is nothing to show.";
    put(at("map-summary"), why);
    put(at("map-scale"), "");
    at("map-bar").replaceChildren();
    canvas.setAttribute("aria-valuetext", why);
  } else {
    const { pieces, sums } = decoded(numbers);
    map = placed(pieces);
    const mapped = sums.live + sums.cached;
    const words = [`${bytes(mapped)} mapped`, `${bytes(sums.live)} live`, `${bytes(sums.cached)} cached (${percent(sums.cached, mapped)})`];
    words.push(`in ${many(sums.segments, "segment")}`);
    if (sums.unmapped) words.push(`${bytes(sums.unmapped)} of addresses unmapped`);
    put(at("map-summary"), words.join(" · "));
    put(at("map-scale"), `A full row is ${bytes(data.row)}. The bar above is the card: ${bytes(run.usable)} usable.`);
    const bars = [["s-live", sums.live], ["s-cached", sums.cached]].map(([name, size]) => {
      const bar = el("span", name);
      bar.style.width = `${100 * size / Math.max(run.usable, 1)}%`;
      return bar;
    });
    at("map-bar").replaceChildren(...bars);
    canvas.setAttribute("aria-valuetext", words.join(", "));
    canvas.setAttribute("aria-valuemax", String(Math.max(map.cells.length - 1, 0)));
    canvas.setAttribute("aria-valuenow", "0");
    canvas.dataset.parts = String(map.cells.length);
  }
  drawMap();
}

function drawMap() {
  const dpr = Math.min(devicePixelRatio || 1, 2), width = canvas.clientWidth, height = canvas.clientHeight;
  canvas.width = Math.round(width * dpr);
  canvas.height = Math.round(height * dpr);
  const pen = canvas.getContext("2d");
  pen.scale(dpr, dpr);
  if (!map) return;
  const cached = hatch(pen, dpr), card = colour("card"), edge = colour("muted");
  cached.setTransform(new DOMMatrix([1 / dpr, 0, 0, 1 / dpr, 0, 0]));
  for (const { row, from, to, number, isEnd } of map.rects) {
    const { cell } = map.cells[number], y = row * (rowHeight + ROW_GAP);
    // Whole pixels, so that neighbours touch.
    const x = Math.round(from * width * dpr) / dpr, end = Math.max(Math.round(to * width * dpr) / dpr, x + 1 / dpr);
    const wide = end - x;
    const separator = isEnd && wide >= 4 ? 1 : 0;
    let top = y;
    for (const [size, fill] of [[cell.cached, cached], [cell.unmapped, null], [cell.live, colour(`o${Math.max(cell.owner, 0)}`)]]) {
      if (!size) continue;
      const high = rowHeight * size / cell.bytes;
      if (fill) {
        pen.fillStyle = fill;
        pen.fillRect(x, top, wide, high);
      } else if (wide >= 2 && high >= 2) {
        pen.strokeStyle = edge;
        pen.setLineDash([2, 2]);
        pen.strokeRect(x + 0.5, top + 0.5, wide - 1, high - 1);
        pen.setLineDash([]);
      }
      top += high;
    }
    if (separator) {
      pen.fillStyle = card;
      pen.fillRect(end - separator, y, separator, rowHeight);
    }
  }
  if (part >= 0) {
    pen.strokeStyle = colour("text");
    pen.lineWidth = 2;
    for (const { row, from, to } of map.rects.filter(({ number }) => number === part)) {
      pen.strokeRect(from * width, row * (rowHeight + ROW_GAP) - 1, Math.max((to - from) * width, 2), rowHeight + 2);
    }
  }
}

function showPart(number) {
  if (!map || number === part) return;
  part = number;
  const found = map.cells[number];
  let text = "";
  if (found) {
    const { cell, piece } = found, what = [];
    if (cell.live) what.push(`${bytes(cell.live)} live (${cell.parts > 1 ? "most of " : ""}${cell.owner < data.owners.length ? brief(data.owners[cell.owner]) : "others"})`);
    if (cell.cached) what.push(`${bytes(cell.cached)} cached`);
    if (cell.unmapped) what.push(`${bytes(cell.unmapped)} unmapped`);
    const segment = piece.segments > 1 ? `one of ${whole(piece.segments)} small segments` : `segment of ${bytes(piece.bytes)}`;
    text = `${hex(cell.addr)}: ${what.join(", ")}${cell.parts > 1 ? `, ${whole(cell.parts)} parts` : ""} · ${segment}${piece.pool ? `, pool ${piece.pool}` : ""}`;
    canvas.setAttribute("aria-valuenow", String(number));
    canvas.setAttribute("aria-valuetext", text);
  }
  put(at("map-reading"), text);
  drawMap();
}
canvas.addEventListener("pointermove", (event) => {
  if (!map) return;
  const box = canvas.getBoundingClientRect(), x = (event.clientX - box.left) / box.width;
  const row = Math.floor((event.clientY - box.top) / (rowHeight + ROW_GAP));
  const hit = map.rects.find((one) => one.row === row && one.from <= x && x <= one.to);
  showPart(hit ? hit.number : -1);
});
canvas.addEventListener("pointerleave", () => { if (document.activeElement !== canvas) showPart(-1); });
canvas.addEventListener("blur", () => showPart(-1));
canvas.addEventListener("keydown", (event) => {
  if (!map) return;
  const last = map.cells.length - 1;
  // The next row's part under the middle of this one.
  const beside = (rows) => {
    const own = map.rects.find(({ number }) => number === part) ?? map.rects[0], x = (own.from + own.to) / 2;
    const there = map.rects.filter(({ row }) => row === own.row + rows);
    return (there.find(({ from, to }) => from <= x && x <= to) ?? there.at(-1) ?? own).number;
  };
  const to = { ArrowLeft: () => part - 1, ArrowRight: () => part + 1, ArrowUp: () => beside(-1), ArrowDown: () => beside(1), Home: () => 0, End: () => last }[event.key];
  if (!to || !map.rects.length) return;
  event.preventDefault();
  showPart(clamp(to(), 0, last));
});
const legend = data.owners.map((name, owner) => [`o${owner}`, name]);
if (data.holders.some(({ rows }) => rows.some((value, index) => index % 4 === 3 && value === OTHERS))) legend.push([`o${OTHERS}`, "others"]);
legend.push(["s-cached", "cached"], ["s-unmapped", "unmapped addresses"]);
for (const [tone, name] of legend) {
  const item = el("li");
  item.append(el("span", `swatch ${tone}`), el("span", "", brief(name)));
  item.title = name;
  at("map-legend").append(item);
}

// ---- Who held what

const search = at("search");
// Stacks that are unfolded, and stay so.
const unfolded = new Set();
const lower = data.frames.map((text) => text.toLowerCase());
const stackOf = (number) => data.stacks[number].slice(1);

function marked(node, text, wanted) {
  const low = text.toLowerCase();
  let from = 0;
  // Folding some letters changes how many they are; then nothing is marked.
  for (let hit; wanted && low.length === text.length && (hit = low.indexOf(wanted, from)) >= 0; from = hit + wanted.length) {
    node.append(text.slice(from, hit), el("mark", "", text.slice(hit, hit + wanted.length)));
  }
  node.append(text.slice(from));
  return node;
}

function stackRow(number, wanted) {
  const row = el("tr", "stack"), inside = el("td"), list = el("ol"), [own, ...frames] = data.stacks[number];
  inside.colSpan = 4;
  frames.forEach((text, index) => list.append(marked(el("li", index === own ? "own" : ""), data.frames[text], wanted)));
  if (!frames.length) list.append(el("li", "", "The recorder knew no frames."));
  inside.append(list);
  row.append(inside);
  return row;
}

function showHolders() {
  const holders = data.holders[chosen], wanted = search.value.trim().toLowerCase(), rows = [];
  if (!holders) {
    put(at("held-summary"), "There is nothing to show.");
    at("holders").replaceChildren();
    return;
  }
  let all = holders.rest[1], found = 0, count = 0;
  for (let next = 0; next < holders.rows.length; next += 4) all += holders.rows[next + 1];
  for (let next = 0; next < holders.rows.length; next += 4) {
    const [number, size, blocks, owner] = holders.rows.slice(next, next + 4), frames = stackOf(number);
    if (wanted && !frames.some((text) => lower[text].includes(wanted))) continue;
    found += size;
    count += 1;
    const row = el("tr"), first = el("td"), button = el("button", "who");
    button.type = "button";
    const [name, path] = parted(frames.length ? data.frames[frames[data.stacks[number][0]]] : "unknown"), words = el("span");
    words.append(marked(el("span", "name"), name, wanted), marked(el("small"), path.replace(/^.*\/(site|dist)-packages\//, ""), wanted));
    button.append(el("span", `swatch o${owner}`), words);
    button.setAttribute("aria-expanded", String(unfolded.has(number)));
    button.onclick = () => {
      const isOpen = !unfolded.has(number);
      if (isOpen) unfolded.add(number); else unfolded.delete(number);
      button.setAttribute("aria-expanded", String(isOpen));
      if (isOpen) row.after(stackRow(number, wanted)); else row.nextSibling.remove();
    };
    first.append(button);
    row.append(first, el("td", "number", bytes(size)), el("td", "number", percent(size, all)), el("td", "number", whole(blocks)));
    rows.push(row);
    if (unfolded.has(number)) rows.push(stackRow(number, wanted));
  }
  const [stacks, size, blocks] = holders.rest;
  if (stacks && !wanted) {
    const row = el("tr", "rest");
    row.append(el("td", "", `${many(stacks, "smaller stack")} together`), el("td", "number", bytes(size)), el("td", "number", percent(size, all)), el("td", "number", whole(blocks)));
    rows.push(row);
  }
  const known = holders.rows.length / 4;
  const shown = wanted ? `${whole(count)} of ${many(known, "stack")} · ${bytes(found)} of ${bytes(all)} live` : `${many(known + stacks, "stack")} · ${bytes(all)} live`;
  put(at("held-summary"), shown);
  at("holders").replaceChildren(...rows);
}
search.oninput = showHolders;

// ---- Start

reserve();
drawChart();
choose(chosen);
showMap();
showHolders();
document.documentElement.classList.add("ready");
if (history.state === "chooser") {
  history.replaceState(null, "");
  chooser.focus();
}
let seenWidth = chart.clientWidth;
new ResizeObserver(() => {
  if (chart.clientWidth === seenWidth) return;
  seenWidth = chart.clientWidth;
  drawChart();
  drawMap();
}).observe(chart);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { colours.clear(); drawMap(); });


"use strict";
// Each group of events has its own room, so that many stages do not displace a failure.
const EVENTS_MAX = { failure: 300, swap: 100, stage: 200, other: 100 };
const GROUPS = { stage: "stage", ready: "swap", failed: "failure", shortfall: "failure", quarantined: "failure",
  look_failed: "failure" };
// All that the service keeps, for the timeline.
const PAST = 1024;
const HISTORY_MAX = 4000;
const TONES = 8;
// Also the order of their colours.
const PHASES = ["finding memory", "waking", "confirming", "canary", "measuring", "starting", "probing",
  "resuming"];
const ABSENT = ["asleep", "hibernating", "cold", "unknown"];
// Where its turn was cut.
const KEPT = "asleep with requests";
const LEAVING = ["measuring before sleep", "falling asleep", "releasing memory",
  "going into hibernation", "stopping"];
const SILENCE_MAX_MS = 40000;
// Events do not report waiting requests.
const POLL_MS = 2000;
const WAIT_MAX_MS = 30000;
const LOG_RETRY_MS = 1000;
const LOG_LINES = 2000;
// The oldest requests in progress.
const REQUESTS_MAX = 50;
const STATES = { waiting: "busy", streaming: "good" };

let snapshot = null;
let requests = { count: 0, requests: [] };
let snapshotAt = 0;
let lastId = null;
let wait = 1000;
let retryNow = null;
let isLive = false;
let logStop = null;
let logText = "";
let logFrame = null;
let clockAhead = 0;
const histories = new Map();

// ---- Text and numbers

function stageClass(stage) {
  if (stage === "ready") return "good";
  if (stage === "quarantined") return "bad";
  if (stage === "hibernating") return "deep";
  return ABSENT.includes(stage) ? "" : "busy";
}
function describe(event) {
  switch (event.event) {
    case "stage": return `${event.before} for ${seconds(event.before_s)}, now ${event.stage}`;
    case "ready": return `ready in ${seconds(event.swap.whole_s)} (${event.swap.path})`;
    case "failed": return `failed while ${event.stage}: ${event.reason}`;
    case "shortfall":
      return `released ${bytes(event.freed_bytes)} of ${bytes(event.expected_bytes)} on GPU ${event.gpu}`;
    case "hibernated": return `hibernates: ${held(event.residue_bytes)} left its GPUs`;
    case "kept": return `sleeps with ${event.requests} requests, which go on in its next turn`;
    case "tested": return "its canary beside requests was right";
    case "learnt": return `measured to hold ${held(event.held_bytes)}`;
    case "quarantined": return `quarantined for ${seconds(event.for_s)} after ${event.failures} consecutive failures`;
    case "look_failed": return `look ${event.failed} in sequence failed: ${event.reason}`;
    default: return String(event.event);
  }
}
function held(list) {
  return list.map(bytes).join(" + ");
}

// ---- Requests

function keyNeeded() {
  isLive = false;
  at("reload").hidden = true;
  at("sleep-all").hidden = true;
}
function keyGiven() {
  retryNow?.();
}

let isRefreshing = false;
let refreshAgain = false;
async function refresh() {
  if (isRefreshing) {
    refreshAgain = true;
    return;
  }
  isRefreshing = true;
  try {
    do {
      refreshAgain = false;
      const signal = AbortSignal.timeout(15000);
      const [response, active] = await Promise.all([
        send("rotate/status", { signal }), send(`rotate/requests?max=${REQUESTS_MAX}`, { signal }),
      ]);
      const [now, listed] = [await response.json(), await active.json()];
      const theirs = Date.parse(response.headers.get("date")) - Date.now();
      // Clocks that nearly agree are taken as one: the header has whole seconds.
      clockAhead = Math.abs(theirs) > 3000 ? theirs : 0;
      // A service that is ending reports no models.
      if (now.models.length === 0) return;
      [snapshot, requests] = [now, listed];
      snapshotAt = performance.now();
      show();
    } while (refreshAgain);
  } catch (error) {
    if (error instanceof NoKey) needKey(error);
    else console.warn(error);
  } finally {
    isRefreshing = false;
  }
}
let refreshTimer = null;
function refreshSoon() {
  refreshTimer ??= setTimeout(() => {
    refreshTimer = null;
    refresh();
  }, 150);
}

// ---- Events, over fetch: an EventSource cannot send the key

async function follow() {
  const stop = new AbortController();
  let watchdog = null;
  const isAlive = () => {
    clearTimeout(watchdog);
    watchdog = setTimeout(() => stop.abort(), SILENCE_MAX_MS);
  };
  try {
    isAlive();
    const headers = lastId === null ? {} : { "Last-Event-ID": lastId };
    const response = await send(`rotate/events?past=${PAST}`, { headers, signal: stop.signal });
    const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
    link("Live", "good");
    isLive = true;
    showNotice("");
    wait = 1000;
    refresh();
    let pending = "";
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      isAlive();
      const blocks = (pending + value).split("\n\n");
      pending = blocks.pop();
      const events = blocks.map(parsed).filter(Boolean);
      if (events.length) {
        addEvents(events);
        refreshSoon();
      }
    }
  } finally {
    clearTimeout(watchdog);
    stop.abort();
  }
}
function parsed(block) {
  const event = { kind: "message", id: null, data: "" };
  for (const line of block.split("\n")) {
    if (line.startsWith("id: ")) event.id = line.slice(4);
    else if (line.startsWith("event: ")) event.kind = line.slice(7);
    else if (line.startsWith("data: ")) event.data += line.slice(6);
  }
  if (!event.data) return null;
  try {
    return { ...event, data: JSON.parse(event.data) };
  } catch {
    return null;
  }
}
async function followForEver() {
  for (;;) {
    let reason = "the service closed it";
    try {
      await follow();
    } catch (error) {
      if (error instanceof NoKey) {
        if (error.used !== key) continue;
        needKey(error);
        await new Promise((resolve) => { retryNow = resolve; });
        continue;
      }
      reason = error.name === "AbortError" ? "no data for a while" : error.message;
    }
    const pause = wait * (0.75 + Math.random() / 2);
    wait = Math.min(wait * 2, WAIT_MAX_MS);
    link("Disconnected", "bad");
    isLive = false;
    showNotice(`Disconnected: ${reason}. The data below may be old. The page reconnects by itself.`);
    await new Promise((resolve) => {
      retryNow = resolve;
      setTimeout(resolve, pause);
    });
  }
}
function addEvents(events) {
  const list = at("events");
  for (const { kind, id, data } of events) {
    if (id !== null) lastId = id;
    remember(kind, data);
    const row = el("li");
    const line = el("div", "line");
    if (kind === "lagged") {
      line.append(el("span", "muted", `${data.lost} events were lost`));
    } else {
      line.append(clock(data.at_unix_ms), el("strong", "", data.model));
      line.append(el("span", GROUPS[kind] === "failure" ? "failure" : "", describe(data)));
    }
    row.dataset.group = GROUPS[kind] ?? "other";
    row.dataset.model = data.model ?? "";
    row.append(line);
    list.prepend(row);
  }
  for (const [group, most] of Object.entries(EVENTS_MAX)) {
    [...list.children].filter((row) => row.dataset.group === group).slice(most).forEach((row) => row.remove());
  }
  filterEvents();
  const latest = events.filter((event) => ["ready", "failed", "quarantined"].includes(event.kind)).pop();
  if (latest && Date.now() - latest.data.at_unix_ms < 10000) announce(`${latest.data.model}: ${describe(latest.data)}`);
}

function filterEvents() {
  const [group, model] = [at("event-kind").value, at("event-model").value];
  let shown = 0;
  for (const row of at("events").children) {
    const isOfGroup = group ? row.dataset.group === group : row.dataset.group !== "stage";
    row.hidden = !(isOfGroup && (!model || row.dataset.model === model));
    if (!row.hidden) shown += 1;
  }
  at("no-events").hidden = shown > 0;
}
function showModelsOfEvents() {
  const select = at("event-model");
  const names = ["", ...snapshot.models.map(({ name }) => name)];
  rows(select, names, (name) => name, (name) => {
    const option = el("option", "", name || "all models");
    option.value = name;
    return option;
  }, () => {});
  filterEvents();
}

// ---- Timeline

// Stages and failures of a model, oldest first.
function historyOf(model) {
  if (!histories.has(model)) histories.set(model, { stages: [], failures: [], tests: [], keeps: false });
  return histories.get(model);
}
function remember(kind, event) {
  if (kind === "stage") {
    const history = historyOf(event.model);
    const { stages } = history;
    const from = event.at_unix_ms - event.before_s * 1000;
    const last = stages.at(-1);
    // Sent twice.
    if (last && event.at_unix_ms < last.from) return;
    const before = last?.stage === KEPT ? "asleep" : last?.stage;
    if (before === event.before) last.to = event.at_unix_ms;
    else {
      if (last) last.to = Math.min(last.to ?? from, from);
      stages.push({ stage: event.before, from, to: event.at_unix_ms });
    }
    if (event.stage === "ready") history.keeps = false;
    const stage = event.stage === "asleep" && history.keeps ? KEPT : event.stage;
    stages.push({ stage, from: event.at_unix_ms, to: null });
    if (stages.length > HISTORY_MAX) stages.splice(0, stages.length - HISTORY_MAX);
  } else if (kind === "kept") {
    historyOf(event.model).keeps = true;
  } else if (kind === "tested") {
    const { tests } = historyOf(event.model);
    if (tests.at(-1)?.at >= event.at_unix_ms) return;
    tests.push({ seq: event.seq, at: event.at_unix_ms, text: describe(event) });
    if (tests.length > HISTORY_MAX) tests.shift();
  } else if (["failed", "shortfall", "quarantined", "look_failed"].includes(kind)) {
    const { failures } = historyOf(event.model);
    if (failures.at(-1)?.seq >= event.seq && failures.at(-1).at === event.at_unix_ms) return;
    failures.push({ seq: event.seq, at: event.at_unix_ms, text: describe(event) });
    if (failures.length > HISTORY_MAX) failures.shift();
  }
}
function kindOf(stage) {
  if (["ready", "draining", "quarantined", "hibernating"].includes(stage)) return stage;
  if (stage === KEPT) return "kept";
  if (ABSENT.includes(stage) || stage === "probing") return null;
  return LEAVING.includes(stage) ? "out" : "in";
}
// What a model's strip shows between two times: stages of one kind in a row are one part.
function partsOf(model, begin, end) {
  const { stages, failures, tests } = historyOf(model.name);
  const all = stages.length ? stages : [{ stage: model.stage, from: end - model.stage_s * 1000, to: null }];
  const known = all[0].from;
  const parts = [];
  const add = (kind, from, to, title) => {
    if (kind === null || to < begin || from > end) return;
    const last = parts.at(-1);
    if (last?.kind === kind && from - last.to < 1) last.to = to;
    else parts.push({ kind, from, to, title });
  };
  // Older than the events, there are the swaps.
  for (const swap of snapshot.swaps.toReversed()) {
    if (swap.model !== model.name || swap.at_unix_ms >= known) continue;
    add("in", swap.at_unix_ms - swap.total_s * 1000, swap.at_unix_ms, "in");
  }
  for (const { stage, from, to } of all) add(kindOf(stage), from, to ?? end, stage);
  const within = (list) => list.filter(({ at }) => at >= begin && at <= end);
  const [marks, checks] = [within(failures), within(tests)];
  // Nothing is known of the time before, which is not the same as asleep.
  if (known > begin && (parts.some(({ kind }) => kind !== "hibernating") || marks.length)) {
    parts.unshift({ kind: "before", from: begin, to: Math.min(known, end), title: "not known" });
  }
  return { parts, marks, checks };
}
const NAMES_OF_KINDS = { in: "swapped in", out: "swapped out", kept: KEPT };
function showTimeline() {
  const end = Date.now() + clockAhead;
  const length = Number(at("window").value) * 1000;
  const begin = end - length;
  const strips = [];
  for (const { gpu } of snapshot.gpus) {
    snapshot.models.forEach((model, index) => {
      if (!model.gpus.includes(gpu)) return;
      const { parts, marks, checks } = partsOf(model, begin, end);
      const isShown = parts.some(({ kind }) => kind !== "hibernating") || marks.length > 0;
      if (isShown) strips.push({ gpu, model, index, parts, marks, checks });
    });
  }
  const gpus = snapshot.gpus.filter(({ gpu }) => strips.some((strip) => strip.gpu === gpu));
  at("no-timeline").hidden = gpus.length > 0;
  const place = (node, from, to) => {
    node.style.left = `${(100 * (Math.max(from, begin) - begin)) / length}%`;
    if (to !== null) node.style.width = `${(100 * (Math.min(to, end) - Math.max(from, begin))) / length}%`;
  };
  const makeGroup = ({ gpu }) => {
    const group = el("li");
    const list = el("ul", "strips");
    list.setAttribute("aria-label", `GPU ${gpu}`);
    group.append(el("h3", "", `GPU ${gpu}`), list);
    return group;
  };
  rows(at("timeline"), gpus, ({ gpu }) => gpu, makeGroup, (group, { gpu }) => {
    const own = strips.filter((strip) => strip.gpu === gpu);
    rows(group.lastChild, own, ({ model }) => model.name, ({ model }) => {
      const strip = el("li", "strip");
      const name = el("span", "", model.name);
      name.title = model.name;
      const track = el("div", "track");
      track.setAttribute("role", "img");
      strip.append(name, track);
      return strip;
    }, (strip, { model, index, parts, marks, checks }) => {
      const track = strip.lastChild;
      setTone(track, index);
      const items = [
        ...parts.map((part) => ({ ...part, name: `${part.kind} ${part.kind === "before" || part.from}` })),
        ...checks.map((check) => ({ kind: "check", from: check.at, to: null, title: check.text, name: `check ${check.seq}` })),
        ...marks.map((mark) => ({ kind: "mark", from: mark.at, to: null, title: mark.text, name: `mark ${mark.seq}` })),
      ];
      rows(track, items, ({ name: id }) => id, ({ kind }) => el("span", kind), (node, item) => {
        place(node, item.from, item.to);
        const what = NAMES_OF_KINDS[item.kind] ?? item.title;
        const title = item.to === null ? `${model.name} ${what}`
          : `${model.name}: ${what} for ${seconds((item.to - item.from) / 1000)}, from ${time(item.from)}`;
        if (node.title !== title) node.title = title;
      });
      const ready = parts.filter(({ kind }) => kind === "ready" || kind === "draining")
        .reduce((sum, { from, to }) => sum + Math.min(to, end) - Math.max(from, begin), 0);
      const count = (kind) => parts.filter((part) => part.kind === kind).length;
      const words = `${model.name}: awake for ${span(ready / 1000)} of ${span(length / 1000)}, `
        + `swapped in ${count("in")} times, cut ${count("kept")} times, ${marks.length} failures`;
      track.setAttribute("aria-label", words);
    });
  });
  const ticks = at("axis").lastElementChild;
  if (ticks.dataset.length === String(length)) return;
  ticks.dataset.length = String(length);
  ticks.replaceChildren(...[1, .5, 0].map((part) => {
    return el("span", "", part === 0 ? "now" : `−${span((part * length) / 1000).replace(/ 0 s$| 0 min$/, "")}`);
  }));
}
// A model's colour, by its place in the configuration. Neighbours differ; its name is always there as well.
function setTone(node, index) {
  node.style.setProperty("--tone", `var(--m${Math.max(0, index) % TONES})`);
}

// ---- Rendering

function show() {
  // The service answers again, so events can be followed again.
  if (!isLive) retryNow?.();
  showAll(at("h-gpus"));
  at("reload").hidden = false;
  at("sleep-all").hidden = false;
  rows(at("gpus"), snapshot.gpus, (gpu) => gpu.gpu, makeGpu, fillGpu);
  const models = snapshot.models.toSorted((one, other) => rank(one) - rank(other));
  rows(at("models"), models, (model) => model.name, makeModel, fillModel);
  showRequests();
  showQueue();
  showModelsOfEvents();
  showSwaps();
  tick();
}
// Those that need an operator come first, others in the order of the configuration.
function rank({ stage, failures }) {
  if (stage === "quarantined") return 0;
  return failures > 0 ? 1 : 2;
}
function makeGpu(gpu) {
  const row = el("li", "card");
  const title = el("div", "title");
  const total = el("span", "muted");
  title.append(el("h3", "", `GPU ${gpu.gpu}`), total);
  const bar = el("div", "bar");
  bar.setAttribute("role", "meter");
  bar.setAttribute("aria-label", `Memory in use on GPU ${gpu.gpu}`);
  const [used, owned, promised] = [el("span", "used"), el("div"), el("span", "promised")];
  bar.append(used, owned, promised);
  const legend = el("ul", "parts");
  legend.setAttribute("aria-label", `Memory of GPU ${gpu.gpu} by model`);
  const [list, nodes] = facts([
    ["used", "Used"], ["promised", "Promised", "promised"], ["free", "Free", "free"], ["lent", "Lent"],
    ["swapping", "Swapping"],
  ]);
  const advice = el("p", "advice");
  row.append(title, bar, legend, list, advice);
  row.parts = { total, bar, used, owned, promised, legend, nodes, advice };
  return row;
}
// What sleeping engines still hold on a GPU.
function residueOn({ gpu }) {
  const asleep = snapshot.models.filter(({ stage, gpus }) => stage === "asleep" && gpus.includes(gpu));
  return asleep.reduce((sum, { gpus, residue_bytes: residue }) => sum + (residue?.[gpus.indexOf(gpu)] ?? 0), 0);
}
// The awake models of a GPU and their bytes: measured, or else configured.
function ownersOf(gpu) {
  if (gpu.models) return gpu.models;
  return snapshot.models.filter((model) => {
    return model.gpus.includes(gpu.gpu) && model.stage !== "quarantined" && !ABSENT.includes(model.stage);
  }).map((model) => {
    const measured = model.held_bytes?.[model.gpus.indexOf(gpu.gpu)];
    return { model: model.name, bytes: measured ?? model.need_bytes ?? 0 };
  });
}
function showOwners({ owned, legend }, gpu, inUse) {
  let left = 0;
  const owners = ownersOf(gpu).map(({ model, bytes: count }) => {
    const index = snapshot.models.findIndex(({ name }) => name === model);
    // A model that is being woken has not taken all of it yet.
    const owner = { key: `model ${model}`, model, count, index, left, shown: Math.max(0, Math.min(count, inUse - left)) };
    left += owner.shown;
    return owner;
  });
  const residue = Math.min(residueOn(gpu), Math.max(0, inUse - left));
  if (residue > 0) {
    owners.push({ key: "asleep", model: "asleep", count: residue, index: null, left, shown: residue });
    left += residue;
  }
  const share = (count) => `${(100 * count) / gpu.total_bytes}%`;
  rows(owned, owners, (owner) => owner.key, () => el("span", "part"), (part, owner) => {
    part.classList.toggle("residue", owner.index === null);
    if (owner.index !== null) setTone(part, owner.index);
    part.style.left = share(owner.left);
    part.style.width = share(owner.shown);
    part.title = `${owner.model}: ${bytes(owner.count)}`;
  });
  const named = [...owners, { key: "other", model: "other", count: Math.max(0, inUse - left), index: null }];
  rows(legend, named, ({ key }) => key, ({ key, model }) => {
    const item = el("li");
    const swatch = el("span", `swatch ${key === "asleep" ? "residue" : "used"}`);
    item.append(swatch, el("span", "", model), " ", el("span", "muted"));
    return item;
  }, (item, { count, index }) => {
    if (index !== null) {
      setTone(item.firstChild, index);
      item.firstChild.style.background = "var(--tone)";
    }
    put(item.lastChild, bytes(count));
  });
}
function fillGpu(row, gpu) {
  const { total, bar, used, promised, nodes } = row.parts;
  const isKnown = gpu.total_bytes !== null && gpu.total_bytes > 0 && gpu.free_bytes !== null;
  // What sleeping engines lend is theirs no more than free memory is.
  const lent = gpu.reclaimable_bytes ?? null;
  const inUse = isKnown ? Math.max(0, gpu.total_bytes - gpu.free_bytes - (lent ?? 0)) : null;
  const share = (count) => (isKnown ? `${Math.min(100, (count / gpu.total_bytes) * 100)}%` : "0%");
  const declared = gpu.is_measured === false ? " declared, nothing is measured" : "";
  put(total, gpu.total_bytes === null ? "not measured yet" : bytes(gpu.total_bytes) + declared);
  used.style.width = share(inUse);
  row.parts.legend.hidden = !isKnown;
  if (isKnown) showOwners(row.parts, gpu, inUse);
  promised.style.width = share(gpu.promised_bytes);
  put(nodes.used, bytes(inUse));
  put(nodes.promised, bytes(gpu.promised_bytes));
  put(nodes.free, bytes(gpu.free_bytes));
  put(nodes.lent, bytes(lent));
  const { recent_share: recent, recent_window_s: length, share: whole } = gpu.swapping;
  const percent = (part) => `${Math.round(100 * part)} %`;
  put(nodes.swapping, `${percent(recent)} of ${span(length).replace(/ 0 s$/, "")}, ${percent(whole)} since the start`);
  put(row.parts.advice, gpu.advice === null ? "" : `Advice: ${gpu.advice}.`);
  row.parts.advice.hidden = gpu.advice === null;
  bar.setAttribute("aria-valuemin", "0");
  bar.setAttribute("aria-valuemax", isKnown ? String(gpu.total_bytes) : "1");
  bar.setAttribute("aria-valuenow", isKnown ? String(inUse) : "0");
  bar.setAttribute("aria-valuetext", isKnown ? `${bytes(inUse)} of ${bytes(gpu.total_bytes)}` : "not measured yet");
}
function makeModel(model) {
  const row = el("li", "card model");
  const [about, title] = [el("div", "about"), el("div", "title")];
  const [stage, since, pinned, aliases] = [el("span"), el("span", "muted"), el("span", "chip", "pinned"),
    el("span", "muted rare")];
  const more = el("button", "more", "Details");
  more.type = "button";
  more.setAttribute("aria-label", `Details of ${model.name}`);
  more.setAttribute("aria-expanded", "false");
  more.addEventListener("click", () => {
    more.setAttribute("aria-expanded", String(row.classList.toggle("open")));
  });
  title.append(el("h3", "", model.name), stage, since, pinned, aliases, more);
  const [list, nodes] = facts([
    ["queued", "Queue"], ["running", "Running"], ["need", "Need"], ["held", "Held"], ["residue", "Asleep"],
    ["host", "In host memory"], ["gpus", "GPU"],
    ["served", "Served"], ["refused", "Refused"], ["starts", "Starts"], ["engine", "Engine"],
    ["swap", "Swap"], ["tokens", "Tokens/s"], ["ttft", "First byte"],
  ]);
  for (const [name, node] of Object.entries(nodes)) {
    if (!["queued", "running", "need"].includes(name)) node.parentElement.classList.add("rare");
  }
  const failure = el("p", "failure");
  about.append(title, list, failure);
  const commands = el("div", "commands");
  commands.setAttribute("role", "group");
  commands.setAttribute("aria-label", `Commands for ${model.name}`);
  const button = (text, act) => {
    const one = el("button", "", text);
    one.type = "button";
    one.setAttribute("aria-label", `${text} ${model.name}`);
    one.addEventListener("click", () => {
      if (!one.classList.contains("off")) act(one);
    });
    commands.append(one);
    return one;
  };
  const name = model.name;
  const wake = button("Wake", (one) => command(one, name, "wake"));
  const sleep = button("Sleep", (one) => {
    const { running } = snapshot.models.find((now) => now.name === name) ?? model;
    const asked = `${name} is answering ${running} request${running === 1 ? "" : "s"}. Put it to sleep?`;
    if (!running || confirm(asked)) command(one, name, "sleep");
  });
  const hibernate = button("Hibernate", (one) => {
    const { running } = snapshot.models.find((now) => now.name === name) ?? model;
    const asked = `${name} is answering ${running} request${running === 1 ? "" : "s"}. Have it hibernate?`;
    if (!running || confirm(asked)) command(one, name, "hibernate");
  });
  button("Restart", (one) => {
    if (confirm(`Restart the engine of ${name}?`)) command(one, name, "restart");
  });
  const pin = button("Pin", (one) => {
    command(one, name, "pin", { pinned: one.getAttribute("aria-pressed") !== "true" });
  });
  const log = button("Log", () => openLog(name));
  row.append(about, commands);
  row.parts = { stage, since, pinned, aliases, nodes, failure, wake, sleep, hibernate, pin, log };
  return row;
}
function fillModel(row, model) {
  const { stage, pinned, aliases, nodes, failure, wake, sleep, hibernate, pin, log } = row.parts;
  stage.className = `chip ${stageClass(model.stage)}`;
  put(stage, model.stage);
  setOff(wake, model.stage === "ready");
  setOff(sleep, ["asleep", "hibernating", "cold"].includes(model.stage));
  setOff(hibernate, ["hibernating", "cold"].includes(model.stage));
  hibernate.hidden = !model.can_hibernate;
  pinned.hidden = !model.is_pinned;
  const others = [...model.aliases, ...model.adapters];
  put(aliases, others.length ? `also ${others.join(", ")}` : "");
  put(nodes.queued, String(model.queued));
  put(nodes.running, String(model.running));
  put(nodes.need, needOf(model));
  putKnown(nodes.held, model.held_bytes === null ? "" : held(model.held_bytes));
  putKnown(nodes.residue, model.residue_bytes ? held(model.residue_bytes) : "");
  putKnown(nodes.host, model.host_bytes ? bytes(model.host_bytes) : "");
  put(nodes.gpus, model.gpus.join(", "));
  put(nodes.served, String(model.admitted));
  put(nodes.refused, String(model.refused));
  put(nodes.starts, String(model.starts));
  put(nodes.engine, `${model.engine} at ${model.url}`);
  const { recent } = model;
  putKnown(nodes.swap, swapCosts(model));
  putKnown(nodes.tokens, tokensPerS(recent));
  putKnown(nodes.ttft, recent.ttft_s === null ? "" : seconds(recent.ttft_s));
  const inRow = model.failures > 1 ? ` (${model.failures} in a row)` : "";
  const cannot = model.cannot_hibernate ? `Cannot hibernate: ${model.cannot_hibernate}` : "";
  put(failure, model.last_failure === null ? cannot : `Last failure${inRow}: ${model.last_failure}`);
  failure.hidden = failure.textContent === "";
  pin.setAttribute("aria-pressed", String(model.is_pinned));
  log.hidden = !model.is_supervised;
}
// What is known, and where it comes from.
function needOf({ known_need_bytes: known, need_bytes: configured }) {
  if (!known) return "not known yet";
  if (configured === null) return `${held(known)} measured`;
  if (known.every((count) => count === configured)) return `${held(known)} configured`;
  return `${held(known)} measured, ${bytes(configured)} configured`;
}
function swapCosts({ resume_s: resume, wake_s: wake, start_s: start, leave_s: leave, hibernate_s: hibernate }) {
  const costs = [["resume", resume], ["wake", wake], ["start", start], ["leave", leave], ["hibernate", hibernate]];
  return costs.filter(([, cost]) => cost !== null && cost !== undefined).map(([name, cost]) => `${name} ${seconds(cost)}`).join(", ");
}
function tokensPerS({ prompt_tokens_per_s: prompts, completion_tokens_per_s: answers }) {
  const rate = (count) => (count < 10 ? count.toFixed(1) : count.toFixed(0));
  const rates = [[answers, "answers"], [prompts, "prompts"]].filter(([count]) => count !== null);
  return rates.map(([count, name]) => `${rate(count)} of ${name}`).join(", ");
}
function showRequests() {
  const seen = new Map();
  // A client may use an identifier twice.
  const listed = requests.requests.map((request) => {
    const nth = (seen.get(request.id) ?? 0) + 1;
    seen.set(request.id, nth);
    return { ...request, row: `${request.id} ${nth}` };
  });
  at("no-requests").hidden = listed.length > 0;
  at("requests").hidden = listed.length === 0;
  at("requests").classList.toggle("keyless", listed.every(({ key: name }) => name === null));
  const more = requests.count - listed.length;
  put(at("requests-count"), more > 0 ? `${requests.count}, of which the oldest ${listed.length}` : String(requests.count || ""));
  rows(at("requests").tBodies[0], listed, ({ row }) => row, ({ id, method, path, peer }) => {
    const [row, name, state] = [el("tr"), el("th"), el("td")];
    name.scope = "row";
    row.title = [`${method} ${path}`, peer && `from ${peer}`, id].filter(Boolean).join(", ");
    state.append(el("span", "chip"));
    const [end, cancel] = [el("td", "number"), el("button", "small", "×")];
    cancel.type = "button";
    cancel.title = "Cancel";
    cancel.addEventListener("click", () => cancelRequest(cancel, id, path));
    end.append(cancel);
    row.append(name, el("td", "wide of-key"), state, el("td", "number first-byte"), el("td", "number"), end);
    return row;
  }, (row, { id, model, key: keyName, state, ttft_s: ttft }) => {
    const [name, key, stateCell, first, , end] = row.children;
    put(name, model ?? "not known yet");
    end.firstChild.setAttribute("aria-label", `Cancel the request ${id} for ${model ?? "no model yet"}`);
    put(key, keyName ?? "");
    stateCell.firstChild.className = `chip ${STATES[state] ?? ""}`;
    put(stateCell.firstChild, state);
    put(first, ttft === null ? "" : seconds(ttft));
  });
}
function showQueue() {
  const busy = snapshot.models.filter((model) => model.queued > 0).sort((a, b) => b.queued - a.queued);
  at("no-queue").hidden = busy.length > 0;
  at("queue").hidden = busy.length === 0;
  const make = (model) => {
    const [row, name] = [el("tr"), el("th", "", model.name)];
    name.scope = "row";
    row.append(name, el("td", "number"), el("td", "number"), el("td", "number"));
    return row;
  };
  rows(at("queue").tBodies[0], busy, (model) => model.name, make, (row, model) => {
    put(row.children[1], String(model.queued));
    put(row.children[2], String(model.running));
  });
}
function phaseTone(name) {
  const index = PHASES.indexOf(name);
  return `var(--m${(index < 0 ? TONES - 1 : index) % TONES})`;
}
// All swaps have one scale, so that a line half as long took half the time.
function showSwaps() {
  const { swaps } = snapshot;
  at("no-swaps").hidden = swaps.length > 0;
  const longest = Math.max(1e-6, ...swaps.map((swap) => swap.whole_s));
  rows(at("swaps"), swaps, (swap) => `${swap.at_unix_ms} ${swap.model}`, makeSwap, (row, swap) => {
    row.children[1].style.width = `${(100 * swap.whole_s) / longest}%`;
  });
  const used = [...new Set(swaps.flatMap((swap) => swap.phases.map(([name]) => name)))];
  used.sort((a, b) => PHASES.indexOf(a) - PHASES.indexOf(b));
  if (swaps.some((swap) => swap.left.length > 0)) used.unshift(OTHERS);
  rows(at("phases"), used, (name) => name, (name) => {
    const item = el("span");
    const swatch = el("span", name === OTHERS ? "swatch others" : "swatch");
    if (name !== OTHERS) swatch.style.background = phaseTone(name);
    item.append(swatch, name);
    return item;
  }, () => {});
}
const OTHERS = "others leave";
function phasesText(phases) {
  return phases.map(([name, length]) => `${name} ${seconds(length)}`).join(" · ");
}
function makeSwap(swap) {
  const row = el("li");
  const line = el("div", "line");
  line.append(clock(swap.at_unix_ms), el("strong", "", swap.model), el("span", "", seconds(swap.whole_s)),
    el("span", "chip", swap.path));
  if (swap.waited_s !== null) line.append(el("span", "muted", `waited for ${seconds(swap.waited_s)}`));
  const bar = el("div", "phases");
  bar.setAttribute("aria-hidden", "true");
  // The line is filled only if the factors sum to 1 or more.
  const before = Math.max(swap.whole_s - swap.total_s, 0);
  const whole = Math.max(swap.phases.reduce((sum, [, length]) => sum + length, before), 1e-6);
  const add = (className, length) => {
    const part = el("span", className);
    part.style.flexGrow = String((100 * Math.max(length, 0)) / whole);
    bar.append(part);
    return part;
  };
  if (swap.left.length > 0 && before > 0) add("others", before);
  for (const [name, length] of swap.phases) add("", length).style.setProperty("--tone", phaseTone(name));
  row.append(line, bar);
  for (const { model, phases } of swap.left) row.append(el("p", "muted left", `${model} left: ${phasesText(phases)}`));
  row.append(el("p", "muted", phasesText(swap.phases)));
  return row;
}
function tick() {
  if (!snapshot) return;
  const elapsed = (performance.now() - snapshotAt) / 1000;
  put(at("uptime"), `up ${span(snapshot.uptime_s + elapsed)}${snapshot.is_ending ? ", ending" : ""}`);
  for (const row of at("models").children) {
    const model = snapshot.models.find((one) => one.name === row.dataset.name);
    if (model) put(row.parts.since, `for ${span(model.stage_s + elapsed)}`);
  }
  const waits = new Map(snapshot.models.map((model) => [model.name, model.oldest_wait_s]));
  for (const row of at("queue").tBodies[0].children) {
    const wait = waits.get(row.dataset.name) ?? null;
    put(row.lastElementChild, wait === null ? "" : span(wait + elapsed));
  }
  requests.requests.forEach((request, index) => {
    const row = at("requests").tBodies[0].children[index];
    if (row) put(row.children[4], span(request.age_s + elapsed));
  });
  showTimeline();
}

// ---- Commands

function command(button, name, what, body) {
  order(button, "POST", `rotate/models/${encodeURIComponent(name)}/${what}`, body, `${what} sent to ${name}`);
}
function cancelRequest(button, id, path) {
  if (!confirm(`Cancel the request ${id} to ${path}? Its client gets an error.`)) return;
  order(button, "POST", `rotate/requests/${encodeURIComponent(id)}/cancel`, null, "The request was cancelled");
}
function sleepAll(button) {
  const running = snapshot.models.reduce((sum, model) => sum + model.running, 0);
  const asked = `${running} request${running === 1 ? " is" : "s are"} being answered. Put all models to sleep?`;
  if (!running || confirm(asked)) order(button, "POST", "rotate/sleep", null, "sleep sent to all models");
}
async function readLog(name) {
  const stop = logStop = new AbortController();
  while (!stop.signal.aborted) {
    try {
      await followLog(name, stop.signal);
    } catch (error) {
      if (stop.signal.aborted) return;
      showLogText(error.message);
    }
    await new Promise((resolve) => { setTimeout(resolve, LOG_RETRY_MS); });
  }
}
// A carriage return takes back the line in progress.
async function followLog(name, signal) {
  const path = `rotate/models/${encodeURIComponent(name)}/log?follow=true&lines=${LOG_LINES}`;
  const response = await send(path, { signal });
  signal.throwIfAborted();
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  const kept = (line) => line.slice(line.lastIndexOf("\r") + 1);
  const lines = [];
  let open = "";
  showLogText("No output yet.");
  for (;;) {
    const { done, value } = await reader.read();
    signal.throwIfAborted();
    if (done) return;
    const parts = (open + value).split("\n");
    open = kept(parts.pop());
    lines.push(...parts.map(kept));
    lines.splice(0, Math.max(0, lines.length - LOG_LINES));
    showLogText([...lines, open].join("\n") || "No output yet.");
  }
}
// At most once for each frame.
function showLogText(text) {
  logText = text;
  logFrame ??= requestAnimationFrame(() => {
    logFrame = null;
    showLog();
  });
}
// Follows the end, unless a reader has scrolled away from it.
function showLog() {
  const box = at("log-text");
  const isAtEnd = box.scrollHeight - box.scrollTop - box.clientHeight < 4;
  const wanted = at("log-find").value.toLowerCase();
  const lines = logText.trimEnd().split("\n");
  const found = wanted ? lines.filter((line) => line.toLowerCase().includes(wanted)) : lines;
  put(box, found.join("\n"));
  put(at("log-count"), wanted ? `${found.length} of ${lines.length} lines` : "");
  if (isAtEnd) box.scrollTop = box.scrollHeight;
}
function openLog(name) {
  put(at("log-title"), `Log of ${name}`);
  put(at("log-text"), "");
  logText = "";
  at("log-find").value = "";
  at("log").showModal();
  readLog(name);
}
at("log-find").addEventListener("input", showLog);
at("log").addEventListener("close", () => logStop?.abort());
at("sleep-all").addEventListener("click", (event) => sleepAll(event.currentTarget));
at("log-close").addEventListener("click", () => at("log").close());
at("reload").addEventListener("click", (event) => {
  order(event.currentTarget, "POST", "rotate/reload", null, "The configuration was reloaded");
});
at("window").addEventListener("change", tick);
at("event-kind").addEventListener("change", filterEvents);
at("event-model").addEventListener("change", filterEvents);
document.addEventListener("visibilitychange", () => {
  if (!document.hidden) refresh();
});
setInterval(tick, 1000);
setInterval(() => {
  if (!document.hidden && at("key-form").hidden) refresh();
}, POLL_MS);
followForEver();

"use strict";
const POLL_MS = 2000;
const TIMEOUT_MS = 15000;
const STAGES = { awake: "good", failed: "bad", hibernating: "deep", on_disk: "deep", waking: "busy", sleeping: "busy",
  starting: "busy" };
const GOALS = { hot: "good", warm: "busy" };
let fleet = null;
let changes = [];
let clockAhead = 0;
let pinned = null;
let explained = null;

// ---- Requests

function keyNeeded() {
  closeAll();
}
function keyGiven() {
  refresh();
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
      const signal = AbortSignal.timeout(TIMEOUT_MS);
      const [response, listed] = await Promise.all([
        send("fleet/status", { signal }), send("fleet/changes", { signal }),
      ]);
      const now = await response.json();
      changes = (await listed.json()).changes;
      const theirs = Date.parse(response.headers.get("date")) - Date.now();
      // Clocks that nearly agree are taken as one: the header has whole seconds.
      clockAhead = Math.abs(theirs) > 3000 ? theirs : 0;
      fleet = now;
      show();
    } while (refreshAgain);
  } catch (error) {
    if (error instanceof NoKey) needKey(error);
    else {
      link("Disconnected", "bad");
      const reason = error.name === "TimeoutError" ? "no answer for a while" : error.message;
      showNotice(`Disconnected: ${reason}. The data below may be old. The page reconnects by itself.`);
    }
  } finally {
    isRefreshing = false;
  }
}

// ---- Rendering

function show() {
  link(fleet.is_current ? "Live" : "etcd not reached", fleet.is_current ? "good" : "bad");
  showNotice(fleet.is_current ? "" : "etcd cannot be reached. This is what it had last, and routers go on by it.");
  put(at("name"), fleet.fleet);
  showAll(at("h-controller"));
  showController();
  at("no-nodes").hidden = fleet.nodes.length > 0;
  rows(at("nodes"), fleet.nodes, ({ node }) => node, makeNode, fillNode);
  showModels();
  showChanges();
  if (pinned && at("pin").open) showPinNodes();
}
function showController() {
  const { leader, controller } = fleet;
  const isHere = controller?.is_leader ?? false;
  put(at("leader"), leader === null ? "No controller is elected: nothing is placed anew."
    : `${leader} places models${isHere ? ", which is this process" : ""}.`);
  const decision = at("decision");
  decision.hidden = !isHere;
  if (isHere) {
    put(decision, `Its last decision took ${seconds(controller.decided_in_s)}. It has written ${controller.written} `
      + `placement${controller.written === 1 ? "" : "s"}.`);
  }
  const texts = (list, items) => rows(list, items, (text) => text, (text) => el("li", "failure", text), () => {});
  texts(at("shortages"), isHere ? controller.shortages.map(({ text }) => text) : []);
  texts(at("problems"), fleet.problems);
}
function makeButton(commands, text, label, act) {
  const one = el("button", "", text);
  one.type = "button";
  one.setAttribute("aria-label", label);
  one.addEventListener("click", () => act(one));
  commands.append(one);
  return one;
}
function makeNode({ node }) {
  const row = el("li", "card about");
  const [title, commands] = [el("div", "title"), el("div", "commands")];
  const [draining, page] = [el("span", "chip busy", "drains"), el("a", "", "Its page")];
  page.rel = "noopener noreferrer";
  title.append(el("h3", "", node), draining, page);
  const [list, nodes] = facts([
    ["gpus", "GPUs"], ["budget", "For models"], ["awake", "Awake"], ["models", "Models"], ["domain", "Domain"],
    ["front", "Front"], ["version", "Version"], ["why", "Drained"],
  ]);
  const drain = makeButton(commands, "Drain", `Drain ${node}`, (one) => {
    const path = `fleet/drains/${encodeURIComponent(node)}`;
    if (isWished(node)) {
      order(one, "DELETE", path, null, `${node} takes models again`);
    } else if (confirm(`Have the models of ${node} go elsewhere?`)) {
      order(one, "PUT", path, {}, `${node} drains`);
    }
  });
  row.append(title, list, commands);
  row.parts = { draining, page, nodes, drain };
  return row;
}
function isWished(node) {
  return fleet.drains.some((drain) => drain.node === node);
}
function fillNode(row, node) {
  const { draining, page, nodes, drain } = row.parts;
  draining.hidden = !node.is_draining;
  // A node says where its page is. Other schemes are no pages.
  page.hidden = !/^https?:\/\//.test(node.control_url);
  if (!page.hidden && page.getAttribute("href") !== node.control_url) page.href = node.control_url;
  const copies = fleet.models.filter((copy) => copy.node === node.node);
  put(nodes.gpus, String(node.gpus));
  put(nodes.budget, bytes(node.budget_bytes));
  put(nodes.awake, String(copies.filter(({ stage }) => stage === "awake").length));
  put(nodes.models, String(node.models));
  putKnown(nodes.domain, node.domain);
  putKnown(nodes.front, node.front_url);
  putKnown(nodes.version, node.version);
  putKnown(nodes.why, fleet.drains.find((wish) => wish.node === node.node)?.why ?? "");
  const text = isWished(node.node) ? "Take models again" : "Drain";
  put(drain, text);
  drain.setAttribute("aria-label", isWished(node.node) ? `Let ${node.node} take models again` : `Drain ${node.node}`);
}
function showModels() {
  const copies = new Map();
  for (const copy of fleet.models) {
    if (!copies.has(copy.model)) copies.set(copy.model, []);
    copies.get(copy.model).push(copy);
  }
  // A pin may be there before its model is.
  for (const { model } of fleet.pins) if (!copies.has(model)) copies.set(model, []);
  const wanted = at("find").value.toLowerCase();
  const models = [...copies].map(([model, on]) => ({ model, on }))
    .filter(({ model }) => model.toLowerCase().includes(wanted));
  models.sort((a, b) => (a.model < b.model ? -1 : 1));
  at("no-models").hidden = models.length > 0;
  rows(at("models"), models, ({ model }) => model, makeModel, fillModel);
}
function makeModel({ model }) {
  const row = el("li", "card about");
  const [title, commands, copies] = [el("div", "title"), el("div", "commands"), el("ul", "rows")];
  const pin = el("span", "chip good");
  title.append(el("h3", "", model), pin);
  copies.setAttribute("aria-label", `Nodes of ${model}`);
  makeButton(commands, "Pin", `Pin ${model}`, () => openPin(model));
  const unpin = makeButton(commands, "Unpin", `Unpin ${model}`, (one) => {
    order(one, "DELETE", `fleet/pins/${encodeURIComponent(model)}`, null, `${model} is not pinned any more`);
  });
  makeButton(commands, "Why", `Why ${model} is where it is`, () => openWhy(model));
  row.append(title, copies, commands);
  row.parts = { pin, copies, unpin };
  return row;
}
function fillModel(row, { model, on }) {
  const { pin, copies, unpin } = row.parts;
  const wish = fleet.pins.find((one) => one.model === model);
  pin.hidden = unpin.hidden = wish === undefined;
  if (wish) {
    put(pin, `pinned ${wish.copies}×${wish.nodes.length ? ` on ${wish.nodes.join(", ")}` : ""}`);
  }
  rows(copies, on, ({ node }) => node, ({ node }) => {
    const [item, line] = [el("li"), el("div", "line")];
    const parts = { stage: el("span", "chip"), goal: el("span", "chip"), requests: el("span"), why: el("span", "muted") };
    line.append(el("strong", "", node), parts.stage, parts.goal, parts.requests, parts.why);
    item.append(line);
    item.parts = parts;
    return item;
  }, (item, copy) => {
    const { stage, goal, requests, why } = item.parts;
    stage.className = `chip ${STAGES[copy.stage] ?? ""}`;
    put(stage, stageText(copy.stage));
    goal.className = `chip ${GOALS[copy.goal] ?? ""}`;
    put(goal, `${copy.goal} wanted`);
    const counts = [[copy.running, "running"], [copy.queued, "waiting"]].filter(([count]) => count > 0);
    put(requests, counts.map(([count, what]) => `${count} ${what}`).join(", "));
    const since = copy.changed_at_ms === null ? ""
      : `for ${span((Date.now() + clockAhead - copy.changed_at_ms) / 1000)}`;
    put(why, [since, copy.why && `since ${copy.why}`].filter(Boolean).join(", "));
  });
}
function stageText(stage) {
  return stage === null ? "gone" : stage.replace("_", " ");
}
function showChanges() {
  at("no-changes").hidden = changes.length > 0;
  const nameOf = (change) => `${change.at_unix_ms} ${change.fence} ${change.goal} ${change.node} ${change.model}`;
  rows(at("changes"), changes, nameOf, (change) => {
    const [row, line] = [el("li"), el("div", "line")];
    const before = change.before === null ? "" : `${change.before}, now `;
    line.append(clock(change.at_unix_ms), el("strong", "", change.model), el("span", "", `on ${change.node}`),
      el("span", "", `${before}${change.goal}`), el("span", "muted", change.why));
    row.append(line);
    return row;
  }, () => {});
}

// ---- Pins, and why

function openPin(model) {
  pinned = model;
  const wish = fleet.pins.find((one) => one.model === model);
  put(at("pin-title"), `Keep ${model} awake`);
  at("pin-copies").value = String(wish?.copies ?? 1);
  at("pin-nodes").replaceChildren();
  showPinNodes(wish?.nodes ?? []);
  at("pin").showModal();
}
function showPinNodes(chosen = []) {
  const nodes = fleet.models.filter(({ model, stage }) => model === pinned && stage !== null);
  rows(at("pin-nodes"), nodes, ({ node }) => node, ({ node }) => {
    const [item, label, box] = [el("li"), el("label"), el("input")];
    box.type = "checkbox";
    box.checked = chosen.includes(node);
    label.append(box, ` ${node}`);
    item.append(label);
    return item;
  }, () => {});
}
at("pin-form").addEventListener("submit", () => {
  const boxes = [...at("pin-nodes").children].filter((item) => item.querySelector("input").checked);
  const body = { copies: Number(at("pin-copies").value), nodes: boxes.map((item) => item.dataset.name) };
  order(at("pin-do"), "PUT", `fleet/pins/${encodeURIComponent(pinned)}`, body, `${pinned} is pinned`);
});
at("pin-close").addEventListener("click", () => at("pin").close());
async function openWhy(model) {
  const asked = explained = Symbol(model);
  put(at("why-title"), `Where ${model} is, and why`);
  put(at("why-problem"), "");
  at("why-nodes").replaceChildren();
  at("why").showModal();
  let why;
  try {
    why = await (await send(`fleet/why/${encodeURIComponent(model)}`)).json();
  } catch (error) {
    if (explained !== asked) return;
    if (error instanceof NoKey) needKey(error);
    else put(at("why-problem"), error.message);
    return;
  }
  // Another one was asked about meanwhile.
  if (explained !== asked) return;
  put(at("why-problem"), why.shortages.join(" "));
  rows(at("why-nodes"), why.nodes, ({ node }) => node, ({ node, text, changed_at_ms: since }) => {
    const [row, line] = [el("li"), el("div", "line")];
    line.append(el("strong", "", node), el("span", "", text));
    if (since !== null) line.append(clock(since));
    row.append(line);
    return row;
  }, () => {});
}
at("why-close").addEventListener("click", () => at("why").close());
function closeAll() {
  for (const dialog of [at("pin"), at("why")]) if (dialog.open) dialog.close();
}
at("find").addEventListener("input", () => {
  if (fleet) showModels();
});
document.addEventListener("visibilitychange", () => {
  if (!document.hidden) refresh();
});
setInterval(() => {
  if (!document.hidden && at("key-form").hidden) refresh();
}, POLL_MS);
refresh();

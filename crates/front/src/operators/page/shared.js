"use strict";
// What all pages have in common. Each has its own keyNeeded(), keyGiven() and refresh().
// Text from the server is set as text only, so that it cannot become markup.
const KEY = "poorwill-rotate-key";
const at = (id) => document.getElementById(id);
// Without session storage, a key lasts until the page is closed.
function stored(use) {
  try { return use(sessionStorage); } catch { return null; }
}
let key = stored((storage) => storage.getItem(KEY));

function el(tag, className, text) {
  const node = document.createElement(tag);
  if (className) node.className = className;
  if (text !== undefined) node.textContent = text;
  return node;
}
function put(node, text) {
  if (node.textContent !== text) node.textContent = text;
}
function announce(text) {
  put(at("announcement"), text);
}
function showNotice(text) {
  at("notice").hidden = !text;
  put(at("notice"), text || "");
}

// ---- Text and numbers

function bytes(count) {
  if (count === null || count === undefined) return "unknown";
  const gib = count / 2 ** 30;
  if (count === 0) return "0 GiB";
  if (gib >= 1) return `${gib >= 100 ? gib.toFixed(0) : gib.toFixed(1)} GiB`;
  return `${(count / 2 ** 20).toFixed(1)} MiB`;
}
function seconds(count) {
  if (typeof count !== "number") return "unknown";
  if (count < 0.9995) return `${Math.round(count * 1000)} ms`;
  if (count < 59.95) return `${count.toFixed(1)} s`;
  return span(count);
}
// A running duration, in whole seconds.
function span(count) {
  const all = Math.max(0, Math.floor(count));
  const [days, hours, minutes] = [Math.floor(all / 86400), Math.floor(all / 3600) % 24, Math.floor(all / 60) % 60];
  if (days) return `${days} d ${hours} h`;
  if (hours) return `${hours} h ${minutes} min`;
  if (minutes) return `${minutes} min ${all % 60} s`;
  return `${all} s`;
}
function clock(unixMs) {
  const time = el("time", "muted");
  const date = new Date(unixMs);
  if (Number.isNaN(date.getTime())) return time;
  time.dateTime = date.toISOString();
  const isToday = date.toDateString() === new Date().toDateString();
  time.textContent = isToday ? date.toLocaleTimeString() : date.toLocaleString();
  return time;
}
function time(unixMs) {
  return new Date(unixMs).toLocaleTimeString();
}

// ---- Requests

class NoKey extends Error {
  constructor(used) {
    super("a key is needed");
    this.used = used;
  }
}
async function send(path, options = {}) {
  const headers = { ...options.headers };
  const used = key;
  if (used) headers.Authorization = `Bearer ${used}`;
  const response = await fetch(path, { ...options, headers, cache: "no-store", credentials: "omit" });
  if (response.status === 401) throw new NoKey(used);
  if (!response.ok) {
    let text = `${response.status} ${response.statusText}`;
    try {
      text = (await response.json()).error.message;
    } catch { /* Another server answered; the status has to suffice. */ }
    throw new Error(text);
  }
  return response;
}
function needKey({ used }) {
  // The key was replaced meanwhile.
  if (used !== key) return;
  link("Key needed", "bad");
  showNotice("");
  put(at("key-error"), used ? "This key is not one of control's." : "");
  at("key-form").hidden = false;
  at("all").hidden = true;
  keyNeeded();
  at("key").focus();
}
function link(text, className) {
  at("link").className = `chip ${className}`;
  put(at("link"), text);
}
async function order(button, method, path, body, done) {
  if (button.getAttribute("aria-disabled") === "true") return;
  button.setAttribute("aria-disabled", "true");
  button.isPending = true;
  try {
    const headers = body ? { "Content-Type": "application/json" } : {};
    await send(path, { method, headers, body: body && JSON.stringify(body) });
    showNotice("");
    announce(done);
    refresh();
  } catch (error) {
    if (error instanceof NoKey) needKey(error);
    else showNotice(`Failed: ${error.message}`);
  } finally {
    button.isPending = false;
    if (!button.classList.contains("off")) button.removeAttribute("aria-disabled");
  }
}

// ---- Rendering

// Instead of the form for a key, whose focus goes on to this heading.
function showAll(heading) {
  const form = at("key-form");
  const isLeft = form.contains(document.activeElement);
  form.hidden = true;
  at("all").hidden = false;
  if (isLeft) heading.focus();
  at("forget").hidden = !key;
}
// Keeps one row for each name, so that the focus stays in its row.
function rows(list, items, nameOf, make, fill) {
  const focused = document.activeElement;
  const old = new Map([...list.children].map((row) => [row.dataset.name, row]));
  const names = new Set(items.map((item) => String(nameOf(item))));
  // First, so that other rows need not move and lose the focus.
  old.forEach((row, name) => {
    if (!names.has(name)) row.remove();
  });
  items.forEach((item, index) => {
    const name = String(nameOf(item));
    let row = old.get(name);
    if (!row) {
      row = make(item);
      row.dataset.name = name;
    }
    if (list.children[index] !== row) list.insertBefore(row, list.children[index] ?? null);
    fill(row, item);
  });
  // A row that moves loses it.
  if (focused !== document.activeElement && list.contains(focused)) focused.focus({ preventScroll: true });
}
function facts(parts) {
  const list = el("dl");
  const nodes = {};
  for (const [name, title, swatch] of parts) {
    const [pair, dt, dd] = [el("div"), el("dt"), el("dd")];
    if (swatch) dt.append(el("span", `swatch ${swatch}`));
    dt.append(title);
    pair.append(dt, dd);
    list.append(pair);
    nodes[name] = dd;
  }
  return [list, nodes];
}
// A fact is shown once it is known.
function putKnown(node, text) {
  node.parentElement.hidden = text === "";
  put(node, text);
}
// The command has no effect in this stage.
function setOff(button, isOff) {
  button.classList.toggle("off", isOff);
  if (isOff) button.setAttribute("aria-disabled", "true");
  else if (!button.isPending) button.removeAttribute("aria-disabled");
}

// ---- Key and theme

at("forget").addEventListener("click", () => {
  stored((storage) => storage.removeItem(KEY));
  location.reload();
});
at("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  const given = at("key").value.trim();
  if (!/^[\x21-\x7e]+$/.test(given)) {
    put(at("key-error"), "A key is printable ASCII without blanks, and this is not.");
    return;
  }
  key = given;
  stored((storage) => storage.setItem(KEY, key));
  at("key").value = "";
  // Cleared, so that the same error is announced again.
  put(at("key-error"), "");
  keyGiven();
});
const THEME = "poorwill-rotate-theme";
function setTheme(theme) {
  if (theme) document.documentElement.dataset.theme = theme;
  else delete document.documentElement.dataset.theme;
}
at("theme").addEventListener("change", (event) => {
  setTheme(event.target.value);
  try { localStorage.setItem(THEME, event.target.value); } catch { /* It lasts until the page is closed. */ }
});
try {
  at("theme").value = localStorage.getItem(THEME) ?? "";
  if (at("theme").selectedIndex < 0) at("theme").value = "";
  setTheme(at("theme").value);
} catch { /* As the system has it. */ }

// Sliders, and the state of the page, which is kept in the address.

/** A number with a decimal point or comma; 1,500 is ambiguous, and rejected. */
const numberOf = (text) => (/^[+-]?\d{1,3},\d{3}$/.test(text) ? NaN : Number(text.replace(",", ".") || NaN));
const unitNumber = (text, units) => {
  const match = /^\s*([+-]?[\d.,]+(?:e[+-]?\d+)?)\s*([a-zµμ/]*)\s*$/i.exec(text);
  if (!match) return NaN;
  const number = numberOf(match[1]), unit = match[2].toLowerCase().replace("bps", "bit/s").replace("μ", "µ");
  return unit in units ? number * units[unit] : NaN;
};
const RATE_UNITS = { "": 1, "bit/s": 1, "kbit/s": 1e3, "mbit/s": 1e6, "gbit/s": 1e9, "tbit/s": 1e12, k: 1e3, m: 1e6, g: 1e9, t: 1e12 };
const DELAY_UNITS = { "": 1, s: 1, ms: 1e-3, us: 1e-6, "µs": 1e-6, ns: 1e-9, min: 60, h: 3600 };
const BYTE_UNITS = { b: 1, kb: 1e3, mb: 1e6, gb: 1e9, tb: 1e12 };
const plain = (text) => numberOf(text.replace(/[×x$\s]/g, ""));
/** The sliders: range of the logarithm, whether 0 is at its lower end, how a value is written and read. */
const sliders = () => {
  const equal = P.network.equal;
  const all = [
    equal ? { key: "bw", of: "network", label: "bandwidth", range: [4, 12.5], write: (v) => scaled(v, RATES), read: (t) => unitNumber(t, RATE_UNITS), note: P.network.collective }
          : { key: "bw", of: "network", label: "bandwidth", range: [-3, 4], write: (v) => `× ${digits(v)}`, read: plain, note: networkText() },
    equal ? { key: "lat", of: "network", label: "latency", range: [-6, 1], zero: true, write: delay, read: (t) => unitNumber(t, DELAY_UNITS), note: "one way, of a message" }
          : { key: "lat", of: "network", label: "latency", range: [-3, 3], zero: true, write: (v) => `× ${digits(v)}`, read: plain, note: "of all links" },
    { key: "sec", of: "compute", label: "seconds a step", range: [-4, 3], write: (v) => scaled(v, DELAYS), read: (t) => unitNumber(t, DELAY_UNITS), note: P.compute.alike ? "on each node" : "in the mean; nodes keep their ratios" },
    { key: "size", label: "model size", range: [-2, 6], write: (v) => `× ${digits(v)}`, read: (t) => { const bytes = unitNumber(t, BYTE_UNITS); return finite(bytes) && /b\s*$/i.test(t) ? bytes / P.weights : plain(t); },
      note: () => `${scaled(P.weights * state.size, BYTES)} of weights: all bytes in proportion, losses as measured` },
    { key: "price", label: "dollars an hour", range: [-2, 3], zero: true, write: (v) => (v ? `$ ${digits(v)}` : "$ 0"), read: plain, note: "of a node" },
    { key: "target", label: "target loss", linear: P.target.slice(0, 2), write: (v) => digits(v, 4), read: plain, note: () => P.columns[P.loss] + (state.target === P.target[2] ? ": at first, one that half of the strategies that learn reach with all seeds" : "") },
  ];
  return all;
};
const STEPS = 1000;
const toSlider = (own, v) => {
  if (own.linear) return (STEPS * (v - own.linear[0])) / (own.linear[1] - own.linear[0]);
  if (own.zero && v <= 0) return 0;
  return clamp((STEPS * (Math.log10(v) - own.range[0])) / (own.range[1] - own.range[0]), own.zero ? 1 : 0, STEPS);
};
const fromSlider = (own, at) => {
  if (own.linear) return Number((own.linear[0] + (at / STEPS) * (own.linear[1] - own.linear[0])).toPrecision(4));
  if (own.zero && at <= 0) return 0;
  return Number((10 ** (own.range[0] + (at / STEPS) * (own.range[1] - own.range[0]))).toPrecision(3));
};
const drawSliders = () => {
  $("assumed").textContent = !isPriced() ? unpriced() : P.assumed.length ? `No ${P.assumed.join(" and no ")} was given: a slider that was not moved is at a guess.` : "";
  for (const own of sliders()) {
    const range = $(`slide-${own.key}`), text = $(`text-${own.key}`), given = !own.of || isGiven(own.of);
    if (document.activeElement !== range) range.value = String(toSlider(own, state[own.key]));
    range.setAttribute("aria-valuetext", given ? own.write(state[own.key]) : "not given");
    if (text.getAttribute("aria-invalid") === "true") continue;
    if (document.activeElement !== text) text.value = given ? own.write(state[own.key]) : "";
    $(`note-${own.key}`).textContent = typeof own.note === "function" ? own.note() : own.note;
  }
};
const makeSliders = () => {
  $("sliders").replaceChildren(...sliders().map((own) => {
    const change = (value) => { set({ [own.key]: value, ...(own.of ? { on: "1" } : {}) }); later(); };
    const range = el("input", { type: "range", id: `slide-${own.key}`, min: 0, max: STEPS, step: 1, "aria-label": own.label, oninput: (event) => change(fromSlider(own, Number(event.target.value))) });
    const text = el("input", { type: "text", id: `text-${own.key}`, spellcheck: "false", autocomplete: "off", placeholder: own.of ? "not given" : null, "aria-describedby": `note-${own.key}`, onchange: (event) => {
      const value = own.read(event.target.value), fine = finite(value) && (own.zero ? value >= 0 : own.linear ? true : value > 0);
      event.target.setAttribute("aria-invalid", String(!fine));
      if (fine) change(value);
      else $(`note-${own.key}`).textContent = `not read; write it as ${own.write(state[own.key])}`;
    }, onblur: (event) => { if (event.target.getAttribute("aria-invalid") !== "true") drawSliders(); } });
    return el("div", { class: "slider" }, el("div", { class: "line" }, el("label", { for: `text-${own.key}` }, own.label), text), range, el("small", { id: `note-${own.key}` }));
  }));
};
$("sliders").addEventListener("submit", (event) => event.preventDefault());
$("sliders").addEventListener("keydown", (event) => { if (event.key === "Enter" && event.target.type === "text") event.target.blur(); });

// State, kept in the address -------------------------------------------------------------------------------------------------

const NUMBERS = ["bw", "lat", "sec", "size", "price", "target"];
const defaults = () => ({
  bw: P.network.bandwidth, lat: P.network.latency, sec: P.compute.seconds, size: 1, price: P.compute.price || 0, target: P.target[2],
  on: P.assumed.length ? "" : "1", x: P.assumed.length ? "step" : "hours", y: P.loss, logx: "", logy: "", cost: "wire", sort: "", all: "", run: 0,
  heatx: P.varied[0] || "", heaty: P.varied[1] || "", shade: "loss", hide: new Set(),
});
const choices = () => ({
  x: axesOf(), y: Object.keys(P.columns), logx: ["", "0", "1"], logy: ["", "1"], cost: Object.keys(COSTS), all: ["", "1"], on: ["", "1"], heatx: P.varied, heaty: P.varied, shade: Object.keys(SHADES),
});
const axesOf = () => {
  const has = (what) => P.runs.every((run) => run.seeds.every((seed) => seed[what].length));
  return ["hours", "wire", "payload", "step", "examples", ...(has("tokens") ? ["tokens"] : []), ...(has("rounds") ? ["round"] : [])];
};
let atFirst;
const set = (changes) => Object.assign(state, changes);
const written = () => {
  const own = new URLSearchParams();
  if (pages.length > 1) own.set("of", String(pages.indexOf(P)));
  for (const [key, value] of Object.entries(state)) {
    if (key === "hide") { if (value.size) own.set("hide", [...value].sort((a, b) => a - b).join(".")); }
    else if (value !== atFirst[key]) own.set(key, String(value));
  }
  return own.toString();
};
const restore = () => {
  const own = new URLSearchParams(location.hash.slice(1)), index = Number(own.get("of") || 0);
  P = pages[Number.isInteger(index) && index >= 0 && index < pages.length ? index : 0];
  atFirst = defaults();
  state = { ...atFirst, hide: new Set() };
  for (const key of NUMBERS) {
    const value = own.has(key) ? Number(own.get(key)) : NaN, most = 1e18;
    if (finite(value) && (value > 0 || (value === 0 && (key === "lat" || key === "price")) || key === "target") && Math.abs(value) < most) state[key] = value;
  }
  for (const [key, allowed] of Object.entries(choices())) if (own.has(key) && allowed.includes(own.get(key))) state[key] = own.get(key);
  const sort = own.get("sort") || "";
  if ([...P.titles, ...P.table, ...P.more, ...P.live].includes(sort.replace(/^-/, ""))) state.sort = sort;
  for (const i of (own.get("hide") || "").split(".")) if (/^\d+$/.test(i) && Number(i) < P.runs.length) state.hide.add(Number(i));
  if (/^\d+$/.test(own.get("run") || "") && Number(own.get("run")) < P.runs.length) state.run = Number(own.get("run"));
};
let saved = null;
const save = () => {
  clearTimeout(saved);
  saved = setTimeout(() => {
    // A frame without an address, as in a notebook, keeps no state.
    try { history.replaceState(null, "", written() ? `#${written()}` : "#"); } catch (error) { /* sandboxed */ }
  }, 150);
};

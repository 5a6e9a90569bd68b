// The data, and numbers as text.

const pages = JSON.parse(document.getElementById("data").textContent);
const $ = (id) => document.getElementById(id);
const dark = window.matchMedia("(prefers-color-scheme: dark)");
let P; // the comparison that is shown
let state; // the positions of the sliders, and the choices
const every = Number(document.body.dataset.watch || 0); // seconds after which a served page asks again

// Numbers and text -------------------------------------------------------------------------------------------------

const finite = (v) => typeof v === "number" && Number.isFinite(v);
const mean = (own) => own.reduce((a, b) => a + b, 0) / own.length;
const deviation = (own) => {
  if (own.length < 2) return 0;
  const m = mean(own);
  return Math.sqrt(own.reduce((a, b) => a + (b - m) ** 2, 0) / (own.length - 1));
};
const clamp = (v, low, high) => Math.min(high, Math.max(low, v));
const digits = (v, n = 3) => {
  if (v === Infinity) return "∞";
  if (v === 0 || !finite(v)) return v === 0 ? "0" : "–";
  const size = Math.abs(v);
  if (size >= 1e6 || size < 1e-4) return v.toExponential(n - 1).replace(/\.?0+e/, "e").replace("e+", "e");
  const text = v.toPrecision(n);
  return text.includes("e") ? String(Math.round(v)) : text.includes(".") ? text.replace(/\.?0+$/, "") : text;
};
const scaled = (v, units) => {
  const [unit, name] = units.find(([u]) => Math.abs(v) >= u * 0.9995) || units[units.length - 1];
  return `${digits(v / unit)} ${name}`;
};
const RATES = [[1e12, "Tbit/s"], [1e9, "Gbit/s"], [1e6, "Mbit/s"], [1e3, "kbit/s"], [1, "bit/s"]];
const DELAYS = [[1, "s"], [1e-3, "ms"], [1e-6, "µs"]];
const BYTES = [[1e12, "TB"], [1e9, "GB"], [1e6, "MB"], [1e3, "kB"], [1, "B"]];
const TIMES = [[86400, "days"], [3600, "hours"], [60, "minutes"], [1, "seconds"]];
const delay = (v) => (v === 0 ? "0 ms" : scaled(v, DELAYS));
const duration = (v) => (!finite(v) ? "–" : v < 1 ? delay(v) : scaled(v, [[172800, ""], [3600, "h"], [60, "min"], [1, "s"]]));
const took = (v) => (finite(v) && v >= 172800 ? `${digits(v / 86400)} days` : duration(v));

/** How a column shows its numbers, as `vsim.analysis.tables.unit_of`: [heading, factor, digits, sign, exact]. */
const unitOf = (own, values) => {
  const sizes = values.filter((v) => finite(v) && v).map(Math.abs), least = Math.min(...sizes), most = Math.max(...sizes);
  let name = own.own, size = 1, n = own.digits;
  if (sizes.length) {
    let place = Math.max(0, ...own.units.map(([, of, fewest], i) => (least >= of * fewest ? i : 0)));
    while (most >= 1e4 * own.units[place][1] && place < own.units.length - 1) place += 1;
    [name, size] = own.units[place];
    if (own.wholeFrom !== null && least >= own.wholeFrom) n = 0;
    if (own.fine) n = Math.min(9, Math.max(n, 1 - Math.floor(Math.log10(least / size))));
  }
  return [own.title.replace("{unit}", () => name), own.factor / size, n, own.sign.replace(" ", "\u00a0"), own.exact];
};
/** As `vsim.analysis.tables.cell`. */
const cell = (value, sd, [, factor, most, sign, exact]) => {
  if (typeof value === "string") return value;
  if (!finite(value)) return "–";
  const v = factor * value, n = Math.abs(v) < 1e5 ? most : 0;
  const short = (w) => w.toPrecision(3).replace("e+", "e").replace(/(\.\d*?)0+(?=e|$)/, "$1").replace(/\.(?=e|$)/, "");
  const text = (w) => (Math.abs(v) < 1e9 || exact ? w.toFixed(n) : short(w));
  const spread = text(finite(sd) ? factor * sd : 0);
  return text(v) + (/[1-9]/.test(spread) ? ` ±\u00a0${spread}` : "") + sign;
};
/** A number of a column that stands alone: [heading, text]. */
const single = (key, value, sd) => {
  const unit = unitOf(P.headings[key], [value]);
  return [unit[0], cell(value, sd, unit)];
};

/** As `vsim.figures.words.quoted`: names as a list shows them, in quotes if they have a comma and others follow. */
const quoted = (names) => names.map((name) => (names.length > 1 && name.includes(",") ? `"${name}"` : name));
const inside = (text) => text.replace(/^\w+\((.*)\)$/, "$1");
/** The network that the page was made for, in words: 100 Mbit/s, 20 ms, all-reduce as a ring. */
const networkText = () => `${inside(P.network.text).replace(/, (ring|tree|halving-doubling|server)$/, "")}, ${P.network.collective}`;
const COMPUTED = { vmap: "all nodes at once", loop: "one node after another" };
/** A row of the conditions, without names of Python. */
const condition = ([title, text]) => {
  if (title === "network" && text === P.network.text) return [title, networkText()];
  if (title === "compute") return [title, inside(text)];
  return title === "executor" ? ["simulated", text.split(", ").map((own) => COMPUTED[own] || own).join(", ")] : [title, text];
};

let unit = TIMES[1]; // of time on the network, one for the whole page: [seconds, name]
/** How a column of hours shows its numbers: in the page's unit, otherwise as `unitOf`. */
const pageTime = (own, values) => {
  const factor = 3600 / unit[0], sizes = values.filter((v) => finite(v) && v).map((v) => Math.abs(v) * factor);
  const n = sizes.length ? Math.min(9, Math.max(2, 1 - Math.floor(Math.log10(Math.min(...sizes))))) : 2;
  return [own.title.replace("{unit}", () => unit[1]), factor, n, "", false];
};
const timeUnit = (seconds) => TIMES.find(([own]) => seconds >= 2 * own) || TIMES[TIMES.length - 1];

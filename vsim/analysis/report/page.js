"use strict";
(() => {
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

  let unit = TIMES[1]; // of time on the network, one for the whole page: [seconds, name]
  /** How a column of hours shows its numbers: in the page's unit, otherwise as `unitOf`. */
  const pageTime = (own, values) => {
    const factor = 3600 / unit[0], sizes = values.filter((v) => finite(v) && v).map((v) => Math.abs(v) * factor);
    const n = sizes.length ? Math.min(9, Math.max(2, 1 - Math.floor(Math.log10(Math.min(...sizes))))) : 2;
    return [own.title.replace("{unit}", () => unit[1]), factor, n, "", false];
  };
  const timeUnit = (seconds) => TIMES.find(([own]) => seconds >= 2 * own) || TIMES[TIMES.length - 1];

  // The clock: the largest of planes, see vsim.network.planes -----------------------------------------------------------

  /** Whether a network or compute was given, to the page or by a slider; without both there are no hours. */
  const isGiven = (what) => state.on === "1" || !P.assumed.includes(what);
  const isPriced = () => isGiven("network") && isGiven("compute");
  const place = () => ({ bw: isGiven("network") ? state.bw : NaN, lat: isGiven("network") ? state.lat : NaN, sec: isGiven("compute") ? state.sec : NaN, size: state.size });
  const unpriced = () => `No ${["network", "compute"].filter((what) => !isGiven(what)).join(" and no ")} given: move the sliders to price the runs.`;
  const factors = (ledger, at) => {
    if (ledger.decided === "both") return [ledger.seconds, 0, 0];
    return [ledger.decided ? ledger.seconds : at.sec, at.lat, at.size / at.bw];
  };
  const highest = (planes, [a, b, d]) => {
    let most = planes[0] === null ? NaN : 0; // null: a log without events

    for (let i = 0; i < planes.length; i += 3) most = Math.max(most, planes[i] * a + planes[i + 1] * b + planes[i + 2] * d);
    return most;
  };
  /** The position of a step between two of a ledger's steps: [place of the first, share of the second]. */
  const between = (steps, step) => {
    let low = 0, high = steps.length - 1;
    if (step >= steps[high]) return [high, 0];
    while (high - low > 1) {
      const middle = (low + high) >> 1;
      if (steps[middle] <= step) low = middle;
      else high = middle;
    }
    return [low, (step - steps[low]) / (steps[low + 1] - steps[low])];
  };
  const mixed = (values, [i, share]) => (share ? (1 - share) * values[i] + share * values[i + 1] : values[i]);
  const timeAt = (ledger, [i, share], own) => {
    const first = highest(ledger.planes[i], own);
    return share ? (1 - share) * first + share * highest(ledger.planes[i + 1], own) : first;
  };
  const secondsAt = (seed, step, at = place()) => {
    const ledger = P.ledgers[seed.ledger];
    return timeAt(ledger, between(ledger.steps, step), factors(ledger, at));
  };
  const bytesAt = (seed, step, way) => {
    const ledger = P.ledgers[seed.ledger];
    return state.size * mixed(ledger[way], between(ledger.steps, step));
  };
  const lastStep = (seed) => P.ledgers[seed.ledger].steps[P.ledgers[seed.ledger].steps.length - 1];
  const sound = (run) => run.seeds.filter((seed) => seed.sound);
  /** The seeds by which runs are compared: all seeds of a run that can be the best, otherwise its sound seeds. */
  const compared = (run) => run.compared.map((i) => run.seeds[i]);

  /** The step of measurement i of the loss, and the cost of its result; see `vsim.analysis.spent`. */
  const stepOf = (seed, i) => seed.curves[P.loss][0][i];
  const forming = (seed, i) => (seed.formed.length && !seed.formed[i] ? seed.forming : null);
  const formingTime = (own, at) => (own ? highest(own.planes, [0, at.lat, at.size / at.bw]) : 0);
  const wireOf = (seed, i) => {
    const own = forming(seed, i);
    return bytesAt(seed, stepOf(seed, i), "wire") + (own ? state.size * own.wire : 0);
  };
  const secondsOf = (seed, i, at = place()) => secondsAt(seed, stepOf(seed, i), at) + formingTime(forming(seed, i), at);

  /** As `vsim.history.reached.crossing`: the first measurement that reaches a loss, of any and of a formed model. */
  const crossing = (seed, target) => {
    const [steps, losses] = seed.curves[P.loss] || [[], []], low = (loss) => loss !== null && loss <= target;
    const i = losses.findIndex(low), formed = losses.findIndex((loss, k) => low(loss) && !forming(seed, k));
    if (i < 0) return null;
    return { step: steps[i], first: i ? steps[i - 1] + 1 : steps[0], results: formed < 0 || formed === i ? [i] : [i, formed] };
  };
  const begun = (run) => run.seeds.filter((seed) => seed.begun);
  const crossings = (run) => begun(run).map((seed) => crossing(seed, state.target));
  /** Text about a run if some of its seeds do not reach the target; "" if all do. */
  const never = (found) => {
    const reach = found.filter(Boolean).length;
    return reach === found.length ? "" : reach ? `${reach} of ${found.length} runs` : "never";
  };

  /** The costs of a run on the sliders' network: column → [mean, standard deviation], or text. */
  const priced = (run) => {
    const whole = (seed) => {
      const ledger = P.ledgers[seed.ledger], total = secondsAt(seed, lastStep(seed)), own = factors(ledger, place());
      return { hours: total / 3600, utilization: total === 0 ? 1 : (ledger.computed * own[0]) / total,
               dollars: (state.price || 0) * ledger.nodes * total / 3600, wire: bytesAt(seed, lastStep(seed), "wire") / 1e6 };
    };
    const rows = sound(run).map(whole), results = compared(run).map((seed) => { // of the last loss
      const own = whole(seed), more = forming(seed, seed.formed.length - 1), hours = own.hours + formingTime(more, place()) / 3600;
      return { hours, dollars: own.hours ? (own.dollars * hours) / own.hours : 0, wire: own.wire + (more ? (state.size * more.wire) / 1e6 : 0) };
    });
    const found = {};
    for (const key of ["hours", "utilization", "dollars", "wire"]) {
      const own = rows.map((row) => row[key]);
      found[key] = [mean(own), deviation(own)];
    }
    found.result = Object.fromEntries(Object.keys(COSTS).map((key) => [key, mean(results.map((own) => own[key]))]));
    const at = crossings(run), said = never(at);
    const to = (value) => {
      if (said) return said;
      const own = begun(run).map((seed, s) => value(seed, at[s]));
      return [mean(own), deviation(own)];
    };
    const least = (cost) => (seed, own) => Math.min(...own.results.map((i) => cost(seed, i)));
    found["steps to target"] = to((seed, own) => own.step);
    found["wire MB to target"] = to(least((seed, i) => wireOf(seed, i) / 1e6));
    found["hours to target"] = to(least((seed, i) => secondsOf(seed, i) / 3600));
    return found;
  };

  // Curves: means over the seeds ------------------------------------------------------------------------------------------

  const curves = new WeakMap();
  const curveOf = (run, column) => {
    if (!curves.has(run)) curves.set(run, {});
    const known = curves.get(run);
    if (!known[column]) {
      const seeds = sound(run).filter((seed) => seed.curves[column]);
      const maps = seeds.map((seed) => new Map(seed.curves[column][0].map((step, i) => [step, seed.curves[column][1][i]])));
      const steps = maps.length ? seeds[0].curves[column][0].filter((step) => maps.every((own) => finite(own.get(step)))) : [];
      const values = steps.map((step) => maps.map((own) => own.get(step)));
      known[column] = { seeds, steps, means: values.map(mean), deviations: values.map(deviation),
                        spots: seeds.map((seed) => steps.map((step) => between(P.ledgers[seed.ledger].steps, step))) };
    }
    return known[column];
  };
  const AXES = {
    step: { label: "step", of: (seed, step) => step },
    examples: { label: "examples", of: (seed, step) => along(seed, "examples", step) },
    tokens: { label: "tokens", of: (seed, step) => along(seed, "tokens", step) },
    round: { label: "round", of: (seed, step) => along(seed, "rounds", step) },
    payload: { label: "payload", unit: 1e6, bytes: true },
    wire: { label: "bytes on the wire", unit: 1e6, bytes: true },
    hours: { label: "time on the network", time: true },
  };
  const along = (seed, what, step) => {
    const steps = (seed.curves[P.loss] || [[]])[0];
    return steps.length ? mixed(seed[what], between(steps, step)) : NaN;
  };
  /** A run's points against an axis: {xs, ys, sds, steps}; of points with equal bytes, the last. */
  const points = (run, column, axis) => {
    const curve = curveOf(run, column), own = AXES[axis], at = place();
    const by = curve.seeds.map((seed) => factors(P.ledgers[seed.ledger], at));
    const x = curve.steps.map((step, i) => mean(curve.seeds.map((seed, s) => {
      const ledger = P.ledgers[seed.ledger];
      if (own.time) return timeAt(ledger, curve.spots[s][i], by[s]);
      if (own.bytes) return state.size * mixed(ledger[axis], curve.spots[s][i]);
      return own.of(seed, step);
    })));
    const kept = x.map((v, i) => i).filter((i) => finite(x[i]) && (!own.bytes || i + 1 === x.length || x[i + 1] > x[i]));
    return { run, xs: kept.map((i) => x[i]), ys: kept.map((i) => curve.means[i]),
             sds: kept.map((i) => curve.deviations[i]), steps: kept.map((i) => curve.steps[i]) };
  };

  // Drawing -----------------------------------------------------------------------------------------------------------

  const SVG = "http://www.w3.org/2000/svg";
  const make = (space) => (tag, attributes = {}, ...children) => {
    const node = space ? document.createElementNS(space, tag) : document.createElement(tag);
    for (const [key, value] of Object.entries(attributes)) {
      if (key.startsWith("on")) node.addEventListener(key.slice(2), value);
      else if (value === true) node.setAttribute(key, "");
      else if (value !== false && value !== null && value !== undefined) node.setAttribute(key, value);
    }
    node.append(...children.filter((child) => child !== null && child !== undefined)); // text becomes text nodes
    return node;
  };
  const el = make(null), svg = make(SVG);

  const rgb = (colour) => [1, 3, 5].map((i) => parseInt(colour.slice(i, i + 2), 16));
  const hex = (own) => "#" + own.map((c) => Math.round(clamp(c, 0, 255)).toString(16).padStart(2, "0")).join("");
  const blend = (one, other, share) => hex(rgb(one).map((c, i) => c * (1 - share) + rgb(other)[i] * share));
  const luminance = (colour) => {
    const [r, g, b] = rgb(colour).map((c) => (c / 255 <= 0.04045 ? c / 255 / 12.92 : ((c / 255 + 0.055) / 1.055) ** 2.4));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const panel = () => (dark.matches ? "#1b1e23" : "#ffffff");
  /** The colour of the figures; on a dark ground black is white, and other dark colours are lighter. */
  const ink = (look) => {
    if (!/^#[0-9a-f]{6}$/i.test(look.colour)) return dark.matches ? "#e8eaed" : "#1b1d21";
    if (!dark.matches) return look.colour;
    const light = luminance(look.colour);
    return light < 0.02 ? "#f2f3f5" : light < 0.2 ? blend(look.colour, "#ffffff", 0.3) : look.colour;
  };
  const VIRIDIS = ["#440154", "#3b528b", "#21918c", "#5ec962", "#fde725"];
  const shade = (share) => {
    const at = clamp(share, 0, 1) * 4, i = Math.min(3, Math.floor(at));
    return blend(VIRIDIS[i], VIRIDIS[i + 1], at - i);
  };

  const MARKS = {
    o: (r) => `M${-r},0a${r},${r} 0 1,0 ${2 * r},0a${r},${r} 0 1,0 ${-2 * r},0`, s: (r) => `M${-r},${-r}h${2 * r}v${2 * r}h${-2 * r}z`,
    "^": (r) => `M0,${-r}L${r},${r}H${-r}z`, v: (r) => `M0,${r}L${r},${-r}H${-r}z`, D: (r) => `M0,${-1.2 * r}L${1.2 * r},0L0,${1.2 * r}L${-1.2 * r},0z`,
    "<": (r) => `M${-r},0L${r},${-r}V${r}z`, ">": (r) => `M${r},0L${-r},${-r}V${r}z`, x: (r) => `M${-r},${-r}L${r},${r}M${r},${-r}L${-r},${r}`,
    p: (r) => `M0,${-r}L${0.95 * r},${-0.3 * r}L${0.6 * r},${0.8 * r}H${-0.6 * r}L${-0.95 * r},${-0.3 * r}z`, h: (r) => `M${-r},0L${-r / 2},${-r}H${r / 2}L${r},0L${r / 2},${r}H${-r / 2}z`,
  };
  const marker = (look, x, y, r = 3.2) => {
    const path = (MARKS[look.marker] || MARKS.o)(r), line = look.marker === "x";
    return svg("path", { d: path, transform: `translate(${x.toFixed(1)},${y.toFixed(1)})`, fill: line ? "none" : panel(),
                         stroke: ink(look), "stroke-width": 1.4 });
  };
  const sample = (look) => svg("svg", { viewBox: "0 0 30 12", "aria-hidden": "true" },
    look.bare ? null : svg("line", { x1: 1, x2: 29, y1: 6, y2: 6, stroke: ink(look), "stroke-width": 1.8, "stroke-dasharray": dashes(look) }),
    look.marker ? marker(look, 15, 6, 3.4) : null);
  const dashes = (look) => (look.dash.length ? look.dash.map((part) => part * 1.7).join(" ") : null);

  const niceStep = (span, count) => {
    const raw = span / Math.max(1, count), unit = 10 ** Math.floor(Math.log10(raw));
    return unit * [1, 2, 2.5, 5, 10].find((m) => m * unit >= raw * 0.999);
  };
  const scale = (low, high, from, to, log) => {
    if (!(high > low)) [low, high] = log ? [low / 2 || 0.5, (high || 0.5) * 2] : [low - Math.abs(low || 1) / 10, high + Math.abs(high || 1) / 10];
    const f = log ? Math.log10 : (v) => v, a = f(low), b = f(high);
    const own = (v) => from + ((f(v) - a) / (b - a)) * (to - from);
    own.back = (px) => { const v = a + ((px - from) / (to - from)) * (b - a); return log ? 10 ** v : v; };
    const every = (count) => {
      if (!log || b - a < 0.7) {  // at least two of 1, 2 and 5 times a power of ten lie in 0.7 decades
        const step = niceStep(high - low, count), ticks = [];
        for (let v = Math.ceil(low / step - 1e-9) * step; v <= high + step * 1e-9; v += step) ticks.push(Math.abs(v) < step * 1e-9 ? 0 : v);
        return ticks.filter((v) => !log || v > 0);
      }
      const decades = b - a, apart = Math.max(1, Math.ceil(decades / count)), ticks = [];
      const parts = decades < count / 3 ? [1, 2, 5] : decades < count / 2 ? [1, 3] : [1];
      for (let d = Math.floor(a); d <= Math.ceil(b); d += 1) {
        if (d % apart) continue;
        for (const m of parts) { const v = m * 10 ** d; if (v >= low * 0.9999 && v <= high * 1.0001) ticks.push(v); }
      }
      return ticks;
    };
    own.ticks = (count) => [count, 2 * count, 4 * count].map(every).find((ticks) => ticks.length > 1) || [];
    return Object.assign(own, { low, high, log });
  };
  const tick = (v) => (v === 0 ? "0" : Math.abs(v) >= 1e6 || Math.abs(v) < 1e-3 ? digits(v, 2) : String(Number(v.toPrecision(4))));

  // Read sizes before drawing: between two plots, each read would make the browser lay out the whole page.
  const widths = new Map();
  const measure = () => { for (const host of document.querySelectorAll(".plot")) widths.set(host, host.clientWidth); };

  /** A frame with axes: {root, plot, x, y, box}; `root` is an image for screen readers. */
  const frame = (host, options) => {
    const width = Math.max(260, widths.get(host) || 600), height = options.height || clamp(width * 0.52, 250, 430);
    const box = { right: width - (options.right || 14), top: options.top || 12, bottom: height - 42 };
    const y = options.y(box.bottom, box.top), heights = y.ticks(Math.max(3, Math.floor(height / 55))).map((v) => [v, (options.ytext || tick)(v)]);
    box.left = Math.max(options.left || 54, 30 + 7 * Math.max(0, ...heights.map(([, text]) => text.length)));
    const root = svg("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": options.summary });
    const x = options.x(box.left, box.right);
    const grid = svg("g"), plot = svg("g");
    for (const v of x.ticks(options.xticks || Math.max(3, Math.floor(width / 95)))) {
      const at = x(v);
      grid.append(svg("line", { class: "grid", x1: at, x2: at, y1: box.top, y2: box.bottom }));
      grid.append(svg("text", { class: "soft", x: at, y: box.bottom + 16, "text-anchor": "middle" }, (options.xtext || tick)(v)));
    }
    for (const [v, text] of heights) {
      const at = y(v);
      grid.append(svg("line", { class: "grid", x1: box.left, x2: box.right, y1: at, y2: at }));
      grid.append(svg("text", { class: "soft", x: box.left - 7, y: at + 4, "text-anchor": "end" }, text));
    }
    grid.append(svg("line", { class: "axis", x1: box.left, x2: box.right, y1: box.bottom, y2: box.bottom }));
    grid.append(svg("text", { class: "title", x: (box.left + box.right) / 2, y: height - 6, "text-anchor": "middle" }, options.xlabel));
    grid.append(svg("text", { class: "title", x: 0, y: 0, "text-anchor": "middle",
                              transform: `translate(13,${(box.top + box.bottom) / 2}) rotate(-90)` }, options.ylabel));
    const clip = `clip-${host.id}`;
    root.append(svg("defs", {}, svg("clipPath", { id: clip }, svg("rect", { x: box.left, y: box.top - 5, width: box.right - box.left + 5, height: box.bottom - box.top + 10 }))), grid, plot);
    plot.setAttribute("clip-path", `url(#${clip})`);
    host.replaceChildren(root);
    return { root, plot, x, y, box, width, height };
  };
  /** A name in a sentence, isolated so that text from right to left does not reorder the text around it. */
  const isolated = (name) => (/[\u0590-\u08ff\ufb1d-\ufefc]/.test(name) ? `\u2068${name}\u2069` : name);
  const brief = (name) => isolated(name.length > 32 ? `${[...name].slice(0, 31).join("")}…` : name);
  const empty = (host, text) => host.replaceChildren(el("p", { class: "remark" }, text));

  /** Readers of a plot, by pointer and by keyboard: `at(px, py)` shows what is there, `keys(event)` moves. */
  const readable = (host, label, at, keys) => {
    host.tabIndex = 0;
    host.setAttribute("role", "group");
    host.setAttribute("aria-label", label);
    host.onpointermove = (event) => {
      const root = host.querySelector("svg");
      if (!root) return;
      const edge = root.getBoundingClientRect(), zoom = root.viewBox.baseVal.width / edge.width;
      at((event.clientX - edge.left) * zoom, (event.clientY - edge.top) * zoom, event.clientX, event.clientY);
    };
    host.onpointerleave = () => hideTip(host);
    host.onblur = () => hideTip(host);
    host.onkeydown = (event) => {
      if (event.key === "Escape") hideTip(host);
      else if (keys && event.key.startsWith("Arrow")) { keys(event.key.slice(5)); event.preventDefault(); }
    };
  };
  const hideTip = (host) => {
    $("tip").hidden = true;
    for (const old of host.querySelectorAll(".reader")) old.remove();
  };
  const showTip = (title, head, rows, px, py) => {
    const tip = $("tip");
    tip.replaceChildren(el("b", { dir: "auto" }, title));
    if (rows.length) {
      tip.append(el("table", {},
        el("thead", {}, el("tr", {}, ...head.map((text, i) => el("th", { class: i ? null : "text" }, text)))),
        el("tbody", {}, ...rows.map((row) => el("tr", {}, ...row.map((text, i) => el("td", { class: i ? null : "text" }, i ? text : el("bdi", {}, text))))))));
    }
    tip.hidden = false;
    const size = tip.getBoundingClientRect();
    tip.style.left = `${clamp(px + 16 + size.width > innerWidth ? px - size.width - 16 : px + 16, 6, Math.max(6, innerWidth - size.width - 6))}px`;
    tip.style.top = `${clamp(py + 16, 6, Math.max(6, innerHeight - size.height - 6))}px`;
  };
  /** The position on the screen of a point of a plot. */
  const onScreen = (host, x, y) => {
    const root = host.querySelector("svg"), edge = root.getBoundingClientRect(), zoom = edge.width / root.viewBox.baseVal.width;
    return [edge.left + x * zoom, edge.top + y * zoom];
  };

  // The plots -----------------------------------------------------------------------------------------------------------

  const shownRuns = () => P.runs.filter((run, i) => !state.hide.has(i));
  const ends = (low, high, log) => (log ? [low, high] : [Math.min(low, high - (high - low)), high]);
  /** As `vsim.history.curves.limits`: a loss that diverges is cut off. */
  const limits = (all, column) => {
    const known = all.map((own) => own.ys.filter(finite)).filter((own) => own.length);
    let low = Math.min(...known.map((own) => Math.min(...own))), high = Math.max(...known.map((own) => Math.max(...own)));
    if (column.endsWith("loss")) {
      const start = Math.max(...known.map((own) => own[0]));
      if (start > low && high > start + 0.5 * (start - low)) high = start + 0.1 * (start - low);
    }
    return [low, high];
  };
  const axisLabel = (axis) => {
    const each = P.clients ? "per client" : "per node";
    if (axis === "hours") return `time on the network (${unit[1]})`;
    return axis === "wire" ? `sent on the wire ${each} (MB)` : axis === "payload" ? `payload communicated ${each} (MB)` : AXES[axis].label;
  };

  const drawCurves = () => {
    const host = $("curves"), axis = AXES[state.x], many = P.runs.length > 12;
    if (axis.time && !isPriced()) return empty(host, unpriced());
    const all = shownRuns().map((run) => points(run, state.y, state.x)).filter((own) => own.ys.length);
    if (!all.length) return empty(host, "No run is shown: choose some below, or in the table.");
    const size = axis.time ? unit[0] : axis.unit || 1;
    const shown = all.map((own) => ({ ...own, xs: own.xs.map((x) => x / size) }));
    const last = shown.map((own) => own.xs[own.xs.length - 1]).filter((x) => x > 0);
    const wide = axis.bytes || (axis.time && Math.max(...last) > 10 * Math.min(...last));
    const logx = (state.logx === "" ? wide : state.logx === "1") && last.length > 0, logy = state.logy === "1";
    $("logx").checked = logx;
    const [low, high] = limits(shown, state.y);
    const positive = shown.flatMap((own) => own.xs.filter((x) => x > 0));
    const start = logx ? Math.min(...positive) : Math.min(0, ...shown.map((own) => own.xs[0])), end = Math.max(...last, logx ? 0 : 1e-12);
    const first = logy ? Math.max(low, high / 1e6, 1e-12) : low - 0.04 * (high - low);
    const label = P.columns[state.y];
    const summary = `${label} against ${axisLabel(state.x)}. ` + shown.slice(0, 12).map((own) => {
      const i = own.ys.length - 1;
      return `${isolated(own.run.name)}: ${digits(own.ys[0])} to ${digits(own.ys[i])} at ${digits(own.xs[i])}`;
    }).join("; ");
    const f = frame(host, { summary, xlabel: axisLabel(state.x), ylabel: label,
      x: (a, b) => scale(start, end, a, b, logx), y: (a, b) => scale(first, high + (logy ? 0 : 0.04 * (high - low)), a, b, logy) });
    const sit = (own) => own.xs.map((x, i) => [logx && x <= 0 ? null : f.x(x), f.y(logy ? Math.max(own.ys[i], first) : own.ys[i]), i]).filter(([x]) => x !== null);
    const path = (pairs) => pairs.map(([x, y], i) => `${i ? "L" : "M"}${x.toFixed(1)},${y.toFixed(1)}`).join("");
    shown.forEach((own, order) => {
      const look = own.run, colour = ink(look), spots = sit(own);
      if (!spots.length || (axis.bytes && !own.xs.some((x) => x > 0))) { // nothing is sent: its last loss
        const y = f.y(own.ys[own.ys.length - 1]);
        f.plot.append(svg("line", { x1: f.box.left, x2: f.box.right, y1: y, y2: y, stroke: colour, "stroke-width": 1.2, "stroke-dasharray": dashes(look) }));
        return;
      }
      if (!many && own.sds.some((sd) => sd > 0)) {
        const edge = (sign) => spots.map(([x, , i]) => [x, f.y(Math.max(own.ys[i] + sign * own.sds[i], logy ? first : -Infinity))]);
        f.plot.append(svg("path", { d: path([...edge(1), ...edge(-1).reverse()]) + "z", fill: colour, "fill-opacity": 0.17 }));
      }
      f.plot.append(svg("path", { d: path(spots), fill: "none", stroke: colour, "stroke-width": many ? 1.1 : 1.8,
                                  "stroke-opacity": many ? 0.75 : 1, "stroke-dasharray": dashes(look), "stroke-linejoin": "round" }));
      if (many || look.bare) return;
      const every = Math.max(1, Math.ceil(spots.length / 12));
      spots.forEach(([x, y], i) => { if (i % every === (2 * order) % every) f.plot.append(marker(look, x, y)); });
      if (look.diverged) f.plot.append(marker({ ...look, marker: "x" }, spots[spots.length - 1][0], f.box.top + 2, 4));
    });
    let cursor = null;
    const read = (px, screen) => {
      hideTip(host);
      const rows = shown.map((own) => {
        const spots = sit(own);
        if (!spots.length) return null;
        const [x, y, i] = spots.reduce((a, b) => (Math.abs(b[0] - px) < Math.abs(a[0] - px) ? b : a));
        return { own, x, y, i };
      }).filter(Boolean).sort((a, b) => a.own.ys[a.i] - b.own.ys[b.i]);
      if (!rows.length) return;
      const line = svg("line", { class: "axis reader", x1: px, x2: px, y1: f.box.top, y2: f.box.bottom, "stroke-dasharray": "3 3" });
      f.root.append(line);
      for (const { own, x, y } of rows.slice(0, 14)) {
        const spot = marker(own.run, x, y, 4.2);
        spot.classList.add("reader");
        f.root.append(spot);
      }
      const table = rows.slice(0, 14).map(({ own, i }) => {
        const seeds = sound(own.run), step = own.steps[i];
        const sd = own.sds[i] > 0 ? ` ± ${digits(own.sds[i], 2)}` : "";
        return [own.run.name, digits(own.ys[i], 4) + sd, String(step), scaled(mean(seeds.map((seed) => bytesAt(seed, step, "wire"))), BYTES),
                scaled(mean(seeds.map((seed) => bytesAt(seed, step, "payload"))), BYTES), took(mean(seeds.map((seed) => secondsAt(seed, step))))];
      });
      const title = `${axisLabel(state.x)}: ${digits(f.x.back(px))}`;
      showTip(rows.length > 14 ? `${title} (the lowest 14 of ${rows.length})` : title, ["", label, "step", "wire", "payload", "time"], table, ...screen);
    };
    readable(host, `${label}, plot; arrow keys read the values`, (px, py, sx, sy) => {
      if (px < f.box.left - 8 || px > f.box.right + 8) return hideTip(host);
      read(clamp(px, f.box.left, f.box.right), [sx, sy]);
    }, (way) => {
      const all = [...new Set(shown.flatMap((own) => sit(own).map(([x]) => Math.round(x))))].sort((a, b) => a - b);
      const found = cursor === null ? 0 : all.findIndex((x) => x >= cursor);
      const next = clamp(found + (cursor === null ? 0 : way === "Right" || way === "Up" ? 1 : -1), 0, all.length - 1);
      cursor = all[next];
      read(cursor, onScreen(host, cursor, f.box.top + 20));
    });
  };

  const grid = () => {
    const coarse = P.runs.length > 40, n = coarse ? [19, 13] : [61, 41];
    const [b, l] = P.network.equal ? [[6, 11], [-4, 0]] : [[-2, 3], [-2, 2]];
    const spaced = (low, high, count) => Array.from({ length: count }, (_, i) => 10 ** (low + ((high - low) * i) / (count - 1)));
    return { bits: spaced(...b, n[0]), delays: spaced(...l, n[1]) };
  };
  const EQUAL = 1 + 1e-9;
  /** As `vsim.analysis.questions.winners.Winners`: the first strategy on a network, and the strategies tied with it. */
  let raced = { key: "" }; // the last map, on which the network's sliders move only the mark
  const racers = () => {
    const found = [], missing = [], spots = [], known = new Map(); // where clocks are read: runs share them
    const spot = (ledger, step) => {
      const name = `${ledger},${step}`;
      if (!known.has(name)) known.set(name, spots.push([P.ledgers[ledger], between(P.ledgers[ledger].steps, step)]) - 1);
      return known.get(name);
    };
    P.runs.forEach((run, i) => {
      const at = crossings(run), said = never(at);
      const timed = run.seeds.every((seed) => P.ledgers[seed.ledger].planes[0][0] !== null);
      if (said || !timed) missing.push([isolated(run.name), said || "no hours"]);
      if (state.hide.has(i) || !timed || !at.some(Boolean)) return;
      /** The first step that might have reached the target, but for noise; null if it is not before the measured step. */
      const might = (seed, own) => {
        if (!own) return seed.failed ? null : lastStep(seed);
        const early = at.length === 1 && finite(seed.se) ? crossing(seed, state.target + 1.96 * seed.se).step : own.step;
        return early < own.step ? early : null;
      };
      found.push({ run, i, whole: !said, seeds: begun(run).map((seed, s) => {
        const own = at[s], least = might(seed, own);
        return { seed: seed.seed, first: own && own.first < own.step ? spot(seed.ledger, own.first) : null, least: least === null ? null : spot(seed.ledger, least),
          results: own ? own.results.map((k) => [spot(seed.ledger, stepOf(seed, k)), forming(seed, k)]) : [] };
      }) });
    });
    const whole = found.filter((one) => one.whole);
    if (!whole.length) return { found: [], missing, spots };
    const shared = (one) => one.seeds.filter((own) => whole.every((other) => other.seeds.some((their) => their.seed === own.seed)));
    for (const one of found) one.decide = (one.whole && shared(one).length ? shared(one) : one.seeds).map((own) => one.seeds.indexOf(own));
    found.sort((a, b) => (a.run.name < b.run.name ? -1 : 1));
    return { found, missing, spots };
  };
  const race = (found, spots, at) => {
    const common = [at.sec, at.lat, at.size / at.bw];
    const clock = spots.map(([ledger, spot]) => timeAt(ledger, spot, ledger.decided ? factors(ledger, at) : common));
    const reach = (own) => Math.min(...own.results.map(([spot, more]) => clock[spot] + formingTime(more, at))); // ∞ if none
    const reached = found.map((one) => one.seeds.map(reach));
    const over = (k, value) => mean(found[k].decide.map((s) => value(found[k].seeds[s], reached[k][s])));
    const means = found.map((_, k) => over(k, (_own, time) => time)), best = means.indexOf(Math.min(...means)), tied = [];
    const firsts = found.map((_, k) => k).filter((k) => means[k] <= means[best] * EQUAL); // the first, and its equals
    const isTied = (k, first) => {
      const earliest = (what) => over(k, (own, time) => (own[what] === null ? time : clock[own[what]]));
      if (k === first || Math.min(earliest("first"), earliest("least")) <= means[first] * EQUAL) return true;
      const pairs = [];
      found[first].seeds.forEach((own, s) => {
        const j = found[k].seeds.findIndex((other) => other.seed === own.seed);
        if (j >= 0) pairs.push(reached[k][j] - reached[first][s]);
      });
      const quantile = (P.quantiles[pairs.length] || [])[found.length - 2];
      return quantile && pairs.every(finite) && mean(pairs) <= (quantile * deviation(pairs)) / Math.sqrt(pairs.length);
    };
    found.forEach((_, k) => firsts.some((first) => isTied(k, first)) && tied.push(k));
    return { tied, means, best, key: tied.join() };
  };

  const drawMap = () => {
    const host = $("map"), { found, missing, spots } = racers(), { bits, delays } = grid();
    const named = (what, own) => (own.length ? [`${what} ${own.slice(0, 6).join(", ")}${own.length > 6 ? ` and ${own.length - 6} others` : ""}`] : []);
    const lost = (why) => missing.filter(([, said]) => said === why).map(([name]) => name);
    const partly = missing.filter(([, said]) => said !== "never" && said !== "no hours").map(([name, said]) => `${said} of ${name}`);
    const left = [...named("not reached by", lost("never")), ...named("reached by only", partly), ...named("without events, and so without times:", lost("no hours"))];
    $("never").textContent = [...left, ...P.doubts].map((text) => `${text[0].toUpperCase()}${text.slice(1)}.`).join(" ");
    $("map-title").textContent = `First to reach a ${P.columns[P.loss]} of ${digits(state.target, 4)}`;
    if (!found.length) return empty(host, `No shown run reaches ${digits(state.target, 4)} with all seeds.`);
    if (!isGiven("compute")) return empty(host, unpriced());
    const inputs = [pages.indexOf(P), state.sec, state.size, state.target, ...state.hide].join();
    if (raced.key !== inputs) raced = { key: inputs, cells: delays.map((lat) => bits.map((bw) => race(found, spots, { ...place(), bw, lat }))) };
    const { cells } = raced;
    const equal = P.network.equal;
    const half = [Math.sqrt(bits[1] / bits[0]), Math.sqrt(delays[1] / delays[0])];
    const key = (one) => (one.tied.length > 2 ? "" : one.key); // "": no clear winner
    const counts = new Map();
    cells.flat().forEach((one) => counts.set(key(one), (counts.get(key(one)) || 0) + 1));
    const order = [...counts.keys()].sort((a, b) => counts.get(b) - counts.get(a));
    const text = (own) => (own ? own.split(",").map((k) => brief(found[k].run.name)).join(" or ") : "no clear winner");
    const whole = (own) => (own ? text(own) : "no clear winner: three or more are tied, as the map says at each point");
    const summary = `Which run is first to the target, over bandwidth and latency: ${order.slice(0, 8).map((own) => `${whole(own)} on ${Math.round((100 * counts.get(own)) / cells.flat().length)} % of the map`).join("; ")}`;
    const f = frame(host, { summary, height: clamp(widths.get(host) * 0.66, 240, 380), left: 62,
      xlabel: equal ? "bandwidth" : "bandwidth, times the given", ylabel: equal ? "latency" : "latency, times the given",
      xtext: equal ? (v) => scaled(v, RATES).replace("bit/s", "").replace(" ", "") : tick, ytext: equal ? (v) => delay(v) : tick, xticks: Math.max(3, Math.floor(widths.get(host) / 75)),
      x: (a, b) => scale(bits[0] / half[0], bits[bits.length - 1] * half[0], a, b, true), y: (a, b) => scale(delays[0] / half[1], delays[delays.length - 1] * half[1], a, b, true) });
    const fills = new Map();
    const fill = (own) => {
      if (!fills.has(own)) fills.set(own, paint(own));
      return fills.get(own);
    };
    /** The number of runs before one that have its colour: its area is paler. */
    const sharing = (k) => found.slice(0, k).filter((other) => ink(other.run) === ink(found[k].run)).length;
    const paint = (own) => {
      if (!own) return dark.matches ? "#3a3f46" : "#d9d9d9";
      const colours = own.split(",").map((k) => blend(ink(found[k].run), panel(), (dark.matches ? 0.45 : 0.5) + 0.2 * Math.min(2, sharing(Number(k)))));
      if (colours.length === 1) return colours[0];
      const id = `tie-${fills.size}`, wide = 6 * colours.length;
      f.root.querySelector("defs").append(svg("pattern", { id, width: wide, height: wide, patternUnits: "userSpaceOnUse", patternTransform: "rotate(45)" },
        ...colours.map((colour, i) => svg("rect", { x: 6 * i, y: 0, width: 6, height: wide, fill: colour }))));
      return `url(#${id})`;
    };
    const tall = f.y(delays[0]) - f.y(delays[1]), broad = f.x(bits[1]) - f.x(bits[0]);
    const widest = new Map(); // key → the run of cells with the most room for a name
    cells.forEach((row, j) => {
      for (let i = 0, k; i < row.length; i = k) {
        for (k = i; k < row.length && key(row[k]) === key(row[i]); k += 1);
        const own = key(row[i]);
        f.plot.append(svg("rect", { x: (f.x(bits[i]) - broad / 2).toFixed(2), y: (f.y(delays[j]) - tall / 2).toFixed(2), width: ((k - i) * broad + 0.4).toFixed(2), height: (tall + 0.4).toFixed(2), fill: fill(own) }));
        let room = 0; // rows above and below that also contain the middle
        const middle = (i + k - 1) >> 1;
        while (cells[j - room - 1] && cells[j + room + 1] && key(cells[j - room - 1][middle]) === own && key(cells[j + room + 1][middle]) === own) room += 1;
        const width = (k - i) * broad, worth = Math.min(width, 8 * tall * (room + 0.5)) + 0.1 * room;
        if (!widest.has(own) || worth > widest.get(own).worth) widest.set(own, { worth, width, x: f.x(bits[i]) - broad / 2 + width / 2, y: f.y(delays[j]), room });
      }
    });
    const beside = [];
    for (const own of order) {
      const { width, x, y, room } = widest.get(own), said = text(own);
      if (said.length * 6.4 < width && (room + 0.5) * 2 * tall > 12) f.plot.append(svg("text", { class: "halo", x, y: y + 4, "text-anchor": "middle" }, said));
      else beside.push(own);
    }
    const at = [clamp(state.bw, bits[0], bits[bits.length - 1]), clamp(state.lat, delays[0], delays[delays.length - 1])].map((v, i) => (i ? f.y(v) : f.x(v)));
    if (isGiven("network")) f.plot.append(svg("circle", { cx: at[0], cy: at[1], r: 7, fill: "none", stroke: panel(), "stroke-width": 4 }),
      svg("circle", { cx: at[0], cy: at[1], r: 7, fill: "none", stroke: dark.matches ? "#ffffff" : "#000000", "stroke-width": 1.8 }));
    host.append(...order.filter((own) => beside.includes(own) || !own).slice(0, 8).map((own) => el("p", { class: "remark key" },
      svg("svg", { viewBox: "0 0 26 12", "aria-hidden": "true" }, svg("rect", { width: 26, height: 12, fill: fill(own) })), el("span", {}, whole(own)))));
    const nearest = (values, v) => values.reduce((a, b, i) => (Math.abs(Math.log(b / v)) < Math.abs(Math.log(values[a] / v)) ? i : a), 0);
    const where = (bw, lat) => (equal ? `${scaled(bw, RATES)}, ${delay(lat)}` : `bandwidth × ${digits(bw)}, latency × ${digits(lat)}`);
    const show = (i, j, screen) => {
      const one = cells[j][i];
      const rows = found.map((own, k) => [own.run.name, took(one.means[k]), one.tied.includes(k) ? (one.tied.length > 1 ? "tied" : "first") : `${digits(one.means[k] / one.means[one.best])}×`])
        .map((row, k) => [row, one.means[k]]).sort((a, b) => a[1] - b[1]).slice(0, 10).map(([row]) => row);
      showTip(where(bits[i], delays[j]), ["", "time to target", ""], rows, ...screen);
    };
    const inside = (px, py) => px >= f.box.left && px <= f.box.right && py >= f.box.top && py <= f.box.bottom;
    readable(host, "map of the first run to the target; arrow keys move the network", (px, py, sx, sy) => {
      if (!inside(px, py)) return hideTip(host);
      show(nearest(bits, f.x.back(px)), nearest(delays, f.y.back(py)), [sx, sy]);
    }, (way) => {
      let i = nearest(bits, state.bw), j = nearest(delays, Math.max(state.lat, 1e-9));
      i = clamp(i + (way === "Right") - (way === "Left"), 0, bits.length - 1);
      j = clamp(j + (way === "Up") - (way === "Down"), 0, delays.length - 1);
      set({ bw: Number(bits[i].toPrecision(4)), lat: Number(delays[j].toPrecision(4)), on: "1" });
      render();
      show(i, j, onScreen(host, f.x(bits[i]), f.y(delays[j])));
    });
    host.onclick = (event) => {
      const edge = f.root.getBoundingClientRect(), zoom = f.width / edge.width;
      const [px, py] = [(event.clientX - edge.left) * zoom, (event.clientY - edge.top) * zoom];
      if (inside(px, py)) { set({ bw: Number(f.x.back(px).toPrecision(3)), lat: Number(f.y.back(py).toPrecision(3)), on: "1" }); render(); }
    };
  };

  const COSTS = {
    wire: ["bytes on the wire", () => `sent on the wire ${P.clients ? "per client" : "per node"} (MB)`],
    hours: ["time", () => `time on the network (${unit[1]})`],
    dollars: ["dollars", () => "dollars, of all nodes"],
  };
  /** As `vsim.analysis.questions.pareto.within`: the range of losses to show; higher losses are outside it, and bars are cut. */
  const within = (all) => {
    const losses = all.map((one) => one.loss).sort((a, b) => a - b), share = (p) => mixed(losses, between(losses.map((_, i) => i), p * (losses.length - 1)));
    const most = share(0.75) + 3 * Math.max(share(0.75) - share(0.25), 0.05 * Math.abs(share(0.5)));
    const kept = all.filter((one) => one.loss <= most), low = losses[0], high = Math.max(...kept.map((one) => one.loss)), span = high - low || Infinity;
    const ends = kept.flatMap((one) => one.ends || []);
    return [Math.max(Math.min(low, ...ends), low - span), Math.min(Math.max(high, ...ends), high + span)];
  };
  const drawFront = (rows) => {
    const host = $("front"), key = state.cost;
    if (key !== "wire" && !isPriced()) return empty(host, unpriced());
    const all = P.runs.map((run, i) => ({ run, i, cost: rows[i].result[key] * (key === "hours" ? 3600 / unit[0] : 1), loss: mean(compared(run).map((seed) => (finite(seed.loss) ? seed.loss : NaN))), ends: run.interval }))
      .filter((one) => !state.hide.has(one.i) && finite(one.loss) && finite(one.cost));
    if (!all.length) return empty(host, "No shown run has a loss.");
    const sorted = [...all].sort((a, b) => a.cost - b.cost || a.loss - b.loss);
    let last = { loss: Infinity };
    const front = sorted.filter((one) => one.run.ranked && (one.loss < last.loss ? (last = one) : one.loss === last.loss && one.cost === last.cost));
    /** As `vsim.analysis.questions.pareto.Front`: dominated only by runs whose losses do not differ significantly. */
    const tied = (one) => one.run.ranked && sorted.every((other) => !other.run.ranked || other.cost > one.cost || other.loss > one.loss ||
      (other.cost === one.cost && other.loss === one.loss) || one.run.ties.includes(other.i));
    const costs = all.map((one) => one.cost).filter((v) => v > 0), free = all.some((one) => !(one.cost > 0));
    const log = costs.length > 0 && Math.max(...costs) > 8 * Math.min(...costs);
    const [low, high] = within(all), pad = 0.1 * (high - low) || 0.05, isHigh = (one) => one.loss > high;
    const label = COSTS[key][1]();
    const summary = `${P.lossTitle} against ${label}. On the front: ${front.map((one) => `${one.run.name} ${digits(one.loss, 4)} for ${digits(one.cost)}`).join("; ")}`;
    let slot = 0;
    const f = frame(host, { summary, height: clamp(widths.get(host) * 0.66, 240, 380), xlabel: label, ylabel: P.lossTitle, right: 20,
      x: (a, b) => {
        if (!log) return scale(0, Math.max(...costs, 1e-12) * 1.08, a, b, false);
        slot = free ? 34 : 0;
        return scale(Math.min(...costs) / 1.4, Math.max(...costs) * 1.4, a + slot, b, true);
      }, y: (a, b) => scale(low - pad, high + pad, a, b, false) });
    if (slot) f.root.append(svg("text", { class: "soft", x: f.box.left + 10, y: f.box.bottom + 16, "text-anchor": "middle" }, "0"));
    const sit = (one) => [one.cost > 0 || !log ? f.x(one.cost) : f.box.left + 10, isHigh(one) ? f.box.top + 7 : f.y(one.loss)];
    const path = front.map((one, i) => { const [x, y] = sit(one); return i ? `H${x.toFixed(1)}V${y.toFixed(1)}` : `M${x.toFixed(1)},${f.box.top}V${y.toFixed(1)}`; }).join("") + `H${f.box.right}`;
    f.plot.append(svg("path", { d: path, fill: "none", stroke: dark.matches ? "#a4abb5" : "#5a6069", "stroke-width": 1.3, "stroke-dasharray": "4 3" }));
    const taken = [];
    const overlaps = (a) => taken.some((b) => a[0] < b[2] && b[0] < a[2] && a[1] < b[3] && b[1] < a[3]) || a[0] < f.box.left || a[2] > f.box.right + 14 || a[1] < f.box.top - 8 || a[3] > f.box.bottom;
    for (const one of all) { const [x, y] = sit(one); taken.push([x - 5, y - 5, x + 5, y + 5]); }
    for (const one of sorted) {
      const [x, y] = sit(one), faint = front.includes(one) ? 1 : tied(one) ? 0.75 : 0.45, colour = ink(one.run);
      const group = svg("g", { opacity: faint });
      if (one.ends && !isHigh(one)) group.append(svg("line", { x1: x, x2: x, y1: f.y(one.ends[0]), y2: f.y(one.ends[1]), stroke: colour, "stroke-width": 1.6 }));
      const dot = marker(isHigh(one) ? { ...one.run, marker: "^" } : one.run, x, y, P.runs.length > 40 ? 3 : 4.6);
      dot.setAttribute("fill", colour);
      group.append(dot);
      f.plot.append(group);
      if (P.runs.length > 20 && faint < 1 && !isHigh(one)) continue;
      const said = brief(one.run.name) + (isHigh(one) ? ` ${digits(one.loss)} ↑` : ""), wide = said.length * 6.3;
      const ways = [[x + 9, y + 4, "start"], [x - 9, y + 4, "end"], [x, y - 10, "middle"], [x, y + 18, "middle"], [x + 8, y - 9, "start"], [x - 8, y - 9, "end"], [x + 8, y + 17, "start"], [x - 8, y + 17, "end"]];
      const spot = ways.find(([tx, ty, anchor]) => {
        const left = anchor === "start" ? tx : anchor === "end" ? tx - wide : tx - wide / 2, own = [left, ty - 10, left + wide, ty + 3];
        if (overlaps(own)) return false;
        taken.push(own);
        return true;
      });
      if (spot) f.root.append(svg("text", { class: `halo ${faint < 1 ? "soft" : ""}`, x: spot[0], y: spot[1], "text-anchor": spot[2] }, said));
    }
    const dearest = Math.max(...costs, 0), cheap = sorted.filter((one) => one.cost > 0 && one.cost < 0.95 * dearest);
    const more = (one) => `${brief(one.run.name)} trains about ${digits((mean(sound(one.run).map(lastStep)) * dearest) / one.cost)} steps`;
    if (cheap.length) {
      const others = cheap.length > 6 ? ` and ${cheap.length - 6} others` : "";
      host.append(el("p", { class: "remark" }, `Points mark the end of each run. At equal cost, ${cheap.slice(0, 6).map(more).join(", ")}${others}.`));
    }
    let cursor = -1;
    const show = (one, screen) => {
      const i = P.runs.indexOf(one.run), own = rows[i];
      showTip(one.run.name, ["", ""], [[P.lossTitle, single(P.lossTitle, one.loss)[1] + (one.ends ? `, ${one.ends.map((v) => digits(v, 4)).join(" to ")}` : "")], single("wire MB", ...own.wire), ["time", `${cell(...own.hours, pageTime(P.headings.hours, own.hours))} ${unit[1]}`],
        ...(state.price ? [single("dollars", ...own.dollars)] : []), ["", front.includes(one) ? "on the front" : tied(one) ? "dominated, but tied" : one.run.ranked ? "dominated" : "a run has no result"]], ...screen);
    };
    readable(host, "loss for its cost, plot; arrow keys go from run to run", (px, py, sx, sy) => {
      const near = all.reduce((a, b) => (Math.hypot(sit(b)[0] - px, sit(b)[1] - py) < Math.hypot(sit(a)[0] - px, sit(a)[1] - py) ? b : a));
      if (Math.hypot(sit(near)[0] - px, sit(near)[1] - py) > 24) return hideTip(host);
      show(near, [sx, sy]);
    }, (way) => {
      cursor = clamp(cursor + (way === "Right" || way === "Down" ? 1 : -1), 0, sorted.length - 1);
      show(sorted[cursor], onScreen(host, ...sit(sorted[cursor])));
    });
  };

  const drawNodes = () => {
    const able = P.runs.map((run, i) => [run, i]).filter(([run]) => run.nodes || run.timeline);
    if (!able.length) return;
    const [run] = able.find(([, i]) => i === state.run) || able[0], own = run.nodes, line = run.timeline;
    $("run").value = String(P.runs.indexOf(run));
    $("nodes-remark").textContent = own ? `Training losses of ${own.shown.length < own.of ? `${own.shown.length} of ${own.of}` : "all"} nodes${run.seeds.length > 1 ? `, seed ${run.seeds[0].seed}` : ""}.` : "";
    if (own) {
      const values = own.losses.flat().filter(finite), colour = ink(run);
      const f = frame($("nodes"), { summary: `Training losses of the nodes of ${run.name}, from ${digits(Math.max(...values))} to ${digits(Math.min(...values))}`, height: 240, xlabel: "step", ylabel: "training loss",
        x: (a, b) => scale(0, own.steps[own.steps.length - 1], a, b, false), y: (a, b) => scale(Math.min(...values), Math.max(...values), a, b, false) });
      own.losses.forEach((losses, k) => {
        let pen = "M", d = "";
        losses.forEach((loss, i) => { if (loss === null) pen = "M"; else { d += `${pen}${f.x(own.steps[i]).toFixed(1)},${f.y(loss).toFixed(1)}`; pen = "L"; } });
        f.plot.append(svg("path", { d, fill: "none", stroke: blend(colour, panel(), 0.6 * (k / own.losses.length)), "stroke-width": 1.2 }, svg("title", {}, `node ${own.shown[k]}`)));
      });
    } else empty($("nodes"), "");
    $("timeline-remark").textContent = line ? `Steps ${line.steps[0]} to ${line.steps[1]} on ${P.network.text}, where the page was made.` : "";
    if (line) {
      const bars = line.bars, end = Math.max(...bars.map((bar) => bar[3])), start = Math.min(...bars.filter((bar) => bar[0] === "compute").map((bar) => bar[2]), end);
      const f = frame($("timeline"), { summary: `What ${line.nodes} nodes of ${run.name} do in these steps: ${["compute", "send", "wait", "late", "absent"].filter((what) => bars.some((bar) => bar[0] === what)).map((what) => `${what} ${took(bars.filter((bar) => bar[0] === what).reduce((sum, bar) => sum + bar[3] - bar[2], 0))}`).join(", ")}`,
        height: 62 + 46 * line.nodes, left: 62, xlabel: start > 0 ? "seconds from the start of the run" : "seconds on the network", ylabel: "", x: (a, b) => scale(start, end, a, b, false),
        y: (a, b) => Object.assign((row) => b + 24 + row * 46, { ticks: () => [] }) });
      const NAMES = { compute: "computes", wait: "waits", late: "late: work dropped", absent: "absent", send: "sends" };
      const paint = { compute: dark.matches ? "#70757d" : "#9a9ea5", wait: dark.matches ? "#6b4a2c" : "#f6d2b8", late: dark.matches ? "#3f4a5c" : "#c9d6e8", absent: panel(), send: ink(run) };
      for (const [what, node, from, to, step, label] of bars) {
        if (to <= start) continue;
        const [top, tall] = what === "send" ? [2, 12] : [-18, 16], x = f.x(Math.max(from, start));
        f.plot.append(svg("rect", { x, y: f.y(node) + top, width: Math.max(0.6, f.x(to) - x - 0.6), height: tall, fill: paint[what], stroke: what === "absent" ? "#888888" : "none" }, svg("title", {}, `step ${step}: ${what}${label ? ` ${label}` : ""}, ${took(to - from)}`)));
      }
      for (let node = 0; node < line.nodes; node += 1) f.root.append(svg("text", { class: "soft", x: f.box.left - 7, y: f.y(node), "text-anchor": "end" }, `node ${node}`));
      $("timeline").append(el("p", { class: "remark" }, ...Object.entries(NAMES).filter(([what]) => !["late", "absent"].includes(what) || bars.some((bar) => bar[0] === what)).flatMap(([what, text]) => {
        const box = svg("svg", { viewBox: "0 0 10 10", "aria-hidden": "true" }, svg("rect", { width: 10, height: 10, fill: paint[what], stroke: what === "absent" ? "#888888" : "none" }));
        Object.assign(box.style, { display: "inline-block", width: "10px", height: "10px", margin: "0 5px 0 0" });
        return [el("span", {}, box, `${text}\u2003`)];
      })));
    } else empty($("timeline"), "");
  };

  const metric = (run, row) => {
    if (state.shade === "loss") return run.row[P.lossTitle];
    const own = row[state.shade];
    return Array.isArray(own) ? own[0] * (P.headings[state.shade].isHours ? 3600 / unit[0] : 1) : NaN;
  };
  /** What a map of settings shows: its name in the list, and beside the map. */
  const SHADES = {
    loss: ["loss", () => P.lossTitle],
    hours: ["time", () => unit[1]],
    "hours to target": ["time to target", () => `${unit[1]} to target`],
    "wire MB to target": ["wire MB to target", () => "wire MB to target"],
  };
  const drawSweep = (rows) => {
    if (!P.varied.length) return;
    if (state.shade !== "loss" && P.headings[state.shade].isPriced && !isPriced()) {
      for (const host of [$("heat"), $("parallel")]) empty(host, unpriced());
      return;
    }
    const values = P.runs.map((run, i) => metric(run, rows[i])), known = values.filter(finite);
    const low = Math.min(...known), high = Math.max(...known);
    const colour = (v) => shade(high > low ? 1 - (v - low) / (high - low) : 0.5);
    const name = SHADES[state.shade][1]();
    drawHeat(rows, values, colour, name);
    drawParallel(rows, values, colour, name);
  };
  const drawHeat = (rows, values, colour, name) => {
    const host = $("heat"), across = state.heatx, down = state.heaty;
    if (P.varied.length < 2 || across === down) return empty(host, "A map is over two settings that vary.");
    const xs = P.values[across], ys = P.values[down], best = new Map();
    P.runs.forEach((run, i) => {
      const key = `${xs.indexOf(run.labels[across])},${ys.indexOf(run.labels[down])}`, old = best.get(key);
      const better = old === undefined || (finite(values[i]) && !(values[old] <= values[i]));
      if (better) best.set(key, i);
    });
    const width = Math.max(260, widths.get(host)), left = Math.min(130, 24 + 7 * Math.max(...ys.map((v) => v.length))), tall = clamp(300 / ys.length, 22, 54), height = 20 + tall * ys.length + 46, broad = (width - left - 8) / xs.length;
    const root = svg("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": `${name} over ${across} and ${down}, from ${digits(Math.min(...values.filter(finite)))} to ${digits(Math.max(...values.filter(finite)))}` });
    for (const [key, i] of best) {
      const [cx, cy] = key.split(",").map(Number), v = values[i], fill = finite(v) ? colour(v) : panel();
      const x = left + cx * broad, y = 20 + cy * tall;
      root.append(svg("rect", { x: x + 1, y: y + 1, width: broad - 2, height: tall - 2, fill, stroke: finite(v) ? "none" : "#888888", "stroke-dasharray": "3 3" }, svg("title", {}, `${P.runs[i].name}: ${finite(v) ? digits(v, 4) : P.runs[i].note || "never"}`)));
      const said = finite(v) ? digits(v, 3) : P.runs[i].note ? "failed" : "never";
      if (broad > 7 * said.length) {
        const label = svg("text", { x: x + broad / 2, y: y + tall / 2 + 4, "text-anchor": "middle" }, said);
        if (finite(v)) label.style.fill = luminance(fill) > 0.3 ? "#000000" : "#ffffff";
        root.append(label);
      }
    }
    xs.forEach((v, i) => root.append(svg("text", { class: "soft", x: left + (i + 0.5) * broad, y: height - 28, "text-anchor": "middle" }, v)));
    ys.forEach((v, i) => root.append(svg("text", { class: "soft", x: left - 6, y: 24 + (i + 0.5) * tall, "text-anchor": "end" }, v)));
    root.append(svg("text", { class: "title", x: left + (width - left) / 2, y: height - 8, "text-anchor": "middle" }, across), svg("text", { class: "title", x: 0, y: 12 }, `${down} ↓   ${name}${P.varied.length > 2 ? ", best of the others" : ""}`));
    host.replaceChildren(root);
  };
  const drawParallel = (rows, values, colour, name) => {
    const host = $("parallel"), width = Math.max(260, widths.get(host)), height = 330, top = 44, bottom = height - 18;
    const numeric = (title, own) => {
      const known = own.filter(finite), to = scale(Math.min(...known), Math.max(...known), bottom, top, false);
      return { title, y: (i) => (finite(own[i]) ? to(own[i]) : null), marks: to.ticks(5).map((v) => [tick(v), to(v)]) };
    };
    const axes = [...P.varied.map((key) => {
      const own = P.values[key], step = (bottom - top) / Math.max(1, own.length - 1);
      return { title: key, y: (i) => (own.length > 1 ? bottom - own.indexOf(P.runs[i].labels[key]) * step : (top + bottom) / 2), marks: own.map((text, j) => [text, own.length > 1 ? bottom - j * step : (top + bottom) / 2]) };
    }), ...(isPriced() ? [numeric(unit[1], rows.map((row) => (row.hours[0] * 3600) / unit[0]))] : []), numeric(P.lossTitle, P.runs.map((run) => run.row[P.lossTitle]))];
    const at = (k) => 12 + (k * (width - 62)) / (axes.length - 1), room = at(1) - at(0);
    const root = svg("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": `Settings of each run, its time and its loss, as lines across ${axes.map((axis) => axis.title).join(", ")}` });
    P.runs.forEach((run, i) => {
      if (state.hide.has(i)) return;
      const spots = axes.map((axis, k) => [at(k), axis.y(i)]).filter(([, y]) => y !== null);
      const d = spots.map(([x, y], k) => (k ? `L${x.toFixed(1)},${y.toFixed(1)}` : `M${x.toFixed(1)},${y.toFixed(1)}`)).join("");
      root.append(svg("path", { d, fill: "none", stroke: finite(values[i]) ? colour(values[i]) : "#888888", "stroke-width": P.runs.length > 40 ? 1.1 : 1.8, "stroke-opacity": 0.8 }, svg("title", {}, `${run.name}: ${name} ${digits(values[i], 4)}`)));
    });
    axes.forEach((axis, k) => {
      const anchor = k === 0 ? "start" : k + 1 === axes.length ? "end" : "middle";
      root.append(svg("line", { class: "axis", x1: at(k), x2: at(k), y1: top, y2: bottom }));
      root.append(svg("text", { class: "title", x: k === 0 ? 2 : k + 1 === axes.length ? width - 2 : at(k), y: k % 2 && room < 100 ? 32 : 14, "text-anchor": anchor }, axis.title));
      const every = Math.ceil(axis.marks.length / 14), most = Math.max(4, Math.floor((room - 12) / 6.5));
      axis.marks.forEach(([text, y], j) => {
        if (j % every) return;
        root.append(svg("line", { class: "axis", x1: at(k), x2: at(k) + 4, y1: y, y2: y }),
          svg("text", { class: "halo", x: at(k) + 7, y: y + 4 }, text.length > most ? `${text.slice(0, most - 1)}…` : text, svg("title", {}, text)));
      });
    });
    host.replaceChildren(root);
  };

  // The table ------------------------------------------------------------------------------------------------------------

  const isLive = (key) => P.live.includes(key);
  const columnsShown = () => {
    const more = state.all === "1" ? P.more : [], own = (key) => P.headings[key];
    const live = P.live.filter((key) => (isPriced() || !own(key).isPriced) && (state.price || key !== "dollars"));
    const byLoss = [...live.filter((key) => !own(key).isToLoss), ...live.filter((key) => own(key).isToLoss)];
    return [...P.table.slice(0, -1), ...more, ...P.table.slice(-1), ...byLoss];
  };
  const valueOf = (run, row, key) => {
    if (isLive(key)) return Array.isArray(row[key]) ? row[key] : [row[key], 0];
    if (P.titles.includes(key)) return [run.labels[key], 0];
    if (key === P.lossTitle && run.diverged) return [run.diverged, 0];
    const size = P.headings[key].scales ? state.size : 1, value = run.row[key];
    return [finite(value) ? value * size : value, finite(run.row[`${key} std`]) ? run.row[`${key} std`] * size : 0];
  };
  let table = { form: "" }; // the table built last: if the form is the same, only its cells change
  const drawTable = (rows) => {
    const columns = columnsShown(), down = state.sort.startsWith("-"), by = state.sort.replace(/^-/, "");
    const order = P.runs.map((_, i) => i);
    if (by) {
      const own = (i) => valueOf(P.runs[i], rows[i], by)[0];
      order.sort((i, j) => {
        const [a, b] = [own(i), own(j)], known = [finite(a), finite(b)];
        if (known[0] && known[1]) return down ? b - a : a - b;
        if (known[0] !== known[1]) return known[0] ? -1 : 1;
        return String(a ?? "").localeCompare(String(b ?? ""), undefined, { numeric: true }) * (down ? -1 : 1);
      });
    }
    const units = Object.fromEntries(columns.map((key) => {
      const own = P.headings[key], alike = columns.filter((other) => P.headings[other].unitOf === own.unitOf);
      return [key, (own.isHours ? pageTime : unitOf)(own, alike.flatMap((other) => P.runs.map((run, i) => valueOf(run, rows[i], other)[0])))];
    }));
    const said = (i, key) => {
      const [value, sd] = valueOf(P.runs[i], rows[i], key);
      return [cell(value, sd, units[key]) + (key === P.lossTitle && P.runs[i].mark === "tied" ? "\u00a0†" : ""), finite(value) ? value : null];
    };
    const heading = (key) => (key in units ? units[key][0] : key).replace("{loss}", () => digits(state.target, 4));
    const arrow = (key) => (by === key ? (down ? " ▼" : " ▲") : "");
    const form = [pages.indexOf(P), dark.matches, columns, [...state.hide], state.sort].join("|");
    if (form === table.form) {
      for (const { i, key, node } of table.cells) {
        const [text, value] = said(i, key);
        if (node.textContent !== text) (node.firstElementChild || node).textContent = text;
        if (value === null) node.removeAttribute("data-value");
        else node.setAttribute("data-value", value);
      }
      for (const { key, node } of table.heads) node.textContent = heading(key) + arrow(key);
      if (order.join() !== table.order.join()) table.body.append(...order.map((i) => table.rows[i])); // moves the rows
      table.order = order;
      return;
    }
    table = { form, order, cells: [], heads: [], rows: [], body: el("tbody") };
    const notes = P.runs.some((run) => run.note) || P.ledgers.some((ledger) => ledger.fixed || ledger.decided);
    const head = (key, text) => {
      const node = el("button", { type: "button", "data-key": key, onclick: () => { set({ sort: by === key && !down ? `-${key}` : by === key ? "" : key }); render(); focusOn(key); } }, heading(key) + arrow(key));
      table.heads.push({ key, node });
      return el("th", { scope: "col", class: [text ? "text" : "", isLive(key) ? "live" : ""].join(" ").trim() || null, "aria-sort": by === key ? (down ? "descending" : "ascending") : null }, node);
    };
    const remark = (run) => {
      const own = new Set(run.seeds.map((seed) => P.ledgers[seed.ledger]).map((ledger) => ledger.fixed || (ledger.decided === "both" ? "asynchronous: times as recorded" : ledger.decided ? `stragglers were decided by ${digits(ledger.seconds)} s a step` : "")));
      return [run.note, ...own].filter(Boolean).join("; ");
    };
    table.body.append(...order.map((i) => {
      const run = P.runs[i], off = state.hide.has(i);
      const box = el("input", { type: "checkbox", "aria-label": `show ${run.name}`, onchange: () => toggle(i) });
      box.checked = !off;
      const first = el("td", { class: "text" }, el("label", {}, box, sample(run), el("bdi", { class: "name", title: run.name }, P.titles.length > 1 ? "" : run.labels[P.titles[0]])));
      const titles = P.titles.length > 1 ? P.titles.map((key) => el("td", { class: "text" }, el("bdi", {}, run.labels[key]))) : [];
      const cells = columns.map((key) => {
        const [text, value] = said(i, key), best = key === P.lossTitle && run.mark === "best";
        const node = el("td", { class: isLive(key) ? "live" : null, "data-key": key, "data-value": value }, best ? el("strong", {}, text) : text);
        table.cells.push({ i, key, node });
        return node;
      });
      return (table.rows[i] = el("tr", { class: off ? "off" : null, "data-run": i }, first, ...titles, ...cells, notes ? el("td", { class: "text" }, remark(run)) : null));
    }));
    const headings = P.titles.length > 1 ? [el("th", { class: "text" }, el("span", {}, "show")), ...P.titles.map((key) => head(key, true))] : [head(P.titles[0], true)];
    $("table").replaceChildren(el("thead", {}, el("tr", {}, ...headings, ...columns.map((key) => head(key, false)), notes ? el("th", { class: "text" }, "note") : null)), table.body);
    const tied = P.runs.some((run) => run.mark === "tied");
    $("marks").textContent = `${tied ? `† ${P.undecided}. ` : ""}◆ follows the sliders.${P.runs.some((run) => run.seeds.length > 1) ? " Mean ± standard deviation over the seeds." : ""}${P.remarks.map((text) => ` ${text}.`).join("")}`;
  };
  const focusOn = (key) => { const node = [...document.querySelectorAll("th button")].find((own) => own.dataset.key === key); if (node) node.focus(); };

  let legend = ""; // the content of the legend drawn last
  const drawLegend = () => {
    const form = [pages.indexOf(P), dark.matches, ...state.hide].join();
    if (form === legend) return;
    legend = form;
    const host = $("legend"), had = document.activeElement && document.activeElement.dataset.run;
    if (P.runs.length <= 12) {
      host.replaceChildren(...P.runs.map((run, i) => el("button", { type: "button", "data-run": i, "aria-pressed": String(!state.hide.has(i)), onclick: () => toggle(i) },
        sample(run), el("span", { class: "name" }, el("bdi", {}, run.name), run.diverged ? `, ${run.diverged}` : null))));
      const again = had !== undefined && host.querySelector(`[data-run="${Number(had)}"]`);
      if (again) again.focus();
      return;
    }
    const choose = (keep) => { set({ hide: new Set(P.runs.map((_, i) => i).filter((i) => !keep(i))) }); render(); };
    host.replaceChildren(...Object.entries(P.key).map(([title, own]) => el("div", { class: "group" }, title ? el("span", {}, `${title}:`) : null, ...own.map((look) => el("span", {}, sample(look), look.text)))),
      el("div", { class: "group" }, el("button", { type: "button", onclick: () => choose(() => true) }, "all"), el("button", { type: "button", onclick: () => choose((i) => i < 10) }, P.varied.length ? "best 10" : "first 10"), el("button", { type: "button", onclick: () => choose(() => false) }, "none"), `${P.runs.length - state.hide.size} of ${P.runs.length} runs; choose in the table`));
  };
  const toggle = (i) => {
    const hide = new Set(state.hide);
    if (!hide.delete(i)) hide.add(i);
    set({ hide });
    const inTable = document.activeElement && document.activeElement.closest("tr");
    render();
    if (inTable) { const box = document.querySelector(`tr[data-run="${i}"] input`); if (box) box.focus(); }
  };

  // Sliders -----------------------------------------------------------------------------------------------------------------

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
            : { key: "bw", of: "network", label: "bandwidth", range: [-3, 4], write: (v) => `× ${digits(v)}`, read: plain, note: P.network.text },
      equal ? { key: "lat", of: "network", label: "latency", range: [-6, 1], zero: true, write: delay, read: (t) => unitNumber(t, DELAY_UNITS), note: "one way, of a message" }
            : { key: "lat", of: "network", label: "latency", range: [-3, 3], zero: true, write: (v) => `× ${digits(v)}`, read: plain, note: "of all links" },
      { key: "sec", of: "compute", label: "seconds a step", range: [-4, 3], write: (v) => scaled(v, DELAYS), read: (t) => unitNumber(t, DELAY_UNITS), note: P.compute.alike ? "on each node" : "in the mean; nodes keep their ratios" },
      { key: "size", label: "model size", range: [-2, 6], write: (v) => `× ${digits(v)}`, read: (t) => { const bytes = unitNumber(t, BYTE_UNITS); return finite(bytes) && /b\s*$/i.test(t) ? bytes / P.weights : plain(t); },
        note: () => `${scaled(P.weights * state.size, BYTES)} of weights: all bytes in proportion, losses as measured` },
      { key: "price", label: "dollars an hour", range: [-2, 3], zero: true, write: (v) => (v ? `$ ${digits(v)}` : "$ 0"), read: plain, note: "of a node" },
      { key: "target", label: "target loss", linear: P.target.slice(0, 2), write: (v) => digits(v, 4), read: plain, note: () => P.columns[P.loss] + (state.target === P.target[2] ? ": at first, one that half of the strategies reach with all seeds" : "") },
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

  // Downloads ---------------------------------------------------------------------------------------------------------------------

  const download = (text, type, name) => {
    const url = URL.createObjectURL(new Blob([text], { type })), link = el("a", { href: url, download: name });
    document.body.append(link);
    link.click();
    link.remove();
    setTimeout(() => URL.revokeObjectURL(url), 1000);
  };
  /** A field of CSV; text that a spreadsheet would take for a formula is marked as text. */
  const field = (value) => {
    if (value === null || value === undefined || (typeof value === "number" && !finite(value))) return "";
    if (typeof value === "number") return String(value);
    const text = /^[=+\-@\t\r]/.test(value) ? `'${value}` : value;
    return /[",\r\n]/.test(text) ? `"${text.replace(/"/g, '""')}"` : text;
  };
  const asCSV = () => {
    const columns = Object.keys(P.columns), lines = [["run", "seed", "step", ...columns, "wire_bytes", "payload_bytes", "hours"]];
    for (const run of P.runs) {
      for (const seed of run.seeds) {
        const known = columns.map((column) => new Map((seed.curves[column] || [[], []])[0].map((step, i) => [step, seed.curves[column][1][i]])));
        const steps = [...new Set(known.flatMap((own) => [...own.keys()]))].sort((a, b) => a - b);
        for (const step of steps) lines.push([run.name, seed.seed, step, ...known.map((own) => own.get(step)), bytesAt(seed, step, "wire"), bytesAt(seed, step, "payload"), secondsAt(seed, step) / 3600]);
      }
    }
    return lines.map((line) => line.map(field).join(",")).join("\r\n") + "\r\n";
  };
  $("csv").onclick = () => download(asCSV(), "text/csv", "comparison.csv");
  $("json").onclick = () => {
    const rows = P.runs.map((run) => ({ run: run.name, ...Object.fromEntries(columnsShown().map((key) => [key, valueOf(run, priced(run), key)])) }));
    const { hide, ...rest } = state;
    download(JSON.stringify({ sliders: rest, table: rows, data: P }, null, 1), "application/json", "comparison-report.json");
  };

  // The page ------------------------------------------------------------------------------------------------------------------------

  const fill = (select, options, chosen) => {
    select.replaceChildren(...options.map(([value, text]) => el("option", { value, dir: "auto" }, text)));
    select.value = chosen;
  };
  let waiting = false, drawn = "", mapping = null;
  const later = () => {
    if (waiting || !P) return;
    waiting = true;
    requestAnimationFrame(() => { waiting = false; render(); });
  };
  const render = () => {
    const began = performance.now(), rows = P.runs.map(priced);
    unit = timeUnit(Math.max(0, ...rows.map((row) => row.hours[0] * 3600).filter(finite)));
    measure();
    drawSliders();
    $("logy").checked = state.logy === "1";
    $("all").checked = state.all === "1";
    for (const key of ["x", "y", "cost", "heatx", "heaty", "shade"]) if ($(key).value !== state[key]) $(key).value = state[key];
    drawLegend();
    drawCurves();
    drawTable(rows);
    clearTimeout(mapping);
    if (P.runs.length > 40) mapping = setTimeout(drawMap, 120); // with many runs, once the slider rests
    else drawMap();
    drawFront(rows);
    const inside = [pages.indexOf(P), state.run, dark.matches, widths.get($("nodes"))].join();
    if (drawn !== inside) drawNodes(); // no slider changes it
    drawn = inside;
    drawSweep(rows);
    save();
    document.body.dataset.took = String(performance.now() - began);
  };
  const begin = () => {
    drawn = legend = table.form = raced.key = "";
    restore();
    $("page").hidden = false;
    $("sweep").hidden = !P.varied.length;
    $("inside").hidden = !P.runs.some((run) => run.nodes || run.timeline);
    if (every && P.trained) $("title").textContent = document.title = P.trained;
    $("subtitle").textContent = [$("title").textContent === P.trained ? "" : P.trained, P.date, P.title].filter(Boolean).join(" · ");
    $("answer").textContent = P.answer;
    $("which").hidden = pages.length < 2;
    fill($("comparison"), pages.map((own, i) => [String(i), own.name || own.title]), String(pages.indexOf(P)));
    fill($("x"), axesOf().map((key) => [key, AXES[key].label]), state.x);
    fill($("y"), Object.entries(P.columns), state.y);
    fill($("cost"), Object.entries(COSTS).map(([key, [text]]) => [key, text]), state.cost);
    fill($("heatx"), P.varied.map((key) => [key, key]), state.heatx);
    fill($("heaty"), P.varied.map((key) => [key, key]), state.heaty);
    fill($("shade"), Object.entries(SHADES).map(([key, [text]]) => [key, text]), state.shade);
    fill($("run"), P.runs.map((run, i) => [String(i), run.name]).filter(([i]) => P.runs[i].nodes || P.runs[i].timeline), String(state.run));
    $("what").hidden = !P.strategies.length;
    $("strategies").replaceChildren(...P.strategies.flatMap(([names, text, settings]) => [el("dt", {}, el("bdi", {}, names)), el("dd", {}, text, settings ? el("div", { class: "remark" }, settings) : null)]));
    $("about").replaceChildren(...P.about.flatMap(([title, text]) => [el("dt", {}, title), el("dd", {}, text.includes("\n") ? el("details", {}, el("summary", {}, "all settings, data, versions and calls"), text) : text)]));
    makeSliders();
    render();
  };
  for (const key of ["y", "cost", "heatx", "heaty", "shade"]) $(key).onchange = (event) => { set({ [key]: event.target.value }); render(); };
  $("x").onchange = (event) => { set({ x: event.target.value, logx: "" }); render(); };
  $("run").onchange = (event) => { set({ run: Number(event.target.value) }); render(); };
  $("logx").onchange = (event) => { set({ logx: event.target.checked ? "1" : "0" }); render(); };
  $("logy").onchange = (event) => { set({ logy: event.target.checked ? "1" : "" }); render(); };
  $("all").onchange = (event) => { set({ all: event.target.checked ? "1" : "" }); render(); };
  $("comparison").onchange = (event) => { location.hash = `of=${event.target.value}`; };
  $("reset").onclick = () => { state = { ...atFirst, hide: new Set() }; render(); };
  $("link").onclick = async () => {
    const url = location.href.replace(/#.*/, "") + (written() ? `#${written()}` : "");
    try { await navigator.clipboard.writeText(url); $("copied").textContent = "copied"; } catch (error) { location.hash = written(); $("copied").textContent = "in the address bar"; }
    setTimeout(() => { $("copied").textContent = ""; }, 2500);
  };
  window.addEventListener("hashchange", () => { if (P && location.hash.slice(1) !== written()) begin(); });
  // A served page asks again: `vsim watch` reads the files of runs that are still training.
  let digest = "";
  const look = async () => {
    const said = $("watched");
    try {
      const answer = await (await fetch("data", { cache: "no-store" })).json();
      said.textContent = answer.error ? `waiting for files: ${answer.error}` : `read at ${new Date().toLocaleTimeString()}`;
      if (answer.error || answer.digest === digest || document.querySelector("#sliders :active")) return;
      const kept = P ? written() : location.hash.slice(1), focused = document.activeElement && document.activeElement.id;
      digest = answer.digest;
      pages.splice(0, pages.length, ...answer.pages);
      history.replaceState(null, "", `#${kept}`);
      begin();
      if (focused && $(focused)) $(focused).focus();
    } catch (error) {
      said.textContent = "the server has ended: this is what it last sent";
      if (!P) $("subtitle").textContent = "the server has ended";
    } finally {
      setTimeout(look, 1000 * every); // even if nothing has changed
    }
  };
  let width = 0;
  new ResizeObserver(() => { if (Math.abs(document.body.clientWidth - width) > 2) { width = document.body.clientWidth; later(); } }).observe(document.body);
  dark.addEventListener("change", later);
  window.vsim = { get state() { return state; }, get page() { return P; }, set: (changes) => { set(changes); render(); }, priced,
    // Rules that Python has, too: tests compare both.
    rules: { cell, unitOf, crossing, limits, within, ticks: (low, high, count, log) => scale(low, high, 0, 1, log).ticks(count) },
    /** The names of the strategy that is first to the target on a network, and of all tied with it. */
    first: (bw, lat) => {
      const { found, spots } = racers();
      return found.length ? race(found, spots, { ...place(), bw, lat }).tied.map((k) => found[k].run.name) : [];
    } };
  if (pages.length) begin();
  else {
    $("page").hidden = true;
    $("subtitle").textContent = "reading the runs";
  }
  if (every) look();
})();

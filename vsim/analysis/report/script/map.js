// The map of winners.

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
  const some = missing.filter(([, said]) => said !== "never" && said !== "no hours"), own = quoted(some.map(([name]) => name));
  const partly = some.map(([, said], i) => `${said} of ${own[i]}`);
  const left = [...named("not reached by", quoted(lost("never"))), ...named("reached by only", partly), ...named("without events, and so without times:", quoted(lost("no hours")))];
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

// A column of the runs against an axis.

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

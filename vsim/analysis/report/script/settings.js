// Settings of a sweep: a map, and lines across them.

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

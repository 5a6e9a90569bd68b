// Loss for its cost.

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
  const taken = [], lines = []; // what names must not touch, and what they cross only if there is no other place
  const touches = (a, boxes) => boxes.some((b) => a[0] < b[2] && b[0] < a[2] && a[1] < b[3] && b[1] < a[3]);
  const overlaps = (a) => touches(a, taken) || a[0] < f.box.left || a[2] > f.box.right + 14 || a[1] < f.box.top - 8 || a[3] > f.box.bottom;
  for (const one of all) {
    const [x, y] = sit(one);
    taken.push([x - 6, y - 6, x + 6, y + 6]);
    if (one.ends && !isHigh(one)) lines.push([x - 1, f.y(one.ends[1]), x + 1, f.y(one.ends[0])]);
  }
  front.forEach((one, i) => {
    const [x, y] = sit(one), above = i ? sit(front[i - 1])[1] : f.box.top, next = i + 1 < front.length ? sit(front[i + 1])[0] : f.box.right;
    lines.push([x - 1, above, x + 1, y], [x, y - 1, next, y + 1]);
  });
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
    const room = ([tx, ty, anchor]) => {
      const left = anchor === "start" ? tx : anchor === "end" ? tx - wide : tx - wide / 2;
      return [left, ty - 10, left + wide, ty + 3];
    };
    const free = ways.filter((way) => !overlaps(room(way))), spot = free.find((way) => !touches(room(way), lines)) || free[0];
    if (spot) taken.push(room(spot));
    if (spot) f.root.append(svg("text", { class: `halo ${faint < 1 ? "soft" : ""}`, x: spot[0], y: spot[1], "text-anchor": spot[2] }, said));
  }
  const dearest = sorted[sorted.length - 1], cheap = sorted.filter((one) => one.cost > 0 && one.cost < 0.95 * dearest.cost);
  if (cheap.length) {
    const steps = (one) => mean(sound(one.run).map(lastStep)), whole = (v) => v.toLocaleString("en-US", { maximumFractionDigits: 0 });
    const [first, ...names] = quoted([dearest, ...cheap].map((one) => brief(one.run.name)));
    const more = (one, i) => `${names[i]} ${i ? "" : "trains "}about ${whole(Number(((steps(one) * dearest.cost) / one.cost).toPrecision(3)))}${i ? "" : " steps"}`;
    const others = cheap.length > 6 ? ` and ${cheap.length - 6} others` : "";
    host.append(el("p", { class: "remark" }, `Points mark the end of each run. ${first}, the dearest, trains ${whole(steps(dearest))} steps. For its cost, ${cheap.slice(0, 6).map(more).join(", ")}${others}.`));
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

// The nodes of one run: their losses, and what they do.

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
  $("timeline-remark").textContent = line ? `Steps ${line.steps[0]} to ${line.steps[1]} on the network for which the page was made: ${networkText()}.` : "";
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

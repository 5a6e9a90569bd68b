// Downloads, and the page that all parts draw.

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
  $("about").replaceChildren(...P.about.map(condition).flatMap(([title, text]) => [el("dt", {}, title), el("dd", {}, text.includes("\n") ? el("details", {}, el("summary", {}, "all settings, data, versions and calls"), text) : text)]));
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

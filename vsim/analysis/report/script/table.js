// The table of results, and the legend.

const SIMULATED = "seconds to simulate"; // of this machine: only under "all columns", where it is last
const isLive = (key) => P.live.includes(key);
const columnsShown = () => {
  const known = P.table.filter((key) => key !== SIMULATED), own = (key) => P.headings[key];
  if (state.all === "1") known.push(...P.more, ...P.table.filter((key) => key === SIMULATED));
  const live = P.live.filter((key) => (isPriced() || !own(key).isPriced) && (state.price || key !== "dollars"));
  const byLoss = [...live.filter((key) => !own(key).isToLoss), ...live.filter((key) => own(key).isToLoss)];
  return [...known, ...byLoss];
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

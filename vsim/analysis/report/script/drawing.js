// Colours, marks, scales, frames and what a pointer reads.

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

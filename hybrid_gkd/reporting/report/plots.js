// Charts of Vega-Lite: curves and stacked areas that share one cursor, bars, histograms over time.
// A chart's values are read by the pointer, or with the arrow keys where it has the focus.

const COLORS = {  // Okabe and Ito and six more, the dark ones lighter on a dark page
  light: ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#b8860b", "#56b4e9", "#000000", "#7f7f7f", "#7a3fa0", "#8c510a", "#01665e", "#b0b7c3", "#e7298a", "#66a61e"],
  dark: ["#4aa8e8", "#ff8a3d", "#2fc79a", "#e39bc4", "#e6c229", "#8fd0ff", "#ffffff", "#a5a5a5", "#b58be0", "#c98a52", "#80cdc1", "#5b6475", "#ff85bd", "#a6d854"],
};
const SCHEMA = "https://vega.github.io/schema/vega-lite/v6.json";  // a name; nothing is loaded from there
const HEIGHT = 190;

const dark = window.matchMedia("(prefers-color-scheme: dark)");
const charts = new Set();   // those that are on the page
const settings = {x: "steps", smoothing: 0, log: false};

function palette() { return COLORS[dark.matches ? "dark" : "light"]; }
function css(name) { return getComputedStyle(document.documentElement).getPropertyValue(name).trim(); }

function element(tag, properties = {}, ...children) {
  const {dataset, ...rest} = properties;
  const made = Object.assign(document.createElement(tag), rest);
  Object.assign(made.dataset, dataset);
  for (const [name, value] of Object.entries(rest)) if (name.startsWith("aria-") || name === "role") made.setAttribute(name, value);
  made.append(...children.filter(child => child !== null && child !== undefined));
  return made;
}

function show(value) {
  if (value === null || value === undefined || Number.isNaN(value)) return "—";
  if (value !== 0 && (Math.abs(value) < 1e-3 || Math.abs(value) >= 1e6)) return value.toExponential(2);
  return String(+value.toPrecision(4));
}

function config() {
  return {
    background: null, font: "system-ui, sans-serif", view: {stroke: null}, padding: 2,
    axis: {labelColor: css("--soft"), titleColor: css("--soft"), gridColor: css("--grid"), domainColor: css("--line"),
           tickColor: css("--line"), labelFontSize: 11, titleFontSize: 11, titleFontWeight: 400, labelLimit: 130},
    legend: {labelColor: css("--soft"), titleColor: css("--soft"), labelFontSize: 11, titleFontSize: 11},
    range: {category: palette()},
  };
}

async function embed(container, spec, width) {
  const whole = {$schema: SCHEMA, width, autosize: {type: "fit-x", contains: "padding"}, config: config(), ...spec};
  // ast: expressions are interpreted, so that the page needs no permission to evaluate code.
  return (await vegaEmbed(container, whole, {actions: false, renderer: "svg", ast: true, tooltip: {theme: "custom"}})).view;
}

// Placeholder of a chart that is drawn when it becomes visible, and again when the page changes.
class Chart {
  constructor(label, makeSpec) {
    this.makeSpec = makeSpec;
    this.plot = element("div");
    this.cursor = element("div", {className: "cursor"});
    this.root = element("div", {className: "chart", tabIndex: 0, role: "img", "aria-label": label}, this.plot, this.cursor);
    this.root.style.minHeight = `${HEIGHT}px`;
    this.stale = true;
    charts.add(this);
    observer.observe(this.root);
  }
  async draw() {
    const width = this.root.clientWidth;
    if (!this.stale || width === 0) return;
    this.stale = false;
    const spec = this.makeSpec(width);
    this.view?.finalize();
    this.view = await embed(this.plot, spec, width);
    this.drawn = true;
    this.afterDrawing();
  }
  afterDrawing() {}
  redraw() { this.stale = true; if (this.visible) this.draw(); }
  remove() { observer.unobserve(this.root); this.view?.finalize(); charts.delete(this); }
}

const observer = new IntersectionObserver(entries => {
  for (const entry of entries) {
    const chart = [...charts].find(each => each.root === entry.target);
    if (!chart) continue;
    chart.visible = entry.isIntersecting;
    if (chart.visible) chart.draw();
  }
}, {rootMargin: "400px"});

// Draw charts that are not visible yet: for printing, and while the browser is idle.
window.addEventListener("beforeprint", () => charts.forEach(chart => chart.draw()));
function drawWhenIdle() {
  const next = [...charts].find(chart => chart.stale && chart.root.clientWidth > 0);
  if (next) (window.requestIdleCallback ?? setTimeout)(() => next.draw().then(drawWhenIdle));  // Safari has none
}

let cursorStep = null;  // the step that all curves point at
function moveCursor(step) {
  cursorStep = step;
  for (const chart of charts) chart.pointAt?.(step);
}

// Lines or stacked areas of one panel. `series`: {label, color, dash, points: [{step, minutes, value, low, high}]}, of
// areas with the seconds of the `whole` run. `marks`: points at which it was continued; `top`: where the y axis ends.
class Curves extends Chart {
  constructor(title, series, {stacked = false, unit = "", marks = [], spacing = 1, top} = {}) {
    super(describe(title, series, unit), width => this.spec(width));
    Object.assign(this, {series, stacked, marks, spacing, top});
    this.readout = element("output", {className: "readout"});
    this.root.addEventListener("pointermove", event => this.follow(event));
    this.root.addEventListener("pointerdown", event => this.follow(event));  // a finger has no other way
    this.root.addEventListener("pointerleave", event => { if (event.pointerType !== "touch") moveCursor(null); });
    this.root.addEventListener("keydown", event => this.walk(event));
    this.root.addEventListener("focus", () => this.readout.setAttribute("aria-live", "polite"));
    this.root.addEventListener("blur", () => this.readout.setAttribute("aria-live", "off"));
    this.pointAt(null);
  }
  x(point) { return settings.x === "minutes" ? point.minutes : point.step; }
  drawnValue(line, index) { return settings.smoothing > 0 && !this.stacked ? smoothed(line, this.spacing)[index] : line.points[index].value; }
  spec(width) {
    const rows = [], bands = [], raw = [];
    const useLog = settings.log && !this.stacked && this.series.every(line => line.points.every(p => (p.low ?? p.value) > 0));
    this.series.forEach((line, n) => {
      if (this.stacked) rows.push(...this.blocks(line.points).map(row => ({...row, n})));
      else line.points.forEach((point, index) => {
        const row = {x: this.x(point), y: this.drawnValue(line, index), n};
        if (row.x === null || row.x === undefined) return;
        rows.push(row);
        if (settings.smoothing > 0) raw.push({...row, y: point.value});
        else if (point.low !== undefined) bands.push({...row, y: point.low, y2: point.high});
      });
    });
    const xs = rows.map(row => row.x);
    const domain = [Math.min(...xs), Math.max(...xs)];
    const most = settings.x === "steps" ? domain[1] - domain[0] : Infinity;  // ticks: there is no half a step
    const colors = this.series.map(line => palette()[line.color % palette().length]);
    const color = {field: "n", type: "nominal", legend: null, scale: {domain: this.series.map((_, n) => n), range: colors}};
    const dash = {field: "n", type: "nominal", legend: null,
                  scale: {domain: this.series.map((_, n) => n), range: this.series.map(line => line.dash || [1, 0])}};
    const x = {field: "x", type: "quantitative", scale: {domain, nice: false},
               axis: {title: settings.x, grid: false, tickCount: Math.max(1, Math.min(Math.floor(width / 70), most)), labelFlush: true}};
    const y = {field: "y", type: "quantitative", axis: {title: null, tickCount: 5, format: ".6~g"},
               scale: useLog ? {type: "log"} : {zero: this.stacked, ...(this.top ? {domain: [0, this.top], nice: true} : {})}};
    const few = rows.length / this.series.length <= 40;
    const layers = [];
    if (this.stacked) {
      layers.push({data: {values: rows}, mark: {type: "area", interpolate: "step", line: false, opacity: 0.85},
                   encoding: {x, y: {...y, stack: "zero"}, color, order: {field: "n"}}});
    } else {
      if (bands.length) layers.push({data: {values: bands}, mark: {type: "area", opacity: 0.2}, encoding: {x, y, y2: {field: "y2"}, color}});
      if (raw.length) layers.push({data: {values: raw}, mark: {type: "line", opacity: 0.25, strokeWidth: 1}, encoding: {x, y, color, strokeDash: dash}});
      layers.push({data: {values: rows}, mark: {type: "line", strokeWidth: 1.8, point: few ? {size: 18, filled: true} : false},
                   encoding: {x, y, color, strokeDash: dash}});
    }
    const marks = this.marks.map(point => ({x: this.x(point)})).filter(({x}) => x > domain[0]);
    if (marks.length) layers.push({data: {values: marks}, mark: {type: "rule", color: css("--soft"), strokeDash: [1, 3]}, encoding: {x}});
    return {height: HEIGHT, layer: layers};
  }
  // Corners of an area in which each point covers half of the steps to its neighbours on either side.
  blocks(points) {
    const found = points.map(point => ({x: this.x(point), y: point.value})).filter(({x}) => x !== null && x !== undefined);
    if (!found.length) return [];
    const [first, second = {x: first.x + 1}] = found, last = found.at(-1), before = found.at(-2) ?? {x: last.x - 1};
    return [{...first, x: first.x - (second.x - first.x) / 2}, ...found, {...last, x: last.x + (last.x - before.x) / 2}];
  }
  afterDrawing() { this.pointAt(cursorStep); }
  follow(event) {
    if (!this.drawn) return;
    const left = this.view.origin()[0], scale = this.view.scale("x");
    const wanted = scale.invert(event.clientX - this.plot.getBoundingClientRect().left - left);
    moveCursor(nearest(this.longest(), point => this.x(point), wanted)?.step ?? null);
  }
  longest() { return this.series.reduce((a, b) => (b.points.length > a.points.length ? b : a)).points; }
  walk(event) {
    const points = this.longest();
    const at = cursorStep === null ? -1 : points.indexOf(nearest(points, point => point.step, cursorStep));
    const to = {ArrowLeft: Math.max(0, at - 1), ArrowRight: Math.min(points.length - 1, at + 1), Home: 0,
                End: points.length - 1, PageUp: Math.max(0, at - 10), PageDown: Math.min(points.length - 1, at + 10)}[event.key];
    if (event.key === "Escape") moveCursor(null);
    if (to === undefined) return;
    event.preventDefault();
    moveCursor(points[to].step);
  }
  pointAt(step) {
    const found = this.series.map(line => step === null ? line.points.at(-1) : nearest(line.points, point => point.step, step));
    const marked = step === null ? null : nearest(this.longest(), point => point.step, step);
    const whole = step === null && this.stacked, seconds = this.series.reduce((sum, line) => sum + line.whole, 0);
    const parts = [element("span", {}, whole ? "whole run: " : step === null ? "last: " : `step ${marked.step}${settings.x === "minutes" && marked.minutes !== null ? `, ${show(marked.minutes)} minutes` : ""}: `)];
    this.series.forEach((line, n) => {
      const swatch = element("span", {className: this.stacked ? "swatch" : "swatch thin"});
      const color = palette()[line.color % palette().length];
      swatch.style.background = dashes(color, line.dash ?? [1, 0]);
      const index = line.points.indexOf(found[n]);
      let text = whole ? `${duration(line.whole)} (${+(100 * line.whole / seconds).toPrecision(2)} %)` : show(found[n]?.value);
      if (found[n] && settings.smoothing > 0 && !this.stacked) text += ` (smoothed ${show(this.drawnValue(line, index))})`;
      if (found[n]?.low !== undefined && step !== null && settings.smoothing === 0) text += ` (${show(found[n].low)} to ${show(found[n].high)})`;
      parts.push(element("span", {}, swatch, `${line.label} `, element("b", {}, text)));
    });
    this.readout.replaceChildren(...parts);
    const shown = marked && this.drawn ? this.x(marked) : null;
    this.cursor.style.display = shown === null ? "none" : "block";
    if (shown !== null) {
      const [left, top] = this.view.origin();
      Object.assign(this.cursor.style, {left: `${left + this.view.scale("x")(shown)}px`, top: `${top}px`, height: `${HEIGHT}px`});
    }
  }
}

function describe(title, series, unit) {
  const lines = series.map(line => {
    const values = line.points.map(point => point.value);
    return `${line.label}: first ${show(values[0])}, last ${show(values.at(-1))}`;
  });
  return `${title}${unit ? `, ${unit}` : ""}. ${lines.join("; ")}. The arrow keys move the cursor.`;
}

// A dashed line as a background.
function dashes(color, lengths) {
  let at = 0;
  const stops = lengths.map((length, n) => `${n % 2 ? "transparent" : color} ${at}px ${at += length}px`);
  return lengths[1] ? `repeating-linear-gradient(90deg, ${stops.join(", ")})` : color;
}

function duration(seconds) {
  if (seconds < 60) return `${show(seconds)} s`;
  const [hours, minutes, rest] = [Math.round(seconds) / 3600, Math.round(seconds) / 60 % 60, Math.round(seconds) % 60].map(Math.floor);
  return [...(hours ? [hours, String(minutes).padStart(2, "0")] : [minutes]), String(rest).padStart(2, "0")].join(":");
}

function smoothed(line, spacing) {
  // Exponential moving average as in TensorBoard, debiased. Weights decay with the distance in steps, as in wandb:
  // `spacing` steps count as one.
  if (line.kept?.weight === settings.smoothing) return line.kept.values;
  let total = 0, weight = 0, before = null;
  const values = line.points.map(point => {
    const falls = before === null ? 0 : settings.smoothing ** ((point.step - before) / spacing);
    total = total * falls + point.value;
    weight = weight * falls + 1;
    before = point.step;
    return total / weight;
  });
  line.kept = {weight: settings.smoothing, values};
  return values;
}

function nearest(points, key, wanted) {
  let low = 0, high = points.length - 1;
  if (high < 0) return undefined;
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (key(points[middle]) < wanted) low = middle; else high = middle;
  }
  return Math.abs(key(points[low]) - wanted) <= Math.abs(key(points[high]) - wanted) ? points[low] : points[high];
}

dark.addEventListener("change", () => charts.forEach(chart => { chart.redraw(); chart.pointAt?.(cursorStep); }));
let resized;
window.addEventListener("resize", () => {
  clearTimeout(resized);
  resized = setTimeout(() => charts.forEach(chart => chart.redraw()), 150);
});

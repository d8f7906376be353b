// The page of one or several runs, from its embedded JSON; a served page polls for updates.

const REFRESH_SECONDS = 5;
const GROUPS = [  // [id, heading, note, panels: [title, metrics]]; a regular expression selects all matching names
  ["learning", "Learning", "Validation and training metrics of the student.", [
    ["Held-out accuracy or reward", ["val/accuracy"]],
    ["Held-out score of the reward model", ["val/reward_model"]],
    ["Held-out pass@k", [/^val\/pass@\d+$/]],
    ["Held-out divergence", ["val/forward_kl", "val/reverse_kl"]],
    ["Held-out KL(teacher, student) by quarter of the completion", [/^val\/forward_kl\/q\d$/]],
    ["Held-out KL(student, teacher) by quarter of the completion", [/^val\/reverse_kl\/q\d$/]],
    ["Distillation loss", ["actor/kl_loss"]],
    ["SFT cross-entropy", ["actor/sft_loss"]],
    ["Divergence to each teacher", [/^actor\/distillation\/[^/]+\/(kl_loss|forward_kl|reverse_kl)$/]],
    ["Forward and reverse KL", ["actor/distillation/forward_kl", "actor/distillation/reverse_kl"]],
    ["Forward KL by quarter of the completion", [/^actor\/distillation\/forward_kl\/q\d$/]],
    ["Distillation loss at the first and last optimizer step of a rollout", ["actor/kl_loss/first_update", "actor/kl_loss/last_update"]],
    ["Teacher entropy and entropy gap", ["actor/distillation/teacher_entropy", "actor/distillation/entropy_gap"]],
    ["Reward", ["reward/mean", "reward/std"]],
    ["Reward components", [/^reward\/.+\/mean$/]],
    ["Reward before group filtering", ["reward/all_groups"]],
    ["Informative groups", ["training/groups_with_signal"]],
    ["Generation batches per step", ["training/num_gen_batches"]],
    ["Overlap and mass of the teacher's top-k", ["actor/distillation/student_mass", "actor/distillation/teacher_mass", "actor/distillation/overlap_ratio"]],
    ["Entropy", ["actor/entropy"]],
    ["Total loss", ["actor/loss"]],
    ["Policy loss", ["actor/pg_loss"]],
    ["Gradient norm", ["actor/grad_norm"]],
    ["Learning rate", ["actor/lr"]],
    ["Fraction of clipped tokens", ["actor/pg_clipfrac", "actor/distillation/clamp_share"]],
    ["Approximate KL to the old policy", ["actor/ppo_kl"]],
    ["KL to the reference policy", ["actor/ref_kl", "reward/kl"]],
    ["KL of rollout and trainer policy", ["actor/importance/kl", "actor/importance/k3_kl"]],
    ["Mean importance weight", ["actor/importance/mean"]],
    ["Effective sample size and rejected tokens", ["actor/importance/effective_sample_size", "actor/importance/rejected"]],
  ]],
  ["critic", "Critic", "Value estimates and critic updates.", [
    ["Values and returns", ["critic/values/mean", "critic/returns/mean"]],
    ["Explained variance", ["critic/vf_explained_var"]],
    ["Critic loss", ["critic/vf_loss"]],
    ["Critic clip fraction", ["critic/vf_clipfrac"]],
    ["Critic gradient norm", ["critic/grad_norm"]],
    ["Critic learning rate", ["critic/lr"]],
  ]],
  ["teacher", "Teacher", "Throughput, latency and overlap of the teacher service.", [
    ["Teacher throughput", ["teacher/tokens_per_second"]],
    ["Overlapped fraction of teacher time", ["teacher/hidden_fraction"]],
    ["Latency", ["teacher/latency", "teacher/latency_p95", "teacher/latency_p99"]],
    ["Latency of each teacher", [/^teacher\/.+\/latency$/]],
    ["Tokens by teacher", [/^teacher\/.+\/token_fraction$/]],
    ["Queue length", ["teacher/queue_length"]],
    ["Log-probability of the end-of-text token", ["teacher/end_logprob"]],
    ["Engine utilization", ["teacher/engine_busy"]],
    ["Retries", ["teacher/retries"]],
  ]],
  ["speed", "Speed", "Throughput of the training loop.", [
    ["Throughput", ["perf/tokens_per_second"]],
    ["Model FLOP/s utilization (MFU)", ["perf/mfu"]],
  ]],
];
const PARTS = [  // of a step, in the order in which they are stacked, with their colours
  ["gen", 0], ["wait_prev_gen", 5], ["wait_prev_teacher", 7], ["reward", 12], ["reward_model", 10], ["values", 8],
  ["update_critic", 9], ["ref", 6], ["update_actor", 1], ["sync_rollout_weights", 2], ["testing", 3], ["save_checkpoint", 4],
  ["snapshot", 13], ["other", 11],
];
const SPAN_COLORS = {...Object.fromEntries(PARTS), request: 3, initialize: 4};
const PHASES = ["rollout", "reward_model", "reference", "critic_update", "critic_optimizer_step", "update", "optimizer_step", "publish"];

let page = JSON.parse(document.getElementById("data").textContent);
const report = document.getElementById("report");

function section(id, heading, note, ...children) {
  const body = children.flat().filter(child => child !== null && child !== undefined);
  if (!body.length) return null;
  return element("section", {id, "aria-labelledby": `${id}-heading`}, element("h2", {id: `${id}-heading`}, heading),
                 note ? element("p", {className: "note"}, note) : null, ...body);
}

function panel(title, unit, chart, wide = false) {
  const heading = element("h3", {}, title, unit ? element("span", {className: "unit"}, ` ${unit}`) : null);
  return element("div", {className: wide ? "panel wide" : "panel"}, heading, chart.root, chart.readout ?? null);
}

function empty(text) { return element("p", {className: "empty"}, text); }

function table(head, rows, className = "") {
  const cell = (tag, content) => element(tag, typeof content === "number" ? {className: "number"} : {}, typeof content === "number" ? show(content) : content ?? "—");
  return element("div", {className: "scroll", tabIndex: 0, role: "region", "aria-label": head.filter(Boolean).join(", ") || "table"},
    element("table", {className}, element("thead", {}, element("tr", {}, ...head.map(text => cell("th", text)))),
      element("tbody", {}, ...rows.map(row => element("tr", {}, ...row.map((content, n) => cell(n ? "td" : "th", content)))))));
}

function runLabel(run) { return page.runs.length > 1 ? run.label : run.name; }

// Points of a metric of a run, or null.
function points(run, name) {
  const curve = run.metrics[name];
  if (!curve) return null;
  const elapsed = run.metrics["timing/elapsed"];
  const clock = elapsed ? run.axes[elapsed.axis].map((step, n) => [step, elapsed.mean[n]]) : [];
  let at = 0;
  return run.axes[curve.axis].map((step, n) => {
    while (at < clock.length - 2 && clock[at + 1][0] < step) at += 1;
    let minutes = null;
    if (clock.length === 1) minutes = clock[0][1] / 60;
    if (clock.length > 1) {
      const [[a, left], [b, right]] = [clock[at], clock[at + 1]];
      minutes = Math.max(0, left + (right - left) * (step - a) / (b - a)) / 60;
    }
    const point = {step, minutes, value: curve.mean[n]};
    return curve.low ? {...point, low: curve.low[n], high: curve.high[n]} : point;
  });
}

// The measured metrics among the names, in order.
function measured(names) {
  const all = [...new Set(page.runs.flatMap(run => Object.keys(run.metrics)))].sort();
  return names.flatMap(name => all.filter(each => name instanceof RegExp ? name.test(each) : name === each));
}

// Points at which a single run was resumed, or went on with other workers.
function marks(series) {
  if (page.runs.length > 1) return [];
  const longest = series.reduce((a, b) => (b.points.length > a.points.length ? b : a)).points;
  return page.runs[0].resumed.map(step => nearest(longest, point => point.step, step));
}

// Steps between points of the densest curve; the maximum over the runs.
function spacing() {
  const all = page.runs.map(run => run.axes.reduce((a, b) => (b.length > a.length ? b : a), [0, 1]));
  return Math.max(1, ...all.map(steps => (steps.at(-1) - steps[0]) / (steps.length - 1 || 1)));
}

function curvePanel(title, names) {
  const series = [];
  const there = measured(names);
  there.forEach((name, n) => page.runs.forEach((run, r) => {
    const found = points(run, name);
    if (!found) return;
    const one = page.runs.length === 1;
    const label = one ? name : there.length === 1 ? run.label : `${run.label} ${name}`;
    series.push({label, points: found, color: one ? n : r, dash: one ? null : [[1, 0], [6, 3], [2, 3], [8, 3, 2, 3]][n % 4]});
  }));
  if (!series.length) return null;
  const unit = page.names[there[0]]?.[0] ?? "";
  const made = panel(title, unit, new Curves(title, series, {unit, marks: marks(series), spacing: spacing()}));
  made.title = there.map(name => `${name}: ${page.names[name]?.[1] ?? ""}`).join("\n");
  return made;
}

function summary() {
  const blocks = page.runs.map(run => {
    const cards = run.headline.map(card => element("div", {className: "card"},
      element("div", {className: "label"}, card.label),
      element("div", {className: `value ${card.change ?? ""}`}, card.value), element("p", {className: "note"}, card.note ?? "")));
    const title = page.runs.length > 1 ? element("h3", {}, pill(run), runLabel(run)) : null;
    return element("div", {}, title, element("div", {className: "cards"}, ...cards));
  });
  return section("summary", "Summary", null, ...blocks);
}

function pill(run) {
  const {outcome} = run.state;
  return element("span", {className: `pill ${outcome.replaceAll(" ", "-")}`}, outcome);
}

function differing() {
  if (page.runs.length < 2) return null;
  const rows = Object.entries(page.differing).map(([key, values]) => [element("code", {}, key), ...values.map(written)]);
  return section("differences", "What differs", "Configuration keys that differ between the runs.",
    rows.length ? table(["key", ...page.runs.map(runLabel)], rows) : empty("The configurations are identical."));
}

function written(value) {
  return element("code", {}, value === null || value === undefined ? "—" : typeof value === "string" ? value : JSON.stringify(value));
}

function curves() {
  const taken = new Set(GROUPS.flatMap(([, , , panels]) => panels.flatMap(([, names]) => measured(names))));
  const sections = GROUPS.map(([id, heading, note, panels]) => {
    const found = panels.map(([title, names]) => curvePanel(title, names)).filter(Boolean);
    if (found.length) return section(id, heading, note, element("div", {className: "panels"}, ...found));
    return id === "learning" ? section(id, heading, note, empty("No step has been completed yet.")) : null;
  }).filter(Boolean);
  const rest = [...new Set(page.runs.flatMap(run => Object.keys(run.metrics)))]
    .filter(name => !taken.has(name) && !/^(memory|(val\/)?response_length|timing\/elapsed|training\/global_step)/.test(name)).sort();
  const more = element("details", {}, element("summary", {}, `${rest.length} more metrics`));
  more.addEventListener("toggle", () => {
    if (more.open && more.children.length === 1) more.append(element("div", {className: "panels"}, ...rest.map(name => curvePanel(name, [name]))));
  });
  if (rest.length) sections.at(-1).append(more);
  return sections;
}

function time() {
  const one = page.runs.length === 1;
  const found = page.runs.map(run => PARTS.map(([part, color]) => ({label: part, color, points: points(run, `timing/${part}`), whole: run.seconds[`timing/${part}`]}))
    .filter(line => line.whole > 0));
  // The longest step of all runs: they share a scale.
  const top = Math.max(...found.filter(series => series.length).map(series => Math.max(...series[0].points.map((_, n) => series.reduce((sum, line) => sum + line.points[n].value, 0)))));
  const panels = found.map((series, r) => {
    const title = one ? "Step time by phase" : runLabel(page.runs[r]);
    return series.length ? panel(title, "seconds", new Curves(title, series, {stacked: true, unit: "seconds", marks: marks(series), top}), one) : null;
  }).filter(Boolean);
  const note = "Time of a step by phase, as seen by the trainer. A point for several steps is their mean; sums and fractions cover all steps.";
  return section("time", "Where the time goes", note,
                 panels.length ? element("div", {className: "panels"}, ...panels) : empty("No step has been completed yet."));
}

function timelines() {
  const found = page.runs.filter(run => run.timeline).map(run => timeline(run));
  const note = "Timeline of a step of median length, among the last ones without validation or checkpoint.";
  return section("timeline", "One step", note,
                 found.length ? found : empty("No complete step without validation or checkpoint has been recorded yet."));
}

function timeline(run) {
  const {step, seconds, spans, left_out: leftOut} = run.timeline;
  const unit = seconds < 2 ? ["ms", 1000] : ["seconds", 1];
  const lanes = new Set(spans.map(([row, lane]) => `${row}\n${lane}`)).size;
  const rows = [...new Set(spans.map(([row]) => row))];
  const values = spans.map(([row, lane, name, start, end, of]) => (
    {row: lane ? `${row} (${lane + 1})` : row, name, start: start * unit[1], end: end * unit[1],
     length: `${show((end - start) * unit[1])} ${unit[0]}`, of: of === null ? "—" : String(of)}));
  const order = [...new Set(values.map(value => value.row))].sort((a, b) => rows.indexOf(a.replace(/ \(\d+\)$/, "")) - rows.indexOf(b.replace(/ \(\d+\)$/, "")) || a.localeCompare(b, undefined, {numeric: true}));
  const names = [...new Set(values.map(value => value.name))];
  const totals = new Map();
  for (const [row, , name, start, end] of spans) totals.set(`${row}\n${name}`, (totals.get(`${row}\n${name}`) ?? 0) + end - start);
  const label = `Timeline of step ${step}, ${show(seconds)} seconds. The following table has the sums.`;
  const chart = new Chart(label, width => ({
    height: 20 * lanes, data: {values},
    mark: {type: "bar", height: 14, tooltip: true, minBandSize: 1},
    encoding: {
      x: {field: "start", type: "quantitative", scale: {domain: [0, seconds * unit[1]], nice: false}, axis: {title: unit[0], tickCount: Math.max(3, width / 80)}},
      x2: {field: "end"}, y: {field: "row", type: "nominal", sort: order, axis: {title: null}},
      color: {field: "name", type: "nominal", scale: {domain: names, range: names.map(name => palette()[SPAN_COLORS[name] ?? 6])},
              legend: {title: null, orient: "bottom", columns: width < 500 ? 2 : 6}},
      tooltip: [{field: "row", title: "process"}, {field: "name", title: "phase"}, {field: "length", title: "duration"}, {field: "of", title: "step"}],
    },
  }));
  chart.root.style.minHeight = `${60 + 20 * lanes}px`;
  const sums = [...totals].map(([key, total]) => [...key.split("\n"), total * unit[1]]);
  const title = page.runs.length > 1 ? `${runLabel(run)}, step ${step}` : `Step ${step}`;
  return element("div", {className: "panel"}, element("h3", {}, title, element("span", {className: "unit"}, ` ${show(seconds * unit[1])} ${unit[0]}`)), chart.root,
    leftOut ? element("p", {}, `${leftOut} more workers are in trace.json.`) : null,
    element("details", {}, element("summary", {}, "As a table"), table(["process", "phase", unit[0]], sums)));
}

function memory() {
  const found = page.runs.map(run => {
    const values = [];
    for (const [name, curve] of Object.entries(run.metrics)) {
      const [, phase, owner] = name.match(/^memory\/(\w+)\/(\w+)_gb$/) ?? [];
      const gib = Math.max(...(curve.high ?? curve.mean));
      if (phase && gib > 0) values.push({phase, owner, gib});
    }
    return {run, values};
  }).filter(({values}) => values.length);
  const sums = found.flatMap(({values}) => values.map(({phase}) => values.filter(value => value.phase === phase).reduce((sum, value) => sum + value.gib, 0)));
  const end = Math.max(...sums, ...found.map(({run}) => run.card_gb ?? 0));  // the runs share their scale
  const panels = found.map(({run, values}) => memoryPanel(run, values, end));
  const note = "Memory on the device at the start of each phase: maximum over workers and steps.";
  return section("memory", "Memory", note, panels.length ? panels : empty("The run has no memory measurements."));
}

function memoryPanel(run, values, end) {
  const card = run.card_gb, [unit, scale] = end < 0.1 ? ["MiB", 1024] : ["GiB", 1];
  const scaled = values.map(value => ({...value, size: value.gib * scale, text: `${show(value.gib * scale)} ${unit}`}));
  const owners = [...new Set(values.map(value => value.owner))].sort();
  const layers = width => [{
    data: {values: scaled}, mark: {type: "bar", tooltip: true},
    encoding: {
      x: {field: "size", type: "quantitative", stack: "zero", scale: {domain: [0, end * scale]}, axis: {title: unit, format: ".6~g", tickCount: Math.max(3, width / 90)}},
      y: {field: "phase", type: "nominal", sort: PHASES, axis: {title: null}},
      color: {field: "owner", type: "nominal", scale: {domain: owners, range: owners.map((_, n) => palette()[n % palette().length])}, legend: {title: null, orient: "bottom", columns: width < 500 ? 2 : 3}},
      order: {field: "owner"}, tooltip: [{field: "phase"}, {field: "owner"}, {field: "text", title: "size"}],
    },
  }];
  const rule = () => ({data: {values: [{card}]}, mark: {type: "rule", color: css("--bad"), strokeWidth: 2, strokeDash: [4, 3]}, encoding: {x: {field: "card", type: "quantitative"}}});
  const chart = new Chart(`Memory by phase: ${scaled.map(value => `${value.phase} ${value.owner} ${value.text}`).join(", ")}`, width => ({height: 30 * new Set(values.map(value => value.phase)).size, layer: card ? [...layers(width), rule()] : layers(width)}));
  const title = page.runs.length > 1 ? runLabel(run) : card ? "GPU memory by phase" : "Memory by phase";
  const against = card ? `GPU capacity: ${show(card)} GiB (dashed).` : run.device === "cpu" ? "The run was on the CPU." : "GPU capacity: not in run.log.";
  const peaks = [["perf/max_memory_allocated_gb", "torch's allocator"], ["perf/max_host_memory_gb", "host memory of a worker"]]
    .filter(([name]) => run.metrics[name]).map(([name, label]) => `${label} ${show(Math.max(...(run.metrics[name].high ?? run.metrics[name].mean)))} GiB`);
  const most = peaks.length ? ` Peaks: ${peaks.join(", ")}.` : "";
  return element("div", {className: "panel"}, element("h3", {}, title), chart.root, element("p", {}, against + most));
}

function configuration() {
  const parts = page.runs.map(run => {
    const changed = Object.entries(run.changed).map(([key, [before, after]]) => [element("code", {}, key), written(before), written(after)]);
    const recipe = run.recipe ? `the recipe ${run.recipe}` : "the recipe";
    const facts = Object.entries(run.facts).map(([name, text]) => [name, element("div", {className: "said"}, text)]);
    const all = Object.entries(run.config).map(([key, value]) => [element("code", {}, key), written(value)]);
    const earlier = run.earlier.map(({file, changed: then}) => element("details", {}, element("summary", {}, `Different in an earlier start (${file}): ${Object.keys(then).length}`),
      table(["key", "then", "now"], Object.entries(then).map(([key, [before, after]]) => [element("code", {}, key), written(before), written(after)]))));
    return element("div", {}, page.runs.length > 1 ? element("h3", {}, runLabel(run)) : null,
      element("p", {}, run.recipe === undefined || run.recipe === null ? "The recipe of the run is unknown." : changed.length ? `Differences from ${recipe}:` : `No differences from ${recipe}.`),
      changed.length ? table(["key", "recipe", "this run"], changed) : null,
      element("p", {}, "Findings of the preflight checks, including versions and machine:"),
      facts.length ? table(["", ""], facts) : empty("None in run.log."), ...earlier,
      element("details", {}, element("summary", {}, `All ${all.length} keys`), table(["key", "value"], all)));
  });
  return section("configuration", "Configuration", null, ...parts);
}

function warnings() {
  const lists = page.runs.map(run => {
    const title = page.runs.length > 1 ? element("h3", {}, runLabel(run)) : null;
    const left = run.num_warnings - run.warnings.length;
    const items = run.warnings.map(([at, level, text]) => element("li", {className: level === "WARNING" ? "" : "error"},
      element("time", {}, `${at} ${level.toLowerCase()}`), element("div", {className: "said"}, text)));
    return element("div", {}, title, items.length ? element("ul", {className: "warnings"}, ...items) : empty("None."),
                   left > 0 ? element("p", {}, `${left} older ones are in run.log.`) : null);
  });
  const count = page.runs.reduce((sum, run) => sum + run.num_warnings, 0);
  return section("warnings", `Warnings and errors${count ? ` (${count})` : ""}`, null, ...lists);
}

function header() {
  const [run] = page.runs, one = page.runs.length === 1;
  document.title = one ? `${run.name}: ${run.state.outcome}` : `${page.runs.length} runs`;
  const name = document.getElementById("name");
  if (one) name.replaceChildren(run.name, " ", element("small", {}, run.project));
  else name.replaceChildren(`${page.runs.length} runs`);
  const {step, total, error} = run.state;
  const at = `as of ${page.written}`;
  document.getElementById("state").replaceChildren(...(one
    ? [pill(run), `step ${step}${total ? ` of ${total}` : ""}, ${at}`, error ? element("div", {className: "failed said"}, error) : ""] : [at]));
}

const FOCUSABLE = "[tabindex], summary, a";

// Position of the focus in the report, restored after a redraw.
function place(focused) {
  const {id} = focused?.closest("section") ?? {};
  return id ? {id, number: [...document.querySelectorAll(`#${id} :is(${FOCUSABLE})`)].indexOf(focused)} : null;
}

function render() {
  charts.forEach(chart => chart.remove());
  const open = [...report.querySelectorAll("details")].map(each => each.open);
  const focused = place(document.activeElement);
  header();
  const sections = [summary(), differing(), ...curves(), time(), timelines(), memory(), answers(), lengths(), configuration(), warnings()].filter(Boolean);
  report.replaceChildren(...sections);
  report.querySelectorAll("details").forEach((each, n) => { if (open[n]) each.open = true; });
  if (focused) document.querySelectorAll(`#${focused.id} :is(${FOCUSABLE})`)[focused.number]?.focus({preventScroll: true});
  if (!page.live) drawWhenIdle();
  document.getElementById("sections").replaceChildren(...sections.map(each => element("a", {href: `#${each.id}`}, each.firstChild.textContent)));
}

document.getElementById("controls").addEventListener("input", () => {
  settings.x = document.querySelector("input[name=x]:checked").value;
  settings.smoothing = Number(document.getElementById("smoothing").value);
  settings.log = document.getElementById("log").checked;
  document.getElementById("smoothing-value").value = settings.smoothing;
  charts.forEach(chart => { if (chart instanceof Curves) { chart.redraw(); chart.pointAt(cursorStep); } });
});
document.getElementById("controls").addEventListener("submit", event => event.preventDefault());
render();

function content(data) { return JSON.stringify({...data, written: null}); }

let shown = page.live ? content(page) : null;
const silent = element("span", {}, " The server does not respond at the moment.");

async function follow() {
  try {
    const answer = await fetch("data.json");
    const text = await answer.text();
    silent.remove();
    if (answer.ok) {
      const found = JSON.parse(text);
      if (content(found) !== shown) {
        const {scrollY} = window;
        page = found;
        shown = content(page);
        render();
        window.scrollTo(0, scrollY);
      }
    }
  } catch (error) {
    document.getElementById("state").append(silent);
  }
  setTimeout(follow, REFRESH_SECONDS * 1000);
}
if (page.live) setTimeout(follow, REFRESH_SECONDS * 1000);

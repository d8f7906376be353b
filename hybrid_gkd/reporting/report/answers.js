// Completions of the same held-out prompts over the training, and histograms of completion lengths.

const LONG = 100;  // characters of a completion from which columns get a minimum width

function answers() {
  const blocks = page.runs.filter(run => run.answers.length).map(run => {
    const rows = new Map();  // prompt -> {reference, by step}
    for (const {step, samples} of run.answers) {
      samples.forEach((sample, n) => {
        const key = `${n}\n${sample.prompt}`;
        if (!rows.has(key)) rows.set(key, {...sample, steps: new Map()});
        rows.get(key).steps.set(step, sample);
      });
    }
    const steps = run.answers.map(each => each.step);
    const body = [...rows.values()].map(({prompt, answer, steps: at}) => [
      element("div", {className: "text"}, element("div", {className: "said"}, prompt),
              answer === null ? null : element("div", {className: "reference"}, "reference: ", element("span", {className: "said"}, answer))),
      ...steps.map(step => at.has(step) ? said(at.get(step)) : element("span", {className: "empty"}, "—")),
    ]);
    const isLong = run.answers.some(each => each.samples.some(sample => sample.response.length > LONG));
    const found = table(["prompt", ...steps.map(step => `step ${step}`)], body, isLong ? "answers long" : "answers");
    const scale = run.answers.some(each => each.samples.some(sample => sample.tokens)) ? divergenceScale() : null;
    return element("div", {}, page.runs.length > 1 ? element("h3", {}, runLabel(run)) : null, scale, found);
  });
  const scored = page.runs.some(run => run.answers.some(each => each.samples.some(sample => sample.tokens)));
  const note = "The student's completions of the same held-out prompts at several steps, with rewards."
    + (scored ? " The tokens of the first completions are coloured by the divergence of student and teacher. Point at a token, or use the arrow keys, to see the most likely candidates of both." : "");
  return section("answers", "Completions", note,
                 blocks.length ? blocks : empty("No validation: the run has no held-out prompts, or has not reached a validation."));
}

function said(sample) {
  const reward = sample.reward === null ? null
    : element("span", {className: `reward ${sample.reward > 0 ? "better" : "worse"}`, title: "reward"}, `reward ${show(sample.reward)}`);
  const text = sample.tokens ? coloured(sample) : element("div", {className: "said"}, sample.response);
  return element("div", {}, reward, element("div", {className: "text"}, text));
}

function tokenColor(divergence) { return `rgba(var(--mark), ${(1 - Math.exp(-divergence)) * 0.8})`; }

function divergenceScale() {
  const bar = element("span", {className: "scale"});
  bar.style.background = `linear-gradient(90deg, ${[0, 0.5, 1, 2, 4].map((divergence, n) => `${tokenColor(divergence)} ${25 * n}%`).join(", ")})`;
  return element("p", {}, "Token divergence: 0", bar, "4 nats or more");
}

// A completion by token, darker with higher divergence; the token under the pointer or with the focus shows the most
// likely candidates of teacher and student. The arrow keys move between tokens.
function coloured({tokens, num_tokens: all, response}) {
  const spans = tokens.map(([text, divergence], n) => {
    const span = element("span", {className: "token", tabIndex: n ? -1 : 0}, visible(text));
    span.style.backgroundColor = tokenColor(divergence);
    const open = () => candidates.show(span, tokens[n]);
    span.addEventListener("pointerenter", open);
    span.addEventListener("focus", open);
    span.addEventListener("pointerleave", () => candidates.hide());
    span.addEventListener("blur", () => candidates.hide());
    span.addEventListener("keydown", event => {
      if (event.key === "Escape") candidates.hide();
      const to = {ArrowLeft: n - 1, ArrowRight: n + 1, Home: 0, End: spans.length - 1}[event.key];
      if (to === undefined || !spans[to]) return;
      event.preventDefault();
      span.tabIndex = -1;
      spans[to].tabIndex = 0;
      spans[to].focus();
    });
    return span;
  });
  const rest = tokens.length < all ? element("details", {}, element("summary", {}, `${tokens.length} of ${all} tokens; full completion`), response) : null;
  return element("div", {className: "said"}, element("div", {className: "tokens", role: "group", "aria-label": "completion by token; use the arrow keys"}, ...spans), rest);
}

function visible(text) { return text.replace(/^ +$/, spaces => "\u00a0".repeat(spaces.length)).replaceAll("\n", "↵\n") || "∅"; }

const candidates = {
  box: element("div", {className: "candidates", role: "tooltip", id: "candidates", hidden: true}),
  show(span, [text, divergence, ofTeacher, ofStudent]) {
    const percent = p => `${(100 * p).toFixed(p > 0 && p < 0.001 ? 2 : 1)} %`;
    const list = (heading, rows) => element("table", {}, element("thead", {}, element("tr", {}, ...[heading, "teacher", "student"].map(each => element("th", {}, each)))),
      element("tbody", {}, ...rows.map(([each, p, q]) => element("tr", {className: each === text ? "chosen" : ""}, element("td", {}, element("code", {}, visible(each)), each === text ? " (sampled)" : null),
        element("td", {className: "number"}, percent(p)), element("td", {className: "number"}, percent(q))))));
    this.box.replaceChildren(element("p", {}, "divergence ", element("b", {}, show(divergence)), " nats"), ...(ofTeacher.length ? [list("teacher's top", ofTeacher), list("student's top", ofStudent)] : []));
    document.body.append(this.box);
    this.box.hidden = false;
    document.querySelector("[aria-describedby=candidates]")?.removeAttribute("aria-describedby");
    span.setAttribute("aria-describedby", "candidates");
    const at = span.getBoundingClientRect(), {offsetWidth, offsetHeight} = this.box;
    const below = at.bottom + 4 + offsetHeight <= innerHeight ? at.bottom + 4 : Math.max(0, at.top - offsetHeight - 4);
    Object.assign(this.box.style, {left: `${Math.max(4, Math.min(at.left, innerWidth - offsetWidth - 8))}px`, top: `${below}px`});
  },
  hide() { this.box.hidden = true; },
};
window.addEventListener("scroll", () => candidates.hide(), {passive: true});

function lengths() {
  const found = page.runs.map(run => {
    if (!run.lengths) return null;
    const {bin, steps, counts} = run.lengths, values = [];
    counts.forEach((column, n) => {
      const all = column.reduce((a, b) => a + b, 0);
      column.forEach((count, k) => count && values.push({from: n ? steps[n - 1] : Math.min(0, steps[0]), to: steps[n], low: k * bin - 0.5, high: (k + 1) * bin - 0.5, share: count / all, count,
        length: bin === 1 ? `${k} tokens` : `${k * bin} to ${(k + 1) * bin - 1} tokens`, steps: n && steps[n - 1] + 1 < steps[n] ? `${steps[n - 1] + 1} to ${steps[n]}` : String(steps[n])}));
    });
    const title = page.runs.length > 1 ? runLabel(run) : "Completion lengths";
    const edge = (Math.floor(run.max_length / bin) + 1) * bin - 0.5;  // above the completions at the limit
    const limit = () => ({
      data: {values: [{limit: edge}]}, mark: {type: "rule", color: css("--bad"), strokeDash: [4, 3]},
      encoding: {y: {field: "limit", type: "quantitative"}},
    });
    const histograms = width => ({
      data: {values}, mark: {type: "rect", tooltip: true},
      encoding: {
        x: {field: "from", type: "quantitative", scale: {nice: false, zero: false}, axis: {title: "steps", grid: false, tickCount: Math.max(1, Math.min(Math.floor(width / 90), steps.at(-1)))}}, x2: {field: "to"},
        y: {field: "low", type: "quantitative", scale: {nice: false}, axis: {title: "tokens", grid: false}}, y2: {field: "high"},
        color: {field: "share", type: "quantitative", scale: {scheme: dark.matches ? "viridis" : "blues", domain: [0, 1], type: "sqrt"}, legend: {title: "fraction", format: "%", gradientLength: HEIGHT - 40}},
        tooltip: [{field: "steps"}, {field: "length"}, {field: "count", title: "completions"}, {field: "share", title: "fraction", format: ".1%"}],
      },
    });
    const chart = new Chart(`${title}: histogram of completion lengths over the steps. The curves next to it have mean, maximum and minimum.`, width => (
      {height: HEIGHT, layer: run.max_length ? [histograms(width), limit()] : [histograms(width)]}));
    return panel(title, run.max_length ? "tokens, the limit dashed" : "tokens", chart);
  }).filter(Boolean);
  const more = [curvePanel("Completion length", ["response_length/mean", "response_length/max", "response_length/min"]),
                curvePanel("Truncated fraction", ["response_length/clip_ratio"]),
                curvePanel("Repeated tokens; completions ended for repetition", ["response/repeated_fraction", "response/ended_fraction"]),
                curvePanel("Held-out completion length", ["val/response_length"]),
                curvePanel("Held-out truncated fraction", ["val/response_length/clip_ratio"])].filter(Boolean);
  const all = [...found, ...more];
  return section("lengths", "Lengths", "Lengths of completions. Those at the limit are truncated, unless their last token is the end of the text.",
                 all.length ? element("div", {className: "panels"}, ...all) : empty("No step has ended yet."));
}

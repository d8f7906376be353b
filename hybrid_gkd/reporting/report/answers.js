// What the student says to the same held-out prompts as it learns.

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
      element("div", {}, element("div", {className: "said"}, prompt),
              answer === null ? null : element("div", {className: "reference"}, "reference: ", element("span", {className: "said"}, answer))),
      ...steps.map(step => at.has(step) ? said(at.get(step)) : element("span", {className: "empty"}, "—")),
    ]);
    const found = table(["prompt", ...steps.map(step => `step ${step}`)], body, "answers");
    return element("div", {}, page.runs.length > 1 ? element("h3", {}, runLabel(run)) : null, found);
  });
  return section("answers", "Answers", "The student's answers to the same held-out prompts, at several steps beside each other, with their rewards.",
                 blocks.length ? blocks : empty("The run has validated nothing: it has no held-out prompts, or has not come to a validation."));
}

function said(sample) {
  const reward = sample.reward === null ? null
    : element("span", {className: `reward ${sample.reward > 0 ? "better" : "worse"}`, title: "reward"}, show(sample.reward));
  return element("div", {}, reward, element("div", {className: "said"}, sample.response));
}

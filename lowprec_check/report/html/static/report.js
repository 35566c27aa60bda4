// Draws what shows op calls, once, and again for the run and the module that are chosen.
"use strict";
async function drawCalls() {
  Bokeh.set_log_level("warn");
  const data = await unpack(byId("calls").textContent.trim());
  const phases = data.runs.some((run) => run.calls.phase), choices = document.querySelectorAll(".run-choice");
  const view = await Bokeh.Plotting.show(errorFigure(phases), byId("error-chart")), errors = new ErrorChart(view.model.document);
  const strip = new Strip(data), operators = new OperatorTable(data), showCalls = stepThrough(errors, data, phases);
  document.addEventListener("theme", () => errors.colour());
  for (const box of document.querySelectorAll(".series input")) {
    box.addEventListener("change", () => { for (const name of box.value.split(" ")) errors.get(name).visible = box.checked; });
  }
  for (const choice of choices) choice.addEventListener("change", () => choose({ run: Number(choice.value) }));
  errors.colour();
  whenChosen((now) => {
    const run = data.runs[now.run];
    for (const choice of choices) choice.value = now.run;
    strip.show(now);
    drawRibbon(data, run);
    writeRangeRemark(data, run);
    errors.show(data, run);
    showCalls(run);
    operators.show(now);
  });
  choose({ run: Number(choices[0].value) });
  document.documentElement.dataset.ready = "true";
}

if (byId("calls")) drawCalls();

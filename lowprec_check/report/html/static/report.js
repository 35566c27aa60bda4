// Draws the charts and tables of op calls once, and again for the run that is chosen.
"use strict";
async function drawCharts() {
  Bokeh.set_log_level("warn");
  const data = await unpack(byId("calls").textContent.trim());
  const embed = async (kind, plot, place) => new kind((await Bokeh.Plotting.show(plot, byId(place))).model.document);
  const phases = data.runs.some((run) => run.calls.phase);
  const charts = { error: await embed(ErrorChart, errorFigure(phases), "error-chart") };
  const operators = new OperatorTable(data);
  whenChosen((now) => operators.show(now));
  const showCalls = stepThrough(charts.error, data, phases);
  const strip = new Strip(data);
  whenChosen((its) => strip.show(its));
  whenChosen(({ run }) => { drawRibbon(data, data.runs[run]); writeRangeRemark(data, data.runs[run]); });
  const choices = document.querySelectorAll(".run-choice");
  let drawn = null;
  whenChosen(({ run }) => {
    if (run === drawn) return;
    drawn = run;
    for (const choice of choices) choice.value = run;
    charts.range.show(data, data.runs[run]);
  });
  whenChosen(({ run }) => {
    charts.error.show(data, data.runs[run]);
    showCalls(data.runs[run]);
  });
  const colour = () => { for (const chart of Object.values(charts)) chart.colour(); };
  document.addEventListener("theme", colour);
  for (const box of document.querySelectorAll(".series input")) {
    box.addEventListener("change", () => { for (const name of box.value.split(" ")) charts.error.get(name).visible = box.checked; });
  }
  colour();
  for (const choice of choices) choice.addEventListener("change", () => choose({ run: Number(choice.value) }));
  choose({ run: Number(choices[0].value) });
  document.documentElement.dataset.ready = "true";
}

if (byId("calls")) drawCharts();

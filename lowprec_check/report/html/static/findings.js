// The filter of the findings.
"use strict";
function findings() {
  const items = [...document.querySelectorAll(".finding")], count = byId("shown"), all = count.textContent;
  byId("filter").addEventListener("input", (event) => {
    const wanted = event.target.value.toLowerCase();
    for (const item of items) item.hidden = !item.textContent.toLowerCase().includes(wanted);
    if (wanted && byId("no-effect")) byId("no-effect").open = true;
    count.textContent = wanted ? `${items.filter((item) => !item.hidden).length} of ${items.length} groups` : all;
  });
}

findings();

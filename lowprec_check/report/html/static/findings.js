// The findings: a filter by text and by the chosen module, and links that open the manual page they lead to.
"use strict";
function findings() {
  const items = [...document.querySelectorAll(".finding")], count = byId("shown"), all = count.textContent, filter = byId("filter");
  const show = () => {
    const wanted = filter.value.toLowerCase();
    for (const item of items) {
      const places = [...item.querySelectorAll("[data-in]")];
      const isHere = chosen.module === null || !places.length || places.some((place) => isInChosen(place.dataset.in));
      item.hidden = !isHere || !item.textContent.toLowerCase().includes(wanted);
    }
    if (wanted && byId("no-effect")) byId("no-effect").open = true;
    const shown = items.filter((item) => !item.hidden).length, where = chosen.module === null ? "" : `, in ${chosen.module}`;
    count.textContent = wanted || where ? `${shown} of ${items.length} causes${where}` : all;
  };
  filter.addEventListener("input", show);
  whenChosen(show);
}

function openTarget() {
  const target = location.hash && document.getElementById(decodeURIComponent(location.hash.slice(1)));
  if (target && target.matches("details")) target.open = true;
}

findings();
window.addEventListener("hashchange", openTarget);
openTarget();

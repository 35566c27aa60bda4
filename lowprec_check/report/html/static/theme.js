// Light, dark or the system's theme; print is always light. Dispatches a "theme" event when it changes.
"use strict";
(() => {
  const choice = document.getElementById("theme");
  const system = matchMedia("(prefers-color-scheme: dark)");
  const print = matchMedia("print");
  const apply = () => {
    const dark = !print.matches && (choice.value || (system.matches ? "dark" : "light")) === "dark";
    document.documentElement.dataset.theme = dark ? "dark" : "light";
    document.dispatchEvent(new Event("theme"));
  };
  for (const query of [system, print]) query.addEventListener("change", apply);
  choice.addEventListener("change", apply);
  apply();
})();

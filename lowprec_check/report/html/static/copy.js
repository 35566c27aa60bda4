// The button that copies the code.
"use strict";
function copyButton() {
  byId("copy")?.addEventListener("click", async (event) => {
    const button = event.currentTarget, code = byId("code");
    try {
      await navigator.clipboard.writeText(code.textContent);
      button.textContent = "Copied";
    } catch {  // a local file may not copy: select the code instead
      getSelection().selectAllChildren(code);
      button.textContent = "Selected: press Ctrl+C";
    }
    setTimeout(() => { button.textContent = "Copy"; }, 2500);
  });
}

copyButton();

(() => {
  const detail = document.getElementById("detail"), text = detail.querySelector("pre");
  let pinned = false;
  const show = (node) => { text.textContent = node.getAttribute("data-d"); detail.hidden = false; };
  const hide = () => { detail.hidden = true; pinned = false; };
  const of = (event) => event.target.closest && event.target.closest("[data-d]");
  document.addEventListener("pointerover", (event) => {
    const node = of(event);
    if (pinned || event.pointerType === "touch") return;
    if (node) show(node); else if (!detail.contains(event.target)) hide();
  });
  document.addEventListener("focusin", (event) => { const node = of(event); if (node) show(node); });
  document.addEventListener("click", (event) => {
    const node = of(event);
    if (node) { show(node); pinned = true; } else if (!detail.contains(event.target)) hide();
  });
  detail.querySelector("button").addEventListener("click", hide);
  document.addEventListener("keydown", (event) => { if (event.key === "Escape") hide(); });
  for (const button of document.querySelectorAll("[data-zoom]")) {
    button.setAttribute("aria-pressed", button.dataset.zoom === "1");
    button.addEventListener("click", () => {
      const all = button.parentNode.querySelectorAll("button");
      all.forEach((other) => other.setAttribute("aria-pressed", other === button));
      button.closest(".timeline").querySelector(".stretch").style.width = 100 * button.dataset.zoom + "%";
    });
  }
})();

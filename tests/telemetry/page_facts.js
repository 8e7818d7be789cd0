// Added to a copy of the page by the tests: tells the page around it what the browser has really drawn, as JSON.
addEventListener("load", () => setTimeout(() => {
  const texts = (root, selector) => [...root.querySelectorAll(selector)].map((node) => node.textContent);
  const ticks = (figure, axis) => [...figure.querySelectorAll(`text.${axis}.tick`)].map(
    (node) => [node.textContent, +node.getAttribute(axis), node.getBoundingClientRect().width]);
  const figures = {};
  for (const figure of document.querySelectorAll("figure")) {
    figures[figure.id] = {
      title: figure.querySelector("h3").textContent,
      legend: texts(figure, ".legend li"),
      labels: texts(figure, "text.label"),
      x: ticks(figure, "x"),
      y: ticks(figure, "y"),
      lines: [...figure.querySelectorAll("g path.line")].map((path) => [path.dataset.label, path.getAttribute("d")]),
      image: figure.querySelector("image")?.getAttribute("href") ?? null,
      width: figure.getBoundingClientRect().width,
      scale: figure.querySelector("svg.plot")?.getScreenCTM()?.a ?? 0,
      font: figure.querySelector("text") ? parseFloat(getComputedStyle(figure.querySelector("text")).fontSize) : 0,
    };
  }
  const loss = document.getElementById("loss");
  const count = () => loss.querySelectorAll("g path.line").length;
  const button = loss.querySelector(".legend button");
  const before = count();
  button.click();
  const hidden = count();
  button.click();
  const svg = loss.querySelector("svg.plot"), box = svg.getBoundingClientRect();
  svg.dispatchEvent(new PointerEvent("pointermove", { clientX: box.right - 14, clientY: box.top + 60 }));
  const facts = {
    figures,
    toggle: [before, hidden, count()],
    tip: texts(loss, ".tip div"),
    table: [...document.querySelectorAll("#runs tr")].map((row) => texts(row, "th, td")),
    headline: document.querySelector("header p").textContent,
    notes: texts(document, ".note"),
    overflow: document.documentElement.scrollWidth - document.documentElement.clientWidth,
    width: document.documentElement.clientWidth,
    background: getComputedStyle(document.body).backgroundColor,
    ink: getComputedStyle(document.body).color,
    resources: performance.getEntriesByType("resource").map((entry) => entry.name),
  };
  parent.postMessage(JSON.stringify(facts), "*");
}, 300));

"use strict";
// Draws the charts of #data into the figures that carry their ids: SVG lines, canvas heat maps, legends, tips.
(() => {
  const { runs, charts } = JSON.parse(document.getElementById("data").textContent);
  const SVG = "http://www.w3.org/2000/svg";

  function element(parent, name, attributes = {}, text) {
    const svg = ["svg", "g", "path", "line", "text", "circle", "rect", "clipPath", "image"].includes(name);
    const node = svg ? document.createElementNS(SVG, name) : document.createElement(name);
    for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
    if (text !== undefined) node.textContent = text;
    parent.append(node);
    return node;
  }

  function short(value) {
    const size = Math.abs(value);
    if (value === 0) return "0";
    if (size >= 1e15 || size < 1e-3) return value.toExponential(2).replace(/\.?0*e\+?/, "e");
    for (const [limit, suffix] of [[1e12, "T"], [1e9, "B"], [1e6, "M"], [1e3, "k"]]) {
      if (size >= limit) return String(+(value / limit).toPrecision(3)) + suffix;
    }
    return String(+value.toPrecision(size >= 100 ? 4 : 3));
  }

  function niceTicks(low, high, count) {
    const rough = (high - low) / Math.max(count, 1);
    const power = 10 ** Math.floor(Math.log10(rough));
    const step = power * [1, 2, 5, 10].find((m) => m * power >= rough * 0.85);
    const ticks = [];
    for (let i = Math.ceil(low / step - 1e-9); i * step <= high * (1 + 1e-12); i++) ticks.push(i * step);
    return ticks;
  }

  function logTicks(low, high, count) {
    const ticks = [];
    for (let power = Math.floor(Math.log10(low)); power <= Math.log10(high); power++) {
      for (const m of [1, 2, 5]) ticks.push(m * 10 ** power);
    }
    const inside = ticks.filter((t) => t >= low && t <= high);
    if (inside.length < 3) return niceTicks(low, high, count);
    return inside.length > 2 * count ? inside.filter((t) => Math.abs(Math.log10(t) % 1) < 1e-9) : inside;
  }

  function range(values, log) {
    let low = Infinity, high = -Infinity;
    for (const v of values) if (!log || v > 0) { low = Math.min(low, v); high = Math.max(high, v); }
    if (!Number.isFinite(low)) return [log ? 1 : 0, 10];
    if (log) return low === high ? [low / 1.2, high * 1.2] : [low / 1.05, high * 1.05];
    if (low >= 0 && low < high * 0.4) low = 0;
    if (low === high) return low === 0 ? [0, 1] : [low - Math.abs(low) * 0.1, high + Math.abs(high) * 0.1];
    const pad = (high - low) * 0.05;
    return [low === 0 ? 0 : low - pad, high + pad];
  }

  const scale = (low, high, from, to, log) => {
    const f = log ? Math.log : (v) => v;
    return (v) => from + ((f(v) - f(low)) / (f(high) - f(low))) * (to - from);
  };

  const colour = (series) =>
    series.shade === null ? `var(--c${series.run % 8})`
      : `color-mix(in oklab, var(--shade-a), var(--shade-b) ${Math.round(series.shade * 100)}%)`;

  // Axes, ticks and labels around a plot; returns its frame and scales.
  function frame(svg, width, height, spec, xs, ys, logY) {
    const yTicks = spec.yTicks ?? (logY ? logTicks : niceTicks)(ys[0], ys[1], Math.round(height / 45));
    const left = Math.max(...yTicks.map((t) => short(t).length)) * 7 + 10;
    const box = { left, right: width - 14, top: 22, bottom: height - 40 };
    const x = scale(xs[0], xs[1], box.left, box.right, false);
    const y = scale(ys[0], ys[1], box.bottom, box.top, logY);
    const yAt = spec.yCentre ? (t) => y(t + 0.5) : y;
    for (const t of yTicks) {
      if (!spec.yCentre) element(svg, "line", { class: "rule", x1: box.left, x2: box.right, y1: y(t), y2: y(t) });
      element(svg, "text", { class: "y tick", x: box.left - 6, y: yAt(t) + 4, "text-anchor": "end" }, short(t));
    }
    for (const t of niceTicks(xs[0], xs[1], Math.max(2, Math.round((box.right - box.left) / 90)))) {
      element(svg, "line", { class: "axis", x1: x(t), x2: x(t), y1: box.bottom, y2: box.bottom + 4 });
      element(svg, "text", { class: "x tick", x: x(t), y: box.bottom + 18, "text-anchor": "middle" }, short(t));
    }
    element(svg, "line", { class: "axis", x1: box.left, x2: box.right, y1: box.bottom, y2: box.bottom });
    element(svg, "text", { class: "y label", x: 0, y: 12 }, spec.y_label);
    element(svg, "text", { class: "x label", x: box.right, y: height - 4, "text-anchor": "end" }, spec.x_label);
    return { box, x, y };
  }

  function canvasFor(figure, height, label) {
    figure.querySelector(".plot")?.remove();
    const style = getComputedStyle(figure);
    const width = figure.clientWidth - parseFloat(style.paddingLeft) - parseFloat(style.paddingRight);
    if (width < 40) return null;
    const svg = element(figure, "svg", { class: "plot", role: "img", "aria-label": label, height, viewBox: `0 0 ${width} ${height}` });
    return { svg, width };
  }

  function showTip(figure, event, rows) {
    const tip = figure.querySelector(".tip") ?? element(figure, "div", { class: "tip" });
    tip.replaceChildren(...rows);
    const bounds = figure.getBoundingClientRect();
    const x = event.clientX - bounds.left, y = event.clientY - bounds.top;
    tip.style.left = `${x + 14 + tip.offsetWidth > bounds.width ? Math.max(x - 14 - tip.offsetWidth, 0) : x + 14}px`;
    tip.style.top = `${y + 14}px`;
  }

  function row(text, value, paint) {
    const div = document.createElement("div");
    const name = element(div, "span", {}, text);
    if (paint) name.style.color = paint;
    if (value !== undefined) element(element(div, "span"), "b", {}, value);
    return div;
  }

  // A button per name, which hides and shows its lines; where lines are of several kinds, what each kind looks like.
  function legend(figure, chart, hidden, redraw) {
    const list = element(figure, "ul", { class: "legend" });
    const first = (key) => chart.series.filter((s, i, all) => all.findIndex((o) => o[key] === s[key]) === i);
    for (const series of first("name")) {
      const button = element(element(list, "li"), "button", { type: "button", "aria-pressed": "true" });
      sample(button, { ...series, dashed: false });
      button.append(series.name);
      button.addEventListener("click", () => {
        hidden.has(series.name) ? hidden.delete(series.name) : hidden.add(series.name);
        button.setAttribute("aria-pressed", String(!hidden.has(series.name)));
        redraw();
      });
    }
    const kinds = first("kind");
    for (const series of kinds.length > 1 ? kinds : []) {
      const span = element(element(list, "li"), "span");
      sample(span, series).style.stroke = "var(--soft)";
      span.append(series.dashed ? `validation: ${series.kind}` : series.kind);
    }
  }

  function sample(parent, series) {
    return mark(element(parent, "svg", { viewBox: "0 0 22 10", "aria-hidden": "true" }), series, "M0 5H22");
  }

  function mark(parent, series, d) {
    const path = element(parent, "path", { class: "line", d });
    path.style.stroke = colour(series);
    if (series.dashed) path.style.strokeDasharray = "5 4";
    return path;
  }

  function lineChart(figure, chart, hidden) {
    const shown = chart.series.filter((s) => !hidden.has(s.name));
    const made = canvasFor(figure, figure.classList.contains("wide") ? 340 : 240, `${chart.title}: ${chart.y_label} over ${chart.x_label}`);
    if (!made) return;
    const { svg, width } = made, height = +svg.getAttribute("height");
    const all = shown.flatMap((s) => s.points);
    const top = chart.y_top ?? Infinity;
    const heights = all.map((p) => p[1]).concat(shown.flatMap((s) => s.band.flatMap((b) => [b[1], b[2]])));
    const xs = range(all.map((p) => p[0]), false), ys = range(heights.map((v) => Math.min(v, top)), chart.log_y);
    if (chart.from_zero) ys[0] = 0;
    xs[1] = Math.max(...all.map((p) => p[0]), xs[0] + 1e-9);
    const { box, x, y } = frame(svg, width, height, chart, xs, ys, chart.log_y);
    const clip = `clip-${chart.id}`;
    const shape = element(element(svg, "clipPath", { id: clip }), "rect", { x: box.left - 4, y: box.top - 4 });
    shape.setAttribute("width", box.right - box.left + 8);
    shape.setAttribute("height", box.bottom - box.top + 8);
    const lines = element(svg, "g", { "clip-path": `url(#${clip})` });
    const drawable = (p) => !chart.log_y || p[1] > 0;
    const trace = (points) => points.map((p) => `${x(p[0]).toFixed(1)} ${y(p[1]).toFixed(1)}`).join("L");
    for (const series of shown) {
      const band = series.band.filter(drawable);
      if (!band.length) continue;
      const edge = [...band.map((b) => [b[0], b[2]]), ...band.toReversed().map((b) => [b[0], b[1]])];
      element(lines, "path", { class: "band", d: `M${trace(edge)}Z` }).style.fill = colour(series);
    }
    for (const series of shown) {
      const points = series.points.filter(drawable);
      mark(lines, series, points.length ? `M${trace(points)}` : "").dataset.label = series.label;
      if (points.length > 40) continue;
      for (const p of points) element(lines, "circle", { cx: x(p[0]), cy: y(p[1]), r: 3 }).style.fill = colour(series);
    }
    const cursor = element(svg, "line", { class: "cursor", y1: box.top, y2: box.bottom, visibility: "hidden" });
    svg.addEventListener("pointermove", (event) => {
      const at = xs[0] + ((event.clientX - svg.getBoundingClientRect().left - box.left) / (box.right - box.left)) * (xs[1] - xs[0]);
      const near = shown.map((s) => [s, s.points.reduce((a, b) => (Math.abs(b[0] - at) < Math.abs(a[0] - at) ? b : a))]);
      if (!near.length) return;
      const first = near.reduce((a, b) => (Math.abs(b[1][0] - at) < Math.abs(a[1][0] - at) ? b : a))[1][0];
      for (const key of ["x1", "x2"]) cursor.setAttribute(key, x(first));
      cursor.setAttribute("visibility", "visible");
      const rows = near.sort((a, b) => b[1][1] - a[1][1]).map(([s, p]) => row(s.label, short(p[1]), colour(s)));
      showTip(figure, event, [row(`${short(first)} ${chart.x_label}`), ...rows]);
    });
    leave(svg, figure, () => cursor.setAttribute("visibility", "hidden"));
  }

  function leave(svg, figure, also = () => {}) {
    svg.addEventListener("pointerleave", () => { figure.querySelector(".tip")?.remove(); also(); });
  }

  // Load relative to the mean -> colour: even is neutral, four times as much or as little is full colour.
  function loadColour() {
    const style = getComputedStyle(document.documentElement);
    const [cold, even, hot] = ["--cold", "--even", "--hot"].map((name) => {
      const hex = style.getPropertyValue(name).trim();
      return [1, 3, 5].map((i) => parseInt(hex.slice(i, i + 2), 16));
    });
    return (load) => {
      const t = Math.max(-1, Math.min(1, Math.log2(Math.max(load, 1e-6)) / 2));
      const end = t < 0 ? cold : hot;
      return `rgb(${even.map((v, i) => Math.round(v + (end[i] - v) * Math.abs(t))).join(" ")})`;
    };
  }

  function heatMap(figure, map) {
    const experts = map.load[0].length;
    const made = canvasFor(figure, Math.min(Math.max(experts * 14, 96), 256) + 62, `${map.title}: load per expert over training tokens`);
    if (!made) return;
    const { svg, width } = made, height = +svg.getAttribute("height");
    const last = map.tokens[map.tokens.length - 1];
    const step = Math.max(1, Math.ceil(experts / 8));
    const yTicks = Array.from({ length: Math.ceil(experts / step) }, (_, i) => i * step);
    const spec = { y_label: "expert", x_label: "training tokens", yTicks, yCentre: true };
    const { box, x } = frame(svg, width, height, spec, [0, last], [experts, 0], false);
    const paint = loadColour(), ratio = window.devicePixelRatio || 1;
    const canvas = document.createElement("canvas"), w = box.right - box.left, h = box.bottom - box.top;
    canvas.width = Math.round(w * ratio); canvas.height = Math.round(h * ratio);
    const context = canvas.getContext("2d");
    map.load.forEach((column, i) => {
      const from = Math.floor((x(i ? map.tokens[i - 1] : 0) - box.left) * ratio);
      const to = Math.ceil((x(map.tokens[i]) - box.left) * ratio);
      column.forEach((load, e) => {
        const top = Math.floor((e * canvas.height) / experts), bottom = Math.floor(((e + 1) * canvas.height) / experts);
        context.fillStyle = paint(load);
        context.fillRect(from, top, to - from, bottom - top);
      });
    });
    const place = { x: box.left, y: box.top, width: w, height: h, preserveAspectRatio: "none" };
    element(svg, "image", { ...place, href: canvas.toDataURL() });
    svg.addEventListener("pointermove", (event) => {
      const bounds = svg.getBoundingClientRect();
      const tokens = ((event.clientX - bounds.left - box.left) / w) * last;
      const expert = Math.floor(((event.clientY - bounds.top - box.top) / h) * experts);
      if (tokens < 0 || tokens > last || expert < 0 || expert >= experts) { figure.querySelector(".tip")?.remove(); return; }
      const column = map.tokens.findIndex((t) => t >= tokens);
      const load = map.load[column][expert];
      showTip(figure, event, [
        row(`expert ${expert}, ${short(map.tokens[column])} tokens`),
        row("load / mean", load.toFixed(2)), row("share of slots", `${((100 * load) / experts).toFixed(1)}%`),
      ]);
    });
    leave(svg, figure);
  }

  function scaleKey(node) {
    node.replaceChildren();
    const paint = loadColour();
    element(node, "span", {}, "load / mean:");
    element(node, "span", {}, "¼ or less");
    const canvas = element(node, "canvas", { width: 180, height: 1 });
    const context = canvas.getContext("2d");
    for (let i = 0; i < 180; i++) { context.fillStyle = paint(2 ** ((i / 179) * 4 - 2)); context.fillRect(i, 0, 1, 1); }
    element(node, "span", {}, "4 or more");
    element(node, "span", {}, "(neutral: even)");
  }

  const drawers = [];
  for (const chart of charts) {
    const figure = document.getElementById(chart.id);
    if (!figure) continue;
    const hidden = new Set();
    const draw = chart.load ? () => heatMap(figure, chart) : () => lineChart(figure, chart, hidden);
    if (!chart.load) legend(figure, chart, hidden, draw);
    let before = -1;
    const resized = () => { if (figure.clientWidth !== before) { before = figure.clientWidth; draw(); } };
    new ResizeObserver(() => requestAnimationFrame(resized)).observe(figure);
    drawers.push(draw);
  }
  const keys = () => document.querySelectorAll(".scale").forEach(scaleKey);
  keys();
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { keys(); drawers.forEach((draw) => draw()); });
  window.addEventListener("beforeprint", () => document.querySelectorAll("details").forEach((d) => { d.open = true; }));
})();

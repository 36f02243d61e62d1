// Small charts in SVG. Colours come from the style sheet, so that light and dark are its business.

const SVG = "http://www.w3.org/2000/svg";

function element(name, attributes, text) {
  const made = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  if (text !== undefined) made.textContent = text;
  return made;
}

// The next of 1, 2, 5, 10, 20 ... above a value.
export function roundUp(value) {
  if (!(value > 0)) return 1;
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 5, 10].map((step) => step * power).find((step) => step >= value * 0.999);
}

export function format(value) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  if (value >= 1000) return Math.round(value).toLocaleString("en");
  return String(Number(value.toPrecision(3)));
}

// Lines over time. series: [{color, values}], each value a number or null for a gap; all of the same length.
export function drawLines(svg, series) {
  const { width, height } = svg.getBoundingClientRect();
  const left = 40, right = 6, top = 8, bottom = 6;
  const largest = roundUp(Math.max(0, ...series.flatMap((line) => line.values.filter((value) => value !== null))));
  const y = (value) => top + (height - top - bottom) * (1 - value / largest);
  svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
  svg.replaceChildren();
  for (const mark of [0, largest / 2, largest]) {
    svg.append(element("line", { class: "grid", x1: left, x2: width - right, y1: y(mark), y2: y(mark) }));
    svg.append(element("text", { x: left - 5, y: y(mark) + 4, "text-anchor": "end" }, format(mark)));
  }
  for (const { color, values } of series) {
    const step = (width - left - right) / Math.max(1, values.length - 1);
    let path = "";
    values.forEach((value, index) => {
      if (value === null) return;
      const begins = index === 0 || values[index - 1] === null;
      path += `${begins ? "M" : "L"}${(left + index * step).toFixed(1)} ${y(value).toFixed(1)}`;
      if (begins && (index === values.length - 1 || values[index + 1] === null)) path += "h0.1";
    });
    svg.append(
      element("path", { d: path, fill: "none", "stroke-width": 2, "stroke-linecap": "round", style: `stroke: var(${color})` }),
    );
  }
}

// Bars side by side. bars: [{name, share}] with shares from 0 to 1.
export function drawBars(svg, bars) {
  const { width, height } = svg.getBoundingClientRect();
  const bottom = 20, top = 16, gap = 6;
  svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
  svg.replaceChildren(element("line", { class: "grid", x1: 0, x2: width, y1: height - bottom, y2: height - bottom }));
  const slot = width / Math.max(bars.length, 1);
  bars.forEach(({ name, share }, index) => {
    const tall = (height - top - bottom) * share;
    const x = index * slot + gap / 2;
    const shape = { x, y: height - bottom - tall, width: Math.max(slot - gap, 1), height: tall, rx: 2 };
    svg.append(element("rect", { ...shape, style: "fill: var(--first)" }));
    const middle = { x: x + (slot - gap) / 2, "text-anchor": "middle" };
    svg.append(element("text", { ...middle, y: height - 6 }, name));
    if (share >= 0.01) svg.append(element("text", { ...middle, y: height - bottom - tall - 4 }, `${Math.round(share * 100)}%`));
  });
}

// Gripper and goal from above and from the side; points are [x, y, z] in metres.
export function drawScene(svg, path, goal) {
  const size = 300, half = size / 2;
  svg.setAttribute("viewBox", `0 0 ${size} ${size}`);
  svg.replaceChildren();
  const all = [...path, goal];
  const middle = [0, 1, 2].map((axis) => (Math.min(...all.map((p) => p[axis] ?? 0)) + Math.max(...all.map((p) => p[axis] ?? 0))) / 2);
  const reach = Math.max(0.1, ...all.map((p) => Math.max(...[0, 1, 2].map((axis) => Math.abs((p[axis] ?? 0) - middle[axis])))));
  const views = [[0, 1, half / 2, "from above"], [0, 2, half * 1.5, "from the side"]];
  for (const [across, up, centre, name] of views) {
    const place = (p) => [half + (((p[across] ?? 0) - middle[across]) / reach) * 130, centre - (((p[up] ?? 0) - middle[up]) / reach) * 62];
    svg.append(element("text", { x: 6, y: centre - half / 2 + 14 }, name));
    svg.append(element("line", { class: "grid", x1: 0, x2: size, y1: centre + half / 2, y2: centre + half / 2 }));
    const line = path.map((p) => place(p).map((v) => v.toFixed(1)).join(" ")).join("L");
    svg.append(element("path", { d: `M${line}`, fill: "none", "stroke-width": 1.5, style: "stroke: var(--first)" }));
    const [gx, gy] = place(goal);
    svg.append(element("circle", { cx: gx, cy: gy, r: 7, fill: "none", "stroke-width": 3, style: "stroke: var(--second)" }));
    const [px, py] = place(path[path.length - 1]);
    svg.append(element("circle", { cx: px, cy: py, r: 5, style: "fill: var(--first)" }));
  }
}

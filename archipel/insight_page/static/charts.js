/* Pictures of numbers: histograms as SVG, lines over steps by uPlot, each with the same numbers as a table. */

/** Bars of a tensor's numbers, and their mean and deviation in words. */
function histogram(statistics, title, width = 280, height = 90) {
  if (!statistics.counts.length) return statisticsList(statistics);
  const most = Math.max(...statistics.counts, 1);
  const step = width / statistics.counts.length;
  const bars = statistics.counts.map((count, place) =>
    svg("rect", {
      class: "hist",
      x: (place * step).toFixed(2),
      width: Math.max(0.5, step - 0.6).toFixed(2),
      y: (height - (count / most) * height).toFixed(2),
      height: ((count / most) * height).toFixed(2),
    }),
  );
  const words = `${title}: ${countText(statistics.count)} numbers from ${numberText(statistics.low)} to ${numberText(
    statistics.high,
  )}, mean ${numberText(statistics.mean)}, deviation ${numberText(statistics.deviation)}`;
  const picture = svg(
    "svg",
    { class: "histogram", viewBox: `0 0 ${width} ${height + 16}`, role: "img", "aria-label": words },
    ...bars,
    svg("line", { class: "axis", x1: 0, x2: width, y1: height, y2: height }),
    svg("text", { class: "tick", x: 0, y: height + 13 }, numberText(statistics.low)),
    svg("text", { class: "tick", x: width, y: height + 13, "text-anchor": "end" }, numberText(statistics.high)),
  );
  return el("div", {}, picture, statisticsList(statistics));
}

function statisticsList(statistics) {
  const pairs = [["numbers", countText(statistics.count)]];
  if (statistics.mean !== null) {
    pairs.push(["mean", numberText(statistics.mean)], ["deviation", numberText(statistics.deviation)]);
    pairs.push(["least", numberText(statistics.low)], ["largest", numberText(statistics.high)]);
    pairs.push(["zeros", shareText(statistics.zeros)]);
  }
  if (statistics.odd) pairs.push(["not finite", countText(statistics.odd)]);
  if (statistics.sample.length) pairs.push(["all of them", statistics.sample.join(", ")]);
  return factList(pairs);
}

const LINES = ["--line-1", "--line-2", "--line-3", "--line-4", "--line-5", "--line-6"];
const WHOLE = [1, 2, 5].flatMap((number) => [1, 1e1, 1e2, 1e3, 1e4, 1e5, 1e6, 1e7, 1e8].map((ten) => number * ten)).sort((a, b) => a - b);
const DASHES = [[], [6, 4], [2, 3], [10, 4, 2, 4]];

/**
 * Lines over steps.
 *
 * series: [{name, steps, values}]; options: {x, y: numbers to text, stepped, label}
 */
function lineChart(series, options = {}) {
  const box = el("div", { class: "chart", role: "img", "aria-label": chartWords(series, options) });
  const steps = [...new Set(series.flatMap((each) => each.steps))].sort((a, b) => a - b);
  const place = new Map(steps.map((step, at) => [step, at]));
  const columns = series.map((each) => {
    const column = new Array(steps.length).fill(undefined);
    each.steps.forEach((step, at) => (column[place.get(step)] = each.values[at]));
    return column;
  });
  const whole = steps.every(Number.isInteger);
  const text = options.y ?? ((number) => numberText(number));
  let plot = null;

  function draw() {
    plot?.destroy();
    if (!box.isConnected || !box.clientWidth) return;
    const axis = { stroke: colour("--soft"), grid: { stroke: colour("--grid"), width: 1 }, ticks: { show: false } };
    const path = options.stepped ? { paths: uPlot.paths.stepped({ align: 1 }), fill: colour("--tint") } : {};
    plot = new uPlot(
      {
        width: box.clientWidth,
        height: 260,
        scales: { x: { time: false } },
        legend: { markers: { width: 3 } },
        axes: [{ ...axis, label: options.x ?? "step", labelSize: 22, size: 34, ...(whole ? { incrs: WHOLE } : {}) }, { ...axis, size: 72, values: (_, ticks) => ticks.map(text) }],
        series: [
          { label: options.x ?? "step" },
          ...series.map((each, at) => ({
            label: each.name,
            stroke: colour(LINES[at % LINES.length]),
            dash: DASHES[Math.floor(at / LINES.length) % DASHES.length],
            width: 2,
            spanGaps: true,
            points: { show: steps.length < 60 && !options.stepped, size: 5 },
            value: (_, number) => (number === null || number === undefined ? "\u2013" : text(number)),
            ...path,
          })),
        ],
      },
      [steps, ...columns],
      box,
    );
  }

  // The canvas takes its size and its colours when it is made.
  new ResizeObserver(draw).observe(box);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
  return el("div", {}, box, seriesTable(series, options, text));
}

function chartWords(series, options) {
  const parts = series.map((each) => {
    const known = each.values.filter((value) => value !== null);
    return known.length ? `${each.name} from ${numberText(known[0])} to ${numberText(known[known.length - 1])}` : each.name;
  });
  return `${options.label ?? "Lines"} over ${options.x ?? "steps"}: ${parts.slice(0, 12).join("; ")}`;
}

function seriesTable(series, options, text) {
  const holder = el("details", {}, el("summary", {}, "The same as a table"));
  holder.addEventListener("toggle", () => {
    if (!holder.open || holder.children.length > 1) return;
    const rows = new Map();
    series.forEach((each, at) =>
      each.steps.forEach((step, place) => {
        if (!rows.has(step)) rows.set(step, { step, values: [] });
        rows.get(step).values[at] = each.values[place];
      }),
    );
    const columns = [{ title: options.x ?? "step", value: (row) => row.step, number: true }];
    series.forEach((each, at) =>
      columns.push({
        title: each.name,
        value: (row) => row.values[at] ?? null,
        show: (row) => (typeof row.values[at] === "number" ? text(row.values[at]) : "\u2013"),
        number: true,
      }),
    );
    const sorted = [...rows.values()].sort((a, b) => a.step - b.step);
    holder.append(makeTable(columns, sorted, { caption: options.label ?? "Numbers" }));
  });
  return holder;
}

/* Histograms of one tensor over the rounds: a row of hills, the newest in front, and the same as a table. */

const HILL = 46;
const GAP = 15;
const MOST_HILLS = 24;

function hills(series) {
  const drawn = thin(series.steps.filter((step) => step.statistics.counts.length), MOST_HILLS);
  if (!drawn.length) return note("no numbers to draw");
  const low = Math.min(...drawn.map((step) => step.statistics.low));
  const high = Math.max(...drawn.map((step) => step.statistics.high));
  const span = high - low || 1;
  const width = 620;
  const labels = 74;
  const height = HILL + GAP * drawn.length;
  const most = Math.max(...drawn.map((step) => density(step.statistics)));
  const rows = drawn.map((step, at) => {
    const base = HILL + GAP * at;
    const { counts } = step.statistics;
    const wide = (step.statistics.high - step.statistics.low || span / counts.length) / counts.length;
    const points = counts.map((count, place) => {
      const x = ((step.statistics.low + wide * (place + 0.5) - low) / span) * width;
      return `${Math.max(0, Math.min(width, x)).toFixed(1)},${(base - (count / step.statistics.count / wide / most) * HILL).toFixed(1)}`;
    });
    const [first] = points[0].split(",");
    const [last] = points[points.length - 1].split(",");
    return svg(
      "g",
      {},
      svg("path", { class: "hill", d: `M${first},${base}L${points.join("L")}L${last},${base}Z` }),
      svg("text", { class: "tick", x: width + 8, y: base + 1 }, step.label),
    );
  });
  const picture = svg(
    "svg",
    {
      class: "hills",
      viewBox: `0 0 ${width + labels} ${height + 18}`,
      role: "img",
      "aria-label": `${series.name}: histograms of ${drawn.length} versions from ${numberText(low)} to ${numberText(high)}`,
    },
    ...rows,
    svg("text", { class: "tick", x: 0, y: height + 15 }, numberText(low)),
    svg("text", { class: "tick", x: width, y: height + 15, "text-anchor": "end" }, numberText(high)),
  );
  const columns = [
    { title: "version", value: (row) => row.step, show: (row) => row.label },
    { title: "mean", value: (row) => row.statistics.mean, show: (row) => numberText(row.statistics.mean), number: true },
    { title: "deviation", value: (row) => row.statistics.deviation, show: (row) => numberText(row.statistics.deviation), number: true },
    { title: "least", value: (row) => row.statistics.low, show: (row) => numberText(row.statistics.low), number: true },
    { title: "largest", value: (row) => row.statistics.high, show: (row) => numberText(row.statistics.high), number: true },
    { title: "zeros", value: (row) => row.statistics.zeros, show: (row) => shareText(row.statistics.zeros), number: true },
    { title: "not finite", value: (row) => row.statistics.odd, number: true },
  ];
  const table = el(
    "details",
    {},
    el("summary", {}, "The same as a table"),
    makeTable(columns, series.steps, { caption: `${series.name} over the versions` }),
  );
  return el("div", {}, picture, table);
}

/** The histograms of all versions, one after the other; one that cannot be had is left out, and said. */
async function fetchHistograms(say) {
  const series = new Map();
  const missing = [];
  for (const [step, { label, from }] of versions.entries()) {
    const what = `${label}, ${step + 1} of ${versions.length}`;
    say(`Reading the weights of ${what}`);
    try {
      for (const { name, statistics } of (await ask(from, () => say(`The server reads the weights of ${what}`))).tensors) {
        if (!series.has(name)) series.set(name, { name, kind: "weights", steps: [] });
        series.get(name).steps.push({ step, label, statistics });
      }
    } catch (error) {
      missing.push(`${label}: ${error.message}`);
    }
  }
  if (missing.length && !series.size) throw new Told(missing.join(" "));
  if (missing.length) tell(missing.join(" "));
  return [...series.values()];
}

/** The highest part of a histogram as a density, so that versions of different width compare. */
function density(statistics) {
  const wide = (statistics.high - statistics.low || 1) / statistics.counts.length;
  return Math.max(...statistics.counts) / statistics.count / wide;
}

function thin(items, most) {
  if (items.length <= most) return items;
  return Array.from({ length: most }, (_, at) => items[Math.round((at * (items.length - 1)) / (most - 1))]);
}

/* Tables that sort by a click on a heading, and can be searched. Long ones are drawn in part. */

const SHOWN = 200;

/**
 * A table.
 *
 * columns: {title, value: row -> number or text to sort by, show: row -> text or element, number: whether it is one}
 * options: {caption, sort: place of a column (the largest first), filter: row -> text to search in, onrow: row -> void}
 */
function makeTable(columns, rows, options = {}) {
  let sorted = options.sort ?? -1;
  let down = true;
  let words = "";
  let limit = SHOWN;
  const body = el("tbody");
  const headings = columns.map((column, place) =>
    el(
      "th",
      { scope: "col", class: column.number ? "n" : null },
      el("button", { type: "button", onclick: () => sortBy(place) }, column.title),
    ),
  );
  const more = el("button", { type: "button", class: "quiet", onclick: () => draw((limit += 1000)) });
  const table = el(
    "table",
    {},
    options.caption ? el("caption", {}, options.caption) : null,
    el("thead", {}, el("tr", {}, ...headings)),
    body,
  );

  function sortBy(place) {
    down = sorted === place ? !down : Boolean(columns[place].number);
    sorted = place;
    draw();
  }

  function draw() {
    let found = rows;
    if (words) found = found.filter((row) => options.filter(row).toLowerCase().includes(words));
    if (sorted >= 0) {
      const key = columns[sorted].value;
      const sign = down ? -1 : 1;
      found = [...found].sort((a, b) => sign * compareKeys(key(a), key(b)));
    }
    headings.forEach((heading, place) => {
      if (place === sorted) heading.setAttribute("aria-sort", down ? "descending" : "ascending");
      else heading.removeAttribute("aria-sort");
    });
    body.replaceChildren(...found.slice(0, limit).map(makeRow));
    more.textContent = `${countText(found.length)} rows, ${countText(Math.min(limit, found.length))} shown: show more`;
    more.hidden = found.length <= limit;
  }

  function makeRow(row) {
    const cells = columns.map((column, place) => {
      const shown = column.show ? column.show(row) : String(column.value(row));
      const inside =
        place === 0 && options.onrow
          ? el("button", { type: "button", class: "link", onclick: () => options.onrow(row) }, shown)
          : shown;
      return el(place === 0 ? "th" : "td", { scope: place === 0 ? "row" : null, class: column.number ? "n" : null }, inside);
    });
    return el("tr", {}, ...cells);
  }

  const parts = [el("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": options.caption || "Table" }, table), more];
  if (options.filter && rows.length > 12) {
    const input = el("input", {
      type: "search",
      placeholder: "Filter",
      "aria-label": `Filter: ${options.caption || "table"}`,
      oninput: () => {
        words = input.value.toLowerCase();
        draw();
      },
    });
    parts.unshift(input);
  }
  draw();
  return el("div", { class: "table" }, ...parts);
}

function compareKeys(a, b) {
  if (a === b) return 0;
  if (a === null || a === undefined) return -1;
  if (b === null || b === undefined) return 1;
  return a < b ? -1 : 1;
}

/** A bar for a share from 0 to 1, with the share in words beside it. */
function shareBar(share) {
  const inside = el("span", { class: "fill" });
  inside.style.width = `${Math.max(0, Math.min(1, share)) * 100}%`;
  return el("span", { class: "bar" }, el("span", { class: "track", "aria-hidden": "true" }, inside), shareText(share));
}

/** A list of names and values. */
function factList(pairs) {
  return el("dl", { class: "facts" }, ...pairs.flatMap(([name, text]) => [el("dt", {}, name), el("dd", {}, text)]));
}

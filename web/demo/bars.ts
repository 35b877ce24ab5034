/** The ten bars beside the pad: how sure the model is, its published version above in grey. */

const SVG = "http://www.w3.org/2000/svg";

interface Row {
  item: HTMLLIElement;
  mine: SVGRectElement;
  published: SVGRectElement;
  percent: HTMLOutputElement;
}

export class Bars {
  private readonly rows: Row[];

  constructor(list: HTMLElement) {
    this.rows = Array.from({ length: 10 }, (_, digit) => {
      const item = document.createElement("li");
      const name = document.createElement("span");
      name.textContent = String(digit);
      const picture = document.createElementNS(SVG, "svg");
      picture.setAttribute("aria-hidden", "true");
      const published = bar("published", "0", "30%");
      const mine = bar("mine", "30%", "70%");
      picture.append(published, mine);
      const percent = document.createElement("output");
      item.append(name, picture, percent);
      list.append(item);
      return { item, mine, published, percent };
    });
  }

  /** Probabilities of the ten digits; without them the bars are empty. */
  show(mine?: readonly number[], published?: readonly number[]): void {
    const best = mine === undefined ? -1 : highest(mine);
    this.rows.forEach((row, digit) => {
      const value = mine?.[digit];
      row.item.classList.toggle("top", digit === best);
      row.mine.setAttribute("width", percent(value ?? 0));
      row.published.setAttribute("width", percent(published?.[digit] ?? 0));
      row.percent.textContent = value === undefined ? "" : `${Math.round(100 * value)} %`;
    });
  }
}

export function highest(values: ArrayLike<number>): number {
  let best = 0;
  for (let index = 1; index < values.length; index += 1) {
    if ((values[index] ?? 0) > (values[best] ?? 0)) best = index;
  }
  return best;
}

function bar(kind: string, y: string, height: string): SVGRectElement {
  const rect = document.createElementNS(SVG, "rect");
  rect.setAttribute("class", kind);
  rect.setAttribute("y", y);
  rect.setAttribute("height", height);
  rect.setAttribute("width", "0");
  return rect;
}

function percent(value: number): string {
  return `${(100 * value).toFixed(1)}%`;
}

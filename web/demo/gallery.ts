/** One's own digits as pictures, each with its label, what the model says, and a button to remove it. */

import type { OwnDigit } from "./own_digits.js";
import { SIDE } from "./raster.js";

export class Gallery {
  constructor(
    private readonly list: HTMLElement,
    /** Gets the focus when the last digit is removed. */
    private readonly title: HTMLElement,
    private readonly onRemove: (id: number) => void,
  ) {}

  /** `answers[i]` is what the model says about `digits[i]`. */
  show(digits: readonly OwnDigit[], answers: readonly number[]): void {
    const before = [...this.list.querySelectorAll("button")];
    const focused = before.findIndex((button) => button === document.activeElement);
    const same = before[focused]?.dataset.id;
    const items = digits.map((digit, index) => this.item(digit, answers[index]));
    this.list.replaceChildren(...items.reverse());
    if (focused < 0) return;
    // The same digit's, or the one's that has taken the place of a digit that was removed.
    const now = [...this.list.querySelectorAll("button")];
    const next = now.find((button) => button.dataset.id === same) ?? now[Math.min(focused, now.length - 1)];
    (next ?? this.title).focus({ preventScroll: true });
  }

  private item(digit: OwnDigit, answer: number | undefined): HTMLLIElement {
    const item = document.createElement("li");
    const words = document.createElement("span");
    const wrong = answer !== undefined && answer !== digit.label;
    words.textContent = wrong ? `${digit.label}, not ${answer}` : String(digit.label);
    words.classList.toggle("wrong", wrong);
    const remove = document.createElement("button");
    remove.type = "button";
    remove.dataset.id = String(digit.id);
    remove.textContent = "×";
    remove.setAttribute("aria-label", `Remove this ${digit.label}`);
    remove.addEventListener("click", () => this.onRemove(digit.id));
    item.append(picture(digit.image), words, remove);
    return item;
  }
}

/** What the network sees: white ink on black. */
function picture(image: Uint8Array): HTMLCanvasElement {
  const canvas = document.createElement("canvas");
  canvas.width = SIDE;
  canvas.height = SIDE;
  canvas.setAttribute("aria-hidden", "true");
  const pixels = new ImageData(SIDE, SIDE);
  image.forEach((value, at) => pixels.data.set([value, value, value, 255], 4 * at));
  canvas.getContext("2d")?.putImageData(pixels, 0, 0);
  return canvas;
}

/** The drawing pad: mouse, touch and pen by pointer events, and the keyboard (arrow keys and space). */

import type { Point, Stroke } from "./raster.js";

const LINE = 0.075;
const STEP = 0.04;
const DIRECTIONS: Record<string, readonly [number, number]> = {
  ArrowLeft: [-STEP, 0],
  ArrowRight: [STEP, 0],
  ArrowUp: [0, -STEP],
  ArrowDown: [0, STEP],
};

export class Pad {
  private drawn: Stroke[] = [];
  private pointer: number | undefined;
  private cursor: Point = { x: 0.5, y: 0.5 };
  private keyboardPenDown = false;
  private keyboardUsed = false;
  /** The next stroke begins a new drawing: what is there was labelled. */
  private finished = false;

  /** `onChange` is called after every point; `onRelease` when the pen is lifted. */
  constructor(
    private readonly canvas: HTMLCanvasElement,
    private readonly onChange: () => void,
    private readonly onRelease: () => void,
  ) {
    canvas.addEventListener("pointerdown", (event) => this.press(event));
    canvas.addEventListener("pointermove", (event) => this.move(event));
    canvas.addEventListener("pointerup", (event) => this.release(event));
    canvas.addEventListener("pointercancel", (event) => this.release(event));
    canvas.addEventListener("keydown", (event) => this.key(event));
    canvas.addEventListener("blur", () => this.leave());
    new ResizeObserver(() => this.paint()).observe(canvas);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.paint());
  }

  get strokes(): readonly Stroke[] {
    return this.drawn;
  }

  clear(): void {
    this.drawn = [];
    this.finished = false;
    this.keyboardPenDown = false;
    this.cursor = { x: 0.5, y: 0.5 };
    this.paint();
    this.onChange();
  }

  /** Keep the drawing to look at; the next stroke starts anew. */
  finish(): void {
    this.finished = true;
    this.keyboardPenDown = false;
    this.paint();
  }

  private press(event: PointerEvent): void {
    if (this.pointer !== undefined || (event.pointerType === "mouse" && event.button !== 0)) return;
    event.preventDefault();
    this.canvas.focus({ preventScroll: true });
    this.keyboardUsed = false;
    this.keyboardPenDown = false;
    this.pointer = event.pointerId;
    this.canvas.setPointerCapture(event.pointerId);
    this.begin(this.place(event));
  }

  private move(event: PointerEvent): void {
    if (event.pointerId !== this.pointer) return;
    const events = event.getCoalescedEvents();
    for (const each of events.length > 0 ? events : [event]) this.extend(this.place(each));
    this.changed();
  }

  private release(event: PointerEvent): void {
    if (event.pointerId !== this.pointer) return;
    this.pointer = undefined;
    this.onRelease();
  }

  private key(event: KeyboardEvent): void {
    const direction = DIRECTIONS[event.key];
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    if (direction !== undefined) {
      this.cursor = { x: within(this.cursor.x + direction[0]), y: within(this.cursor.y + direction[1]) };
      if (this.keyboardPenDown) this.extend({ ...this.cursor });
    } else if (event.key === " ") {
      this.keyboardPenDown = !this.keyboardPenDown;
      if (this.keyboardPenDown) this.begin({ ...this.cursor });
      else this.onRelease();
    } else {
      return;
    }
    event.preventDefault();
    this.keyboardUsed = true;
    this.changed();
  }

  private leave(): void {
    if (this.keyboardPenDown) this.onRelease();
    this.keyboardPenDown = false;
    this.keyboardUsed = false;
    this.paint();
  }

  private begin(point: Point): void {
    if (this.finished) this.drawn = [];
    this.finished = false;
    this.drawn.push([point]);
    this.changed();
  }

  private extend(point: Point): void {
    const last = this.drawn.at(-1);
    const end = last?.at(-1);
    if (last !== undefined && (end?.x !== point.x || end.y !== point.y)) last.push(point);
  }

  private changed(): void {
    this.paint();
    this.onChange();
  }

  private place(event: PointerEvent): Point {
    const box = this.canvas.getBoundingClientRect();
    return { x: within((event.clientX - box.left) / box.width), y: within((event.clientY - box.top) / box.height) };
  }

  private paint(): void {
    const context = this.canvas.getContext("2d");
    const side = Math.round(this.canvas.clientWidth * devicePixelRatio);
    if (context === null || side === 0) return;
    if (this.canvas.width !== side) {
      this.canvas.width = side;
      this.canvas.height = side;
    }
    const style = getComputedStyle(this.canvas);
    context.clearRect(0, 0, side, side);
    context.lineCap = "round";
    context.lineJoin = "round";
    context.lineWidth = LINE * side;
    context.strokeStyle = style.getPropertyValue(this.finished ? "--ink-done" : "--ink");
    for (const stroke of this.drawn) {
      context.beginPath();
      stroke.forEach((point, index) => {
        if (index === 0) context.moveTo(point.x * side, point.y * side);
        context.lineTo(point.x * side, point.y * side);
      });
      context.stroke();
    }
    if (this.keyboardUsed) {
      context.beginPath();
      context.lineWidth = 2 * devicePixelRatio;
      context.strokeStyle = style.getPropertyValue("--accent");
      context.arc(this.cursor.x * side, this.cursor.y * side, (LINE * side) / 2, 0, 2 * Math.PI);
      context.stroke();
    }
  }
}

function within(value: number): number {
  return Math.min(1, Math.max(0, value));
}

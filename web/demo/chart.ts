/** The loss of every step so far, drawn while training runs: thin as measured, thick as a moving mean. */

import uPlot from "uplot";
import "uplot/dist/uPlot.min.css";

const WINDOW = 8;

export class LossChart {
  private losses: number[] = [];
  private plot: uPlot | undefined;
  private due = false;

  /** `caption` gets the same in words. */
  constructor(
    private readonly box: HTMLElement,
    private readonly caption: HTMLElement,
  ) {
    new ResizeObserver(() => this.plot?.setSize({ width: box.clientWidth, height: box.clientHeight })).observe(box);
    // The canvas takes its colours when it is made.
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
      this.plot?.destroy();
      this.plot = undefined;
      this.draw();
    });
  }

  show(losses: readonly number[]): void {
    this.losses = [...losses];
    this.schedule();
  }

  add(loss: number): void {
    this.losses.push(loss);
    this.schedule();
  }

  /** Once per frame, however fast the steps come. */
  private schedule(): void {
    if (this.due) return;
    this.due = true;
    requestAnimationFrame(() => {
      this.due = false;
      this.draw();
    });
  }

  private draw(): void {
    const steps = this.losses.map((_, index) => index + 1);
    const data: uPlot.AlignedData = [steps, this.losses, movingMean(this.losses)];
    this.plot ??= new uPlot(this.options(), data, this.box);
    this.plot.setData(data);
    const last = this.losses.at(-1);
    this.caption.textContent =
      last === undefined
        ? "The loss of every training step appears here."
        : `Loss ${last.toFixed(3)} after ${this.losses.length} ${this.losses.length === 1 ? "step" : "steps"}.`;
  }

  private options(): uPlot.Options {
    const style = getComputedStyle(this.box);
    const colour = (name: string): string => style.getPropertyValue(name).trim();
    const axis: uPlot.Axis = {
      stroke: colour("--soft"),
      grid: { stroke: colour("--line"), width: 1 },
      ticks: { show: false },
      font: "12px system-ui, sans-serif",
    };
    return {
      width: this.box.clientWidth,
      height: this.box.clientHeight,
      legend: { show: false },
      cursor: { show: false },
      scales: {
        x: { time: false, range: (_, __, most) => [1, Math.max(20, most)] },
        y: { range: (_, __, most) => [0, Math.max(0.1, most * 1.05)] },
      },
      axes: [
        { ...axis, size: 30 },
        { ...axis, size: 44 },
      ],
      series: [
        {},
        { label: "loss", stroke: colour("--published"), width: 1, points: { show: false } },
        { label: "moving mean", stroke: colour("--accent"), width: 2.5, points: { show: false } },
      ],
    };
  }
}

function movingMean(values: readonly number[]): number[] {
  let sum = 0;
  return values.map((value, index) => {
    sum += value - (index >= WINDOW ? (values[index - WINDOW] ?? 0) : 0);
    return sum / Math.min(WINDOW, index + 1);
  });
}

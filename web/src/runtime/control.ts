/** Pausing, resuming and cancelling from outside; effective between two steps. */

import { breathe } from "./turn.js";

/** For how long, in milliseconds, steps may follow each other before other tasks get their turn. */
const SLICE = 12;

/** What a runtime's trainings are told. `pause` holds the present one and those to come, `cancel` ends those asked for. */
export class Control {
  paused = false;
  private readonly runs = new Set<Run>();

  pause(): void {
    this.paused = true;
  }

  resume(): void {
    this.paused = false;
    for (const run of this.runs) run.wake();
  }

  cancel(): void {
    for (const run of this.runs) {
      run.cancelled = true;
      run.wake();
    }
  }

  /** Have `work` done by a training that can be told to end from this moment on. */
  async during<T>(work: (run: Run) => Promise<T>): Promise<T> {
    const run = new Run(this);
    this.runs.add(run);
    try {
      return await work(run);
    } finally {
      this.runs.delete(run);
    }
  }
}

/** One training, as its control sees it. */
export class Run {
  cancelled = false;
  aborted: { readonly reason: unknown } | null = null;
  wake: () => void = () => undefined;
  private breathed = performance.now();

  constructor(private readonly control: Control) {}

  /** End it as if it had never begun: the work raises `reason`. */
  abort(reason: unknown): void {
    this.aborted = { reason };
    this.cancelled = true;
    this.wake();
  }

  /** Called by the one that trains: false if it shall end. Raises the reason of `abort`. */
  async betweenSteps(onPause: () => Promise<void>): Promise<boolean> {
    if (performance.now() - this.breathed >= SLICE) {
      await breathe();
      this.breathed = performance.now();
    }
    if (this.held) {
      await onPause();
      while (this.held) {
        await new Promise<void>((resolve) => {
          this.wake = resolve;
        });
      }
    }
    if (this.aborted !== null) throw this.aborted.reason;
    return !this.cancelled;
  }

  private get held(): boolean {
    return this.control.paused && !this.cancelled;
  }
}

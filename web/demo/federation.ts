/**
 * "Join this federation": the page as a device of the server that it comes from. Nothing of it is loaded before that.
 */

import type { Device, DeviceEvent, Examples } from "../src/device/index.js";
import { setDisabled } from "./focus.js";

interface Elements {
  readonly token: HTMLInputElement;
  readonly join: HTMLButtonElement;
  readonly rest: HTMLButtonElement;
  readonly leave: HTMLButtonElement;
  readonly status: HTMLElement;
}

const WORDS: Partial<Record<DeviceEvent["name"], string>> = {
  waiting: "Joined. Waiting for a round.",
  assigned: "In a round: training with your digits.",
  resumed: "In a round: going on with it.",
  advertised: "In a round: agreeing on masks with the other devices.",
  masked: "In a round: sending the masked update.",
  confirmed: "In a round: waiting for its result.",
};

export class Federation {
  private device: Device | null = null;
  private resting = false;
  private rounds = 0;
  /** What the last round came to; it stays while the device waits for the next. */
  private last = "";

  /** `joined` says that the page joined before, which it goes on with; `remember` keeps whether it has joined. */
  constructor(
    private readonly elements: Elements,
    private readonly examples: () => Promise<Examples>,
    joined: boolean,
    private readonly remember: (joined: boolean) => void,
  ) {
    const { token, join, rest, leave } = elements;
    token.addEventListener("change", () => this.enable());
    join.addEventListener("click", () => void this.tell(() => this.join()));
    rest.addEventListener("click", () => void this.tell(() => this.rest()));
    leave.addEventListener("click", () => void this.tell(() => this.leave()));
    if (joined) void this.tell(() => this.work());
  }

  private async join(): Promise<void> {
    const text = (await this.elements.token.files?.[0]?.text()) ?? "";
    const device = await this.open();
    try {
      await device.enrol(text);
    } catch (error) {
      await device.close();
      this.device = null;
      throw error;
    }
    this.remember(true);
    await this.work();
  }

  private async work(): Promise<void> {
    const device = await this.open();
    const report = await device.report();
    this.rounds = report.totals.tookPart;
    this.resting = report.paused !== null;
    this.enable();
    this.say(this.resting ? "Paused." : "Joined. Waiting for a round.");
    void this.tell(() => device.runForever());
  }

  private async rest(): Promise<void> {
    this.resting = !this.resting;
    await (this.resting ? this.device?.pause() : this.device?.resume());
    this.say(this.resting ? "Paused." : "Joined. Waiting for a round.");
  }

  private async leave(): Promise<void> {
    const { device } = this;
    this.device = null;
    await device?.erase();
    this.remember(false);
    this.last = "";
    this.say("You have left. This device’s keys are destroyed; a new token lets you join again.");
  }

  private async open(): Promise<Device> {
    if (this.device !== null) return this.device;
    this.say("Loading what takes part in rounds…");
    const { openDevice } = await import("../src/device/index.js");
    // This server only: the page may talk to no other.
    const server = location.origin;
    this.device = await openDevice({ server, examples: this.examples, onEvent: (event) => this.happened(event) });
    return this.device;
  }

  private happened({ name, detail }: DeviceEvent): void {
    if (this.device === null) return;
    if (name === "committed") {
      this.rounds += 1;
      this.last = `Your masked update was in ${this.rounds === 1 ? "a round" : `${this.rounds} rounds`}.`;
    }
    if (name === "refused" || name === "dropped") {
      this.last = `The last round went on without this device: ${detail.reason}.`;
    }
    const words = this.resting && name === "paused" ? "Paused." : WORDS[name];
    if (words !== undefined) this.say([words, this.last].filter(Boolean).join(" "));
  }

  private say(words: string): void {
    const { status } = this.elements;
    if (status.textContent !== words) status.textContent = words;
    this.enable();
  }

  private enable(): void {
    const { token, join, rest, leave } = this.elements;
    const joined = this.device !== null;
    token.disabled = joined;
    setDisabled(join, joined || !token.files?.length, token);
    setDisabled(rest, !joined, token);
    setDisabled(leave, !joined, token);
    rest.textContent = this.resting ? "Go on" : "Pause";
  }

  private async tell(work: () => Promise<void>): Promise<void> {
    try {
      await work();
    } catch (error) {
      const words = error instanceof Error ? error.message : String(error);
      // After `leave` nobody waits for what the device did.
      if (!words.startsWith("this device was closed")) this.say(words);
    }
  }
}

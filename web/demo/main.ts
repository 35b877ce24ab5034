/** The page: what happens when something is drawn, answered, trained, removed or reset. */

import { CheckpointError } from "../src/index.js";
import { Bars, highest } from "./bars.js";
import { LossChart } from "./chart.js";
import { type Digit, images, labels } from "./digits.js";
import { Federation } from "./federation.js";
import { setDisabled } from "./focus.js";
import { Gallery } from "./gallery.js";
import { DigitModel, fetchFiles, type Files, publisherKey } from "./model.js";
import { type OwnDigit, OwnDigits, type Training } from "./own_digits.js";
import { Pad } from "./pad.js";
import { rasterize } from "./raster.js";

const DEBOUNCE_MS = 60;

function element<T extends HTMLElement>(id: string): T {
  const found = document.getElementById(id);
  if (found === null) throw new Error(`index.html has no element #${id}`);
  return found as T;
}

const button = (id: string): HTMLButtonElement => element<HTMLButtonElement>(id);

class Page {
  private readonly pad = new Pad(
    element<HTMLCanvasElement>("pad"),
    () => this.drawingChanged(),
    () => void this.look(),
  );
  private readonly bars = new Bars(element("bars"));
  private readonly chart = new LossChart(element("chart"), element("curve"));
  private readonly gallery = new Gallery(element("own"), element("own-title"), (id) => void this.remove(id));
  private readonly automatic = element<HTMLInputElement>("automatic");
  private readonly keys = element<HTMLInputElement>("keys");
  private readonly labels: HTMLButtonElement[];

  private own: OwnDigit[] = [];
  private losses: number[] = [];
  private readonly published = new WeakMap<Digit, number>();
  private timer = 0;
  private looks = 0;
  private training: "no" | "running" | "paused" = "no";
  /** Something was answered while training ran: train once more. */
  private again = false;

  private constructor(
    private readonly model: DigitModel,
    private readonly store: OwnDigits,
    private readonly files: Files,
  ) {
    this.labels = Array.from({ length: 10 }, (_, digit) => this.labelButton(digit));
    element("labels").append(...this.labels);
    button("clear").addEventListener("click", () => this.pad.clear());
    button("train").addEventListener("click", () => void this.train());
    button("pause").addEventListener("click", () => this.pauseOrResume());
    button("reset").addEventListener("click", () => void this.reset());
    button("forget").addEventListener("click", () => void this.forget());
    this.keys.checked = kept("keys") !== "off";
    this.keys.addEventListener("change", () => keep("keys", this.keys.checked ? "on" : "off"));
    document.addEventListener("keydown", (event) => this.key(event));
  }

  static async open(): Promise<void> {
    if (!isSecureContext) {
      throw new Error("this page needs an https address, or localhost: elsewhere browsers have no WebCrypto to verify with");
    }
    await onlyTab();
    const progress = element<HTMLProgressElement>("progress");
    const files = await fetchFiles(({ loaded, total }) => {
      const size = `${Math.ceil(loaded / 1024)}${total === null ? "" : ` of ${Math.ceil(total / 1024)}`} KiB`;
      element("status").textContent = `Loading the network: ${size}…`;
      if (total !== null) progress.value = loaded / total;
    });
    element("status").textContent = "Loading what runs the network…";
    progress.removeAttribute("value");
    const choice = new URLSearchParams(location.search).get("delegate");
    // For so small a network WebAssembly is faster than sending work to a GPU.
    const delegate = choice === "webgpu" || choice === "auto" ? choice : "wasm";
    const [model, store] = await Promise.all([DigitModel.open(files, delegate), OwnDigits.open()]);
    const page = new Page(model, store, files);
    page.own = await store.all();
    page.losses = await store.losses();
    page.chart.show(page.losses);
    page.facts();
    await page.measure();
    progress.value = 0;
    page.drawingChanged();
    page.say(page.losses.length > 0 ? "Your model is back." : "Ready.");
    page.federate();
    const unfinished = await store.unfinished();
    if (unfinished !== undefined) await page.train(unfinished);
  }

  /** The section in which the page may become a device; until then it loads nothing for that. */
  private federate(): void {
    const { picture, label } = this.model.fields;
    const elements = {
      token: element<HTMLInputElement>("token"),
      join: button("join"),
      rest: button("rest"),
      leave: button("leave"),
      status: element("federation"),
    };
    const examples = async () => ({ [picture]: images(this.own), [label]: labels(this.own) });
    const joined = kept("joined") === "yes";
    new Federation(elements, examples, joined, (now) => keep("joined", now ? "yes" : "no"));
  }

  // Drawing

  private drawingChanged(): void {
    clearTimeout(this.timer);
    this.timer = window.setTimeout(() => void this.look(), DEBOUNCE_MS);
    const empty = this.pad.strokes.length === 0;
    const pad = element("pad");
    setDisabled(button("clear"), empty, pad);
    setDisabled(element<HTMLFieldSetElement>("labels"), empty, pad);
  }

  /** Show what the models say about the drawing; an answer that comes too late is dropped. */
  private async look(): Promise<void> {
    clearTimeout(this.timer);
    const mine = (this.looks += 1);
    const image = rasterize(this.pad.strokes);
    if (image === undefined) {
      this.bars.show();
      this.guess(undefined);
      return;
    }
    const [personal, published] = await Promise.all([
      this.model.probabilities([{ image }], "mine"),
      this.model.probabilities([{ image }], "published"),
    ]);
    if (mine !== this.looks) return;
    this.bars.show(personal[0], published[0]);
    this.guess(personal[0]);
  }

  private guess(probabilities: readonly number[] | undefined): void {
    const best = probabilities === undefined ? undefined : highest(probabilities);
    const answer = element("answer");
    answer.replaceChildren();
    if (probabilities === undefined || best === undefined) {
      answer.textContent = "Nothing yet: draw a digit.";
    } else {
      const sure = probabilities[best] ?? 0;
      const digit = document.createElement("b");
      digit.textContent = String(best);
      answer.append(sure > 0.9 ? "That is" : sure > 0.6 ? "Probably" : "Perhaps", best === 8 ? " an " : " a ", digit);
    }
    this.labels.forEach((each, index) => each.classList.toggle("guess", index === best));
  }

  // Answers

  private labelButton(digit: number): HTMLButtonElement {
    const made = document.createElement("button");
    made.type = "button";
    made.textContent = String(digit);
    made.setAttribute("aria-label", `That’s ${digit === 8 ? "an" : "a"} ${digit}`);
    made.addEventListener("click", () => void this.answer(digit));
    return made;
  }

  private key(event: KeyboardEvent): void {
    if (event.ctrlKey || event.metaKey || event.altKey || event.repeat || !this.keys.checked) return;
    if (event.key === "Escape") this.pad.clear();
    else if (/^[0-9]$/.test(event.key)) void this.answer(Number(event.key));
  }

  private async answer(label: number): Promise<void> {
    const image = rasterize(this.pad.strokes);
    if (image === undefined) return;
    this.pad.finish();
    this.own = [...this.own, await this.store.add({ image, label })];
    await this.measureOwn();
    if (this.automatic.checked) await this.train();
    else this.say(`Kept as a ${label}. Press Train when you like.`);
  }

  private async remove(id: number): Promise<void> {
    if (this.training !== "no") {
      this.say("Digits can be removed when training has ended.");
      return;
    }
    await this.store.remove(id);
    this.own = this.own.filter((digit) => digit.id !== id);
    await this.measureOwn();
  }

  private async forget(): Promise<void> {
    if (!confirm(`Delete all ${this.own.length} of your digits? What the model learned from them stays until you reset it.`))
      return;
    await this.store.clear();
    this.own = [];
    await this.measureOwn();
  }

  // Training

  private async train(unfinished?: Training): Promise<void> {
    if (this.training !== "no") {
      this.again = true;
      return;
    }
    this.setTraining("running");
    try {
      await this.learn(unfinished ?? (await this.plan()));
      while (this.again) await this.learn(await this.plan());
    } catch (error) {
      await (error instanceof CheckpointError ? this.store.abandon() : this.store.end());
      this.say(`Training failed. ${wordsOf(error)}`);
    } finally {
      this.again = false;
      // A pause that came after the last step is not for the next training.
      this.model.resume();
      this.setTraining("no");
    }
  }

  private async plan(): Promise<Training> {
    const abandoned = await this.store.abandoned();
    return { seed: this.losses.length, digits: this.own.map(({ id }) => id), abandoned };
  }

  private async learn(plan: Training): Promise<void> {
    this.again = false;
    const digits = this.own.filter(({ id }) => plan.digits.includes(id));
    const what = digits.length === 1 ? "one digit of yours" : `${digits.length} digits of yours`;
    const before = [...this.losses];
    await this.store.begin(plan);
    const progress = element<HTMLProgressElement>("progress");
    progress.value = 0;
    this.say(`Learning ${what}…`);
    const losses = await this.model.train(digits, plan.seed, `${plan.abandoned}`, (loss, step, steps) => {
      this.losses.push(loss);
      this.chart.add(loss);
      progress.value = step / steps;
    });
    // With those of before an interruption, which this page has not seen.
    this.losses = [...before, ...losses];
    this.chart.show(this.losses);
    await this.store.keepLosses(this.losses);
    await this.store.end();
    await Promise.all([this.measure(), this.look()]);
    this.say(`Learned ${what}.`);
  }

  private pauseOrResume(): void {
    if (this.training === "running") {
      this.model.pause();
      this.setTraining("paused");
      this.say(`Paused after ${this.losses.length} steps in all.`);
    } else if (this.training === "paused") {
      this.model.resume();
      this.setTraining("running");
      this.say("Going on…");
    }
  }

  private async reset(): Promise<void> {
    await this.model.reset();
    this.losses = [];
    await this.store.keepLosses(this.losses);
    this.chart.show(this.losses);
    this.say("This is the published model again. Your digits are still here.");
    await Promise.all([this.measure(), this.look()]);
  }

  private setTraining(state: "no" | "running" | "paused"): void {
    this.training = state;
    button("pause").textContent = state === "paused" ? "Resume" : "Pause";
    this.buttons();
  }

  private buttons(): void {
    const [train, pause, busy] = [button("train"), button("pause"), this.training !== "no"];
    // What is to get the focus comes first: it must not be disabled itself.
    if (busy) pause.disabled = false;
    setDisabled(train, busy || this.own.length === 0, busy ? pause : element("pad"));
    setDisabled(pause, !busy, train);
    setDisabled(button("reset"), busy || this.losses.length === 0, busy ? pause : train);
    setDisabled(button("forget"), busy || this.own.length === 0, busy ? pause : element("own-title"));
  }

  // What was reached

  private async measure(): Promise<void> {
    const { check } = this.files;
    element("check-count").textContent = `${check.length} of people it never saw`;
    element("check-before").textContent = share(check, await this.publishedAnswers(check));
    element("check-after").textContent = share(check, await this.model.answers(check, "mine"));
    await this.measureOwn();
  }

  private async measureOwn(): Promise<void> {
    const { own } = this;
    const [before, after] = await Promise.all([this.publishedAnswers(own), this.model.answers(own, "mine")]);
    if (own !== this.own) return;
    element("own-count").textContent = own.length > 0 ? `${own.length}` : "";
    element("own-before").textContent = share(own, before);
    element("own-after").textContent = share(own, after);
    element("own-empty").hidden = own.length > 0;
    this.gallery.show(own, after);
    this.buttons();
  }

  /** They do not change, so each digit is asked about once. */
  private async publishedAnswers(digits: readonly Digit[]): Promise<number[]> {
    const fresh = digits.filter((digit) => !this.published.has(digit));
    const answers = await this.model.answers(fresh, "published");
    fresh.forEach((digit, index) => this.published.set(digit, answers[index] ?? -1));
    return digits.map((digit) => this.published.get(digit) ?? -1);
  }

  private facts(): void {
    const { bundle, publisher } = this.files;
    const runs = this.model.delegate === "webgpu" ? "WebGPU" : "WebAssembly";
    element("facts").textContent =
      `Runs on ${runs}. ${this.model.parameterCount.toLocaleString("en")} weights, all of them learn; bundle of ` +
      `${Math.round(bundle.length / 1024)} KiB, its signature by key ${publisherKey.slice(0, 8)}… and every digest ` +
      `verified. Published as right on ${(100 * publisher.accuracy).toFixed(1)} % of ` +
      `${publisher.digits.toLocaleString("en")} digits of ${publisher.writers} people it never saw.`;
  }

  private say(words: string): void {
    element("status").textContent = words;
  }
}

function share(digits: readonly Digit[], answers: readonly number[]): string {
  if (digits.length === 0) return "–";
  const right = digits.filter(({ label }, index) => label === answers[index]).length;
  return `${((100 * right) / digits.length).toFixed(digits.length < 100 ? 0 : 1)} %`;
}

/** What went wrong, where everybody sees it. */
function fail(reason: unknown): void {
  const box = element("error");
  box.textContent = wordsOf(reason);
  box.hidden = false;
  element("status").textContent = "The page cannot go on; see the message at its top.";
  element("answer").textContent = "";
}

function wordsOf(reason: unknown): string {
  return reason instanceof Error ? `${reason.name}: ${reason.message}` : String(reason);
}

/** A setting of the page; null where the browser keeps none. */
function kept(name: string): string | null {
  try {
    return localStorage.getItem(`archipel-demo/${name}`);
  } catch {
    return null;
  }
}

function keep(name: string, value: string): void {
  try {
    localStorage.setItem(`archipel-demo/${name}`, value);
  } catch {
    // It holds until the page is closed.
  }
}

/** Two pages would overwrite each other's model: the second one waits until the first is closed. */
async function onlyTab(): Promise<void> {
  // Without locks nobody can be kept waiting: the last of two pages that saves wins.
  if (navigator.locks === undefined) return;
  await new Promise<void>((resolve) => {
    const held = new Promise<never>(() => undefined);
    const waiting = window.setTimeout(() => {
      element("status").textContent = "This page is open in another tab, too. It starts here when that one is closed.";
    }, 500);
    void navigator.locks.request("archipel-demo", () => {
      clearTimeout(waiting);
      resolve();
      return held;
    });
  });
}

window.addEventListener("unhandledrejection", (event) => {
  event.preventDefault();
  fail(event.reason);
});
Page.open().catch(fail);

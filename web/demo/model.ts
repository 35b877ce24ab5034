/** The network twice: as it was published, and as it has become on this device. */

import { fetchPatiently } from "../src/fetching.js";
import { type DownloadProgress, load, type Runtime } from "../src/index.js";
import { readSource } from "../src/source.js";
import { highest } from "./bars.js";
import { decodeDigits, type Digit, images, labels } from "./digits.js";
import { trainingSet } from "./training_set.js";

/** Under which name the library keeps the personal model in IndexedDB. */
const SLOT = "archipel-demo";
const EPOCHS = 4;
const BATCH_SIZE = 16;
const LEARNING_RATE = 0.02;

/** The key (64 hexadecimal digits) that signed the bundle: put in when the page is built, never fetched with it. */
declare const PUBLISHER_KEY: string;
export const publisherKey: string = PUBLISHER_KEY;

/** What publisher.json says that nobody has to believe: how good the network was on `digits` digits of unseen `writers`. */
export interface Publisher {
  accuracy: number;
  digits: number;
  writers: number;
}

export interface Files {
  bundle: Uint8Array;
  publisher: Publisher;
  rehearsal: Digit[];
  check: Digit[];
}

/** Fetch what the page comes with, from where the page comes from; `onProgress` is told about the bundle. */
export async function fetchFiles(onProgress: (progress: DownloadProgress) => void): Promise<Files> {
  const [bundle, publisher, rehearsal, check] = await Promise.all([
    readSource("./model/digits.bundle", { onProgress }),
    ...["publisher.json", "rehearsal.bin", "check.bin"].map(fetchFile),
  ]);
  return {
    bundle: bundle!,
    publisher: JSON.parse(new TextDecoder().decode(publisher)) as Publisher,
    rehearsal: decodeDigits(rehearsal!, "rehearsal.bin"),
    check: decodeDigits(check!, "check.bin"),
  };
}

async function fetchFile(name: string): Promise<Uint8Array> {
  const response = await fetchPatiently(`./model/${name}`);
  if (!response.ok) throw new Error(`model/${name}: the server answers ${response.status} ${response.statusText}`);
  return new Uint8Array(await response.arrayBuffer());
}

export class DigitModel {
  private constructor(
    private readonly published: Runtime,
    private readonly mine: Runtime,
    private readonly rehearsal: readonly Digit[],
  ) {}

  /** Verifies the bundle's signature and digests; raises the library's error if they do not hold. */
  static async open(files: Files, delegate: "auto" | "wasm" | "webgpu"): Promise<DigitModel> {
    const options = { trustedKeys: [publisherKey], delegate };
    const mine = await load(files.bundle, { ...options, slot: SLOT });
    const published = await load(files.bundle, options);
    return new DigitModel(published, mine, files.rehearsal);
  }

  /** The names of the fields of pictures and labels. */
  get fields(): { picture: string; label: string } {
    const ports = this.mine.manifest.programs.train?.inputs ?? [];
    const named = (role: string): string => ports.find((port) => port.role === role)?.name ?? role;
    return { picture: named("example"), label: named("label") };
  }

  get delegate(): string {
    return this.mine.delegate;
  }

  get parameterCount(): number {
    return this.mine.manifest.parameters.reduce((sum, { shape }) => sum + shape.reduce((a, b) => a * b, 1), 0);
  }

  /** Probabilities of the ten digits for each picture, by the model of this device or by the published one. */
  async probabilities(pictures: readonly { image: Uint8Array }[], which: "mine" | "published"): Promise<number[][]> {
    if (pictures.length === 0) return [];
    const logits = await this[which].predict(images(pictures));
    return pictures.map((_, row) => softmax(Array.from(logits.data as Float32Array).slice(10 * row, 10 * row + 10)));
  }

  /** The digit that the model sees in each picture. */
  async answers(pictures: readonly { image: Uint8Array }[], which: "mine" | "published"): Promise<number[]> {
    return (await this.probabilities(pictures, which)).map(highest);
  }

  /**
   * Learn one's own digits (with the rehearsal digits) and keep the result. The same call after an interruption goes on
   * from its checkpoint. Returns the loss of every step; raises CheckpointError if data or settings are not the same.
   */
  async train(
    own: readonly Digit[],
    seed: number,
    checkpoint: string,
    onStep: (loss: number, step: number, steps: number) => void,
  ): Promise<number[]> {
    const digits = trainingSet(own, this.rehearsal);
    const steps = EPOCHS * Math.ceil(digits.length / BATCH_SIZE);
    const history = await this.mine.fit({
      x: images(digits),
      y: labels(digits),
      epochs: EPOCHS,
      batchSize: BATCH_SIZE,
      shuffle: true,
      seed,
      hyperparameters: { lr: LEARNING_RATE },
      onStep: ({ loss, step }) => onStep(loss ?? Number.NaN, step + 1, steps),
      checkpoint: `${SLOT}/${this.mine.digest}/${checkpoint}`,
      checkpointEvery: 0.5,
    });
    await this.mine.save(SLOT);
    return history.losses;
  }

  pause(): void {
    this.mine.pause();
  }

  resume(): void {
    this.mine.resume();
  }

  /** Back to the published weights, here and in the browser's storage. */
  async reset(): Promise<void> {
    await this.mine.reset("parameters");
    await this.mine.save(SLOT);
  }
}

function softmax(logits: readonly number[]): number[] {
  const most = Math.max(...logits);
  const powers = logits.map((value) => Math.exp(value - most));
  const sum = powers.reduce((total, value) => total + value, 0);
  return powers.map((value) => value / sum);
}

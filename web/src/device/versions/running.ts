/**
 * The models that a device runs: what answers, and the way back when a new version fails
 * (archipel/client/versions/running.py, archipel/lite_runtime/slots/model_slots.py).
 */

import { isFinite, type NdArray } from "../../arrays.js";
import { openBundle } from "../../bundle/reader.js";
import { sha256 } from "../../bundle/digests.js";
import { readWeights } from "../../bundle/weights.js";
import {
  ArchipelError, DigestError, RuntimeInputError, RuntimeLimitError, RuntimeProgramError,
} from "../../errors.js";
import type { RuntimeCore } from "../../runtime/runtime.js";
import { Turns } from "../../runtime/turn.js";
import type { Bytes } from "../bytes.js";
import type { Device } from "../device.js";
import { ClientError } from "../errors.js";
import type { Offer } from "../messages/offers.js";
import { type Content, openContent } from "./opening.js";
import { holds, ModelSlots, other, runningName, type SlotName, type SlotState, WITHDRAWN } from "./slots.js";

/** So many good answers end a version's trial. */
const CONFIRM_AFTER = 100;

type Inputs = NdArray | Readonly<Record<string, NdArray>>;
type Answer = NdArray | Record<string, NdArray>;

/** What is loaded of a model. */
interface Serving {
  readonly name: SlotName;
  readonly runtime: RuntimeCore;
  trying: boolean;
  answered: number;
}

export class RunningModels {
  readonly slots: ModelSlots;
  private readonly serving = new Map<string, Serving>();
  /** One request or change of slots at a time. */
  private readonly turns = new Turns();

  constructor(private readonly device: Device) {
    this.slots = new ModelSlots(device.database);
  }

  /** Answers have to follow what a round has changed: the next one loads the models again. */
  renew(): Promise<void> {
    return this.turns.take(async () => this.unload());
  }

  /**
   * Predict with the running version. If a version on trial fails on the request, or its answer is not finite, the one
   * before answers, and stays. Raises ClientError where the device runs no version of it, RuntimeInputError, ...
   */
  predict(model: string, x: Inputs, keys: readonly Uint8Array[]): Promise<Answer> {
    return this.turns.take(async () => {
      const serving = this.serving.get(model) ?? (await this.load(model, keys));
      if (!serving.trying) return ask(serving, x);
      let [answer, failure] = [null as Answer | null, null as unknown];
      try {
        answer = await ask(serving, x);
      } catch (error) {
        if (!(error instanceof RuntimeProgramError || error instanceof RuntimeLimitError)) throw error;
        failure = error;
      }
      if (answer === null || !isGood(answer)) return this.askOther(model, serving, x, keys, answer, failure);
      // From here on the start counts no longer: it has not ended the page.
      if (++serving.answered === 1) await this.slots.countStarts(model, 1);
      if (serving.answered >= CONFIRM_AFTER) {
        await this.slots.confirm(model);
        serving.trying = false;
      }
      return answer;
    });
  }

  /** The content of the running version. Raises a BundleError if it is damaged. */
  async content(model: string, state: SlotState, keys: readonly Uint8Array[]): Promise<Content> {
    return this.contentOf(model, state, runningName(state) as SlotName, keys);
  }

  /** Return to the version in the other slot, if it is the offered one and can be loaded; whether it did. */
  goBack(offer: Offer, keys: readonly Uint8Array[]): Promise<boolean> {
    return this.turns.take(async () => {
      const state = await this.slots.state(offer.model);
      if (!state.active || !holds(state[other(state.active)], offer)) return false;
      try {
        const content = await this.contentOf(offer.model, state, other(state.active), keys);
        (await openContent(content, this.device, { tested: false })).close();
      } catch (error) {
        if (error instanceof ArchipelError) return false;
        throw error;
      }
      await this.slots.returnToOther(offer.model, WITHDRAWN);
      this.unload(offer.model);
      return true;
    });
  }

  /**
   * Load and test the new version, then keep it beside the running one and run it. Raises ArchipelError if one of that
   * fails; the running version then goes on.
   */
  install(offer: Offer, content: Content): Promise<void> {
    return this.turns.take(async () => {
      (await openContent(content, this.device, { tested: true })).close();
      const bundle = await this.cached(offer.bundle);
      const weights = content.weights === null ? null : await this.cached(offer.weights as string);
      await this.slots.install(offer, { bundle, weights });
      this.unload(offer.model);
    });
  }

  private async cached(digest: string): Promise<Bytes> {
    const data = await this.device.database.get<Bytes>("files", digest);
    if (data === undefined) throw new ClientError("no longer in this device's cache");
    return data;
  }

  /** The running version, or the one before it if that cannot be loaded. */
  private async load(model: string, keys: readonly Uint8Array[]): Promise<Serving> {
    const state = await this.slots.state(model);
    const running = runningName(state);
    if (!running || !state.active) {
      const there = Object.keys(await this.slots.versions()).join(", ") || "none";
      throw new ClientError(`model ${model}: this device runs no version of it; it runs: ${there}`);
    }
    if (running !== state.active) {
      await this.slots.returnToOther(model, "it was started several times and never answered");
      return this.load(model, keys);
    }
    try {
      return await this.loadSlot(model, state, running, keys);
    } catch (error) {
      if (!(error instanceof ArchipelError) || state[other(running)].status !== "good") throw error;
      const serving = await this.loadSlot(model, state, other(running), keys);
      await this.slots.returnToOther(model, error.message);
      return serving;
    }
  }

  private async loadSlot(
    model: string,
    state: SlotState,
    name: SlotName,
    keys: readonly Uint8Array[],
  ): Promise<Serving> {
    // Verified first, so that a damaged bundle costs no start; counted before graphs are loaded, which may crash.
    const content = await this.contentOf(model, state, name, keys);
    const trying = state[name].status === "trying";
    if (trying) await this.slots.countStarts(model, -1);
    const runtime = await openContent(content, this.device, { tested: trying });
    const serving: Serving = { name, runtime, trying, answered: 0 };
    this.serving.set(model, serving);
    return serving;
  }

  private async contentOf(
    model: string,
    state: SlotState,
    name: SlotName,
    keys: readonly Uint8Array[],
  ): Promise<Content> {
    const { version, digest, weights } = state[name];
    const files = await this.slots.files(model, name);
    const here = `model ${model}, version ${version}`;
    if (files === undefined) throw new DigestError(`${here}: its files are gone`);
    const bundle = await openBundle(files.bundle, keys, this.device.config.allowDevelopment);
    const own = files.weights === null ? "" : await sha256(files.weights);
    // The signature alone would also admit an older bundle.
    if (bundle.digest !== digest || (own && own !== weights)) throw new DigestError(`${here}: its files are damaged`);
    return { version, bundle, weights: files.weights === null ? null : readWeights(files.weights) };
  }

  /** The other version's answer, if that does better: then it runs from now on. */
  private async askOther(
    model: string,
    serving: Serving,
    x: Inputs,
    keys: readonly Uint8Array[],
    answer: Answer | null,
    failure: unknown,
  ): Promise<Answer> {
    const own = (): Answer => {
      if (answer === null) throw failure;
      return answer;
    };
    const state = await this.slots.state(model);
    const name = other(serving.name);
    if (state.active !== serving.name || state[name].status !== "good") return own();
    let better: Answer | null = null;
    try {
      const content = await this.contentOf(model, state, name, keys);
      const runtime = await openContent(content, this.device, { tested: false });
      try {
        better = await ask({ runtime }, x);
      } finally {
        runtime.close();
      }
      // Both fail on this request, so its data are at fault and the trial goes on.
      if (!isGood(better)) return own();
    } catch (error) {
      if (!(error instanceof ArchipelError)) throw error;
      // The old version has other inputs: the trial ends all the same. Anything else speaks against the old one.
      if (!(error instanceof RuntimeInputError)) return own();
    }
    const reason = failure === null ? "it answered a request with numbers that are not finite" : String(failure);
    await this.slots.returnToOther(model, reason);
    this.unload(model);
    return better ?? own();
  }

  private unload(model?: string): void {
    for (const [name, serving] of this.serving) {
      if (model !== undefined && name !== model) continue;
      this.serving.delete(name);
      serving.runtime.close();
    }
  }
}

async function ask({ runtime }: Pick<Serving, "runtime">, x: Inputs): Promise<Answer> {
  return runtime.predict(x as never) as Promise<Answer>;
}

function isGood(answer: Answer): boolean {
  const arrays = "dims" in answer && "data" in answer ? [answer as NdArray] : Object.values(answer);
  return arrays.every((array) => isFinite(array as NdArray));
}

/** What a page and its device's worker say to each other. Each side asks the other with numbered calls. */

import type { NdArray } from "../../arrays.js";
import type { DeviceSettings } from "../config.js";
import type { Examples } from "../device.js";
import type { DeviceEvent } from "../events.js";

/** What the page asks of the worker. */
export type Ask =
  | { readonly method: "open"; readonly settings: DeviceSettings; readonly wait: boolean; readonly conditions: boolean }
  | { readonly method: "enrol"; readonly token: string }
  | {
      readonly method:
        | "runOnce" | "runForever" | "resume" | "erase" | "report" | "deviceId" | "close" | "running" | "rotateKey";
    }
  | { readonly method: "pause"; readonly reason: string }
  | { readonly method: "predict"; readonly model: string; readonly x: NdArray | Examples };

/** What the worker asks of the page. */
export type AskPage = { readonly method: "examples" | "mayWork" };

export type ToWorker =
  | { readonly type: "call"; readonly call: number; readonly ask: Ask }
  /** Ends `runForever` and what is under way. */
  | { readonly type: "stop" }
  | Answer;

export type FromWorker =
  | { readonly type: "ask"; readonly call: number; readonly ask: AskPage }
  | { readonly type: "event"; readonly event: DeviceEvent }
  | Answer;

/** `name` and `message` are of an error. */
export type Answer =
  | { readonly type: "result"; readonly call: number; readonly result: unknown }
  | { readonly type: "error"; readonly call: number; readonly name: string; readonly message: string };

/** The calls that wait for an answer of the other side. */
export class Calls {
  private next = 0;
  private readonly pending = new Map<number, { resolve: (result: never) => void; reject: (error: unknown) => void }>();

  /** `send` gets the call's number. */
  start<T>(send: (call: number) => void): Promise<T> {
    const call = this.next++;
    return new Promise<T>((resolve, reject) => {
      this.pending.set(call, { resolve: resolve as (result: never) => void, reject });
      try {
        send(call);
      } catch (error) {
        this.pending.delete(call);
        reject(error);
      }
    });
  }

  settle(answer: Answer, errorOf: (name: string, message: string) => Error): void {
    const waiting = this.pending.get(answer.call);
    this.pending.delete(answer.call);
    if (answer.type === "result") waiting?.resolve(answer.result as never);
    else waiting?.reject(errorOf(answer.name, answer.message));
  }

  failAll(error: Error): void {
    for (const each of this.pending.values()) each.reject(error);
    this.pending.clear();
  }
}

export function failure(call: number, error: unknown): Answer {
  const { name, message } = error instanceof Error ? error : new Error(String(error));
  return { type: "error", call, name, message };
}

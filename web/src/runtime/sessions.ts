/** ONNX Runtime sessions of a bundle's programs, made when first needed and kept. */

import type { NdArray } from "../arrays.js";
import { view } from "../arrays.js";
import { WEIGHTS_FILE } from "../bundle/manifest.js";
import type { Bundle } from "../bundle/reader.js";
import type { DType, Port } from "../bundle/roles.js";
import { RuntimeProgramError } from "../errors.js";
import type { Delegate, Engine, Ort } from "./delegates.js";
import { DERIVED_FILE, replaceInitializers } from "./initializers.js";
import { Turns } from "./turn.js";

export type Feed = Record<string, Ort.Tensor>;

/** All sessions share one WebAssembly heap, whatever bundle they belong to. */
const turns = new Turns();

/** One program's graph, ready to run. */
export class Session {
  constructor(
    readonly name: string,
    private readonly ort: typeof Ort,
    private native: Ort.InferenceSession,
    /** Makes a session on WebAssembly for one that WebGPU cannot run; null where there is no other way to run it. */
    private fallBack: ((why: string) => Promise<Ort.InferenceSession>) | null,
  ) {}

  /** Raises RuntimeProgramError. */
  async run(feed: Feed, outputs: readonly string[]): Promise<Record<string, Ort.Tensor>> {
    try {
      return (await turns.take(() => this.native.run(feed, outputs))) as Record<string, Ort.Tensor>;
    } catch (error) {
      const { fallBack } = this;
      if (fallBack === null) throw failed(this.name, "cannot be run", error);
      this.fallBack = null;
      const old = this.native;
      this.native = await fallBack(messageOf(error));
      await turns.take(() => old.release());
      const there = Object.entries(feed).map(async ([name, tensor]) => [name, this.tensor(await toArray(tensor))]);
      return this.run(Object.fromEntries(await Promise.all(there)) as Feed, outputs);
    }
  }

  /** ONNX Runtime's view of the array, without copying. */
  tensor(array: NdArray): Ort.Tensor {
    return new this.ort.Tensor(array.dtype as "float32", array.data as Float32Array, array.dims);
  }

  release(): Promise<void> {
    return turns.take(() => this.native.release());
  }
}

export class Sessions {
  /** Programs that WebGPU could not run, and what it said. */
  readonly fallenBack = new Map<string, string>();
  private readonly ready = new Map<string, Promise<Session>>();

  constructor(
    readonly bundle: Bundle,
    readonly engine: Engine,
  ) {}

  /** The session of program `name`, from the second call on the same one. Raises RuntimeProgramError. */
  get(name: string): Promise<Session> {
    let session = this.ready.get(name);
    if (session === undefined) {
      session = this.open(name);
      this.ready.set(name, session);
      // What could not be opened may be tried again.
      session.catch(() => this.ready.delete(name));
    }
    return session;
  }

  /** A new session in which `initializers` of the graph have other values. The caller releases it. */
  async open(name: string, initializers: ReadonlyMap<string, NdArray> = new Map()): Promise<Session> {
    const { bundle, engine } = this;
    const program = bundle.program(name);
    const { graph, data } = replaceInitializers(name, bundle.file(program.file), initializers);
    const weights = bundle.weights;
    const externalData = [
      ...(weights === undefined ? [] : [{ path: WEIGHTS_FILE, data: weights }]),
      ...(data.length ? [{ path: DERIVED_FILE, data }] : []),
    ];
    const create = (delegate: Delegate): Promise<Ort.InferenceSession> => {
      const options: Ort.InferenceSession.SessionOptions = {
        executionProviders: [delegate],
        externalData,
        logSeverityLevel: 4,
      };
      if (delegate === "webgpu") options.preferredOutputLocation = locations(program.kind, program.outputs);
      return turns.take(() => engine.ort.InferenceSession.create(graph, options));
    };
    let fallBack: ((why: string) => Promise<Ort.InferenceSession>) | null = null;
    if (engine.mayFallBack) {
      fallBack = (why) => {
        this.fallenBack.set(name, why);
        return create("wasm");
      };
    }
    let native: Ort.InferenceSession;
    try {
      native = await create(engine.delegate).catch((error: unknown) => {
        if (fallBack === null) throw error;
        return fallBack(messageOf(error));
      });
    } catch (error) {
      throw failed(name, "cannot be loaded", error);
    }
    for (const [side, ports, there] of [
      ["inputs", program.inputs, native.inputNames],
      ["outputs", program.outputs, native.outputNames],
    ] as const) {
      const declared = new Set(ports.map((port) => port.name));
      const different = [...declared].filter((each) => !there.includes(each));
      different.push(...there.filter((each) => !declared.has(each)));
      if (different.length) {
        throw new RuntimeProgramError(
          `program ${name}: the manifest and the graph disagree about its ${side}: ` +
            `only one of them has ${different.sort().join(", ")}; convert the bundle again`,
        );
      }
    }
    return new Session(name, engine.ort, native, fallBack);
  }

  async close(): Promise<void> {
    for (const session of this.ready.values()) {
      await (await session.catch(() => null))?.release();
    }
    this.ready.clear();
  }
}

/** The tensor as an array of ours, brought from the GPU if it is there. */
export async function toArray(tensor: Ort.Tensor): Promise<NdArray> {
  const data = (tensor.location === "gpu-buffer" ? await tensor.getData() : tensor.data) as Float32Array;
  const bytes = new Uint8Array(data.buffer, data.byteOffset, data.byteLength);
  // By way of bytes: float16 data may be of a type that not every browser has.
  return view(tensor.type as DType, tensor.dims, bytes);
}

/** Tensors that go from step to step stay on the GPU; those that WebGPU has no type for, and metrics, do not. */
function locations(kind: string, ports: readonly Port[]): Record<string, "cpu" | "gpu-buffer"> {
  const onGpu = (port: Port): boolean =>
    kind === "train" && port.role !== "metric" && ["float32", "float16", "int32", "uint32"].includes(port.dtype);
  return Object.fromEntries(ports.map((port) => [port.name, onGpu(port) ? "gpu-buffer" : "cpu"]));
}

function failed(name: string, what: string, error: unknown): RuntimeProgramError {
  return new RuntimeProgramError(`program ${name} ${what}: ONNX Runtime says: ${messageOf(error).slice(0, 500)}`);
}

function messageOf(error: unknown): string {
  return (error instanceof Error ? error.message : String(error)).split(/\s+/).join(" ");
}

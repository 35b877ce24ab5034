/** Compiled as strictly as TypeScript can, against the package's own declarations. */

import { type History, load, type NdArray, type Runtime, SignatureError } from "archipel-web";

export async function learn(x: NdArray, y: NdArray): Promise<History> {
  const runtime: Runtime = await load("./model.bundle", { trustedKeys: ["00"], slot: "mine" });
  const answers: NdArray = await runtime.predict(x);
  // @ts-expect-error: epochs are a number
  await runtime.fit({ x, y, epochs: "2" });
  return runtime.fit({ x, y, epochs: answers.dims.length });
}

export const wasNotSigned = (error: unknown): boolean => error instanceof SignatureError;

/** Compiled as strictly as TypeScript can, against the package's own declarations. */

import { type Device, openDevice, OtherTabError, type Outcome } from "archipel-web/device";
import { type History, load, type NdArray, type Runtime, SignatureError } from "archipel-web";

export async function learn(x: NdArray, y: NdArray): Promise<History> {
  const runtime: Runtime = await load("./model.bundle", { trustedKeys: ["00"], slot: "mine" });
  const answers: NdArray = await runtime.predict(x);
  // @ts-expect-error: epochs are a number
  await runtime.fit({ x, y, epochs: "2" });
  return runtime.fit({ x, y, epochs: answers.dims.length });
}

export const wasNotSigned = (error: unknown): boolean => error instanceof SignatureError;

export async function takePart(token: string, x: NdArray): Promise<Outcome | null> {
  try {
    const device: Device = await openDevice({ examples: () => ({ x }), minCohort: 10 });
    await device.enrol(token);
    return await device.runOnce();
  } catch (error) {
    if (error instanceof OtherTabError) return null;
    throw error;
  }
}

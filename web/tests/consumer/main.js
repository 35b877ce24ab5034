/** A page that has the library from npm, with functions that tests call from outside. */

import { listSlots, load } from "archipel-web";

const bytes = (text) => Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));

/** What the README shows. */
window.readme = () => import("./readme.js");

window.slots = async () => (await listSlots()).map(({ slot, bundle }) => `${bundle}: ${slot}`);

/** Loads, learns and answers as `job` says; arrays come as base64 of their bytes. */
window.learn = async (job) => {
  let loaded = 0;
  const onProgress = (progress) => (loaded = progress.loaded);
  const address = new URL("./model.bundle", location.href);
  const runtime = await load(address, { trustedKeys: [job.key], onProgress, ...job.options });
  const x = { dtype: "float32", dims: job.dims, data: new Float32Array(bytes(job.x).buffer) };
  const y = { dtype: "int64", dims: [job.y.length], data: BigInt64Array.from(job.y, BigInt) };
  const before = await runtime.predict(x);
  const { losses } = await runtime.fit({ x, y, ...job.fit });
  const after = await runtime.predict(x);
  const { delegate, delegateReason } = runtime;
  runtime.close();
  return { losses, before: Array.from(before.data), after: Array.from(after.data), delegate, delegateReason, loaded };
};

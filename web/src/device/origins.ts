/**
 * The check of where weights come from, and what the device remembers of each log
 * (archipel/client/downloads/origins.py).
 */

import { sha256 } from "../bundle/digests.js";
import type { Bundle } from "../bundle/reader.js";
import { writeWeights } from "../bundle/weights.js";
import { randomBytes } from "./crypto.js";
import type { Enrolment } from "./enrolment.js";
import { ProvenanceError } from "./errors.js";
import { endorsement, weightsLog, type WeightsStatement } from "./messages/weights_log.js";
import { checkEndorsement, type History, LogReader, NO_HISTORY } from "./provenance.js";
import type { DeviceSession } from "./rounds/session.js";
import { checkMoved, checkTensors, type Tensors } from "./steps/distances.js";
import { stepBound } from "./steps/step_bounds.js";
import type { DeviceDatabase } from "./storage/database.js";

/** The device asks for evidence of at most this many new steps, drawn at random where there are more. */
const CHECKED = 32;
/** The most new entries that a device reads after it was away. */
const MAX_NEW = 1 << 16;
const MAX_TASKS = 256;

interface Known {
  readonly history: History;
  /** The digest of the weights that were used last. */
  readonly last?: string;
  /** By task, or "adoption", newest first: the newest entry that this device has used. */
  readonly accepted: readonly (readonly [use: string, entry: number])[];
}

/** Weights, and the SHA-256 of their file. */
export interface Weights {
  readonly digest: string;
  readonly tensors: Tensors;
}

/**
 * Accept weights for a training of `task`, or for an adoption (null), or raise ProvenanceError (another ProtocolError
 * if the log is malformed). The log must not go back to older weights, unless an entry of it says so, and its steps
 * must be able to lead to these. `find` gives weights with a digest where they are still here.
 */
export async function checkOrigin(
  database: DeviceDatabase,
  bundle: Bundle,
  { digest, tensors }: Weights,
  find: (digest: string) => Promise<Tensors | null>,
  session: DeviceSession,
  enrolment: Enrolment,
  task: string | null,
): Promise<void> {
  const key = `origins/${bundle.digest}`;
  const { manifest } = bundle;
  const parameters = bundle.parameters();
  checkTensors(`weights ${digest.slice(0, 16)}...`, tensors, parameters);
  const own = await sha256(writeWeights(parameters));
  const known = (await database.get<Known>("books", key)) ?? { history: NO_HISTORY, accepted: [] };
  // The bundle's own weights are signed. Once the log has entries, they are looked up like any others.
  if (digest === own && !known.history.number) return;
  const { population, serverKey } = enrolment;
  const log = new LogReader(population, bundle.digest, own, serverKey, known.history, (entry) =>
    stepBound(manifest, entry.hyperparameters, entry.leaves || entry.devices),
  );
  await readOn(log, known.history.number, bundle, session, enrolment);
  const { history } = log;
  if (history.number > known.history.number) {
    // On disk before the weights are checked: even if they are refused, the server cannot show another history next
    // time.
    await database.write({ store: "books", key, value: { ...known, history } });
  }
  const node = log.find(digest, task ?? "");
  const where = `weights ${digest.slice(0, 16)}... (entry ${node.number} of the server's log)`;
  // An adoption sends nothing, so what the server may have seen of others does not concern it.
  if (node.plain && task !== null) {
    throw new ProvenanceError(`${where}: a round in which the server saw single updates led to them`);
  }
  const use = task ?? "adoption";
  const newest = known.accepted.find(([each]) => each === use)?.[1] ?? 0;
  if (node.again < newest) {
    throw new ProvenanceError(
      `${where}: older than entry ${newest}, which this device has used, and no later entry goes back to it`,
    );
  }
  // Two bounds on the distance that the logged steps can cover: from the signed weights, and from the weights that
  // this device used last. The second is tighter for a device that takes part often.
  const rounds = { back: 0, on: log.roundsTo(node) };
  checkMoved(where, manifest, tensors, parameters, node.bound, node.number, rounds);
  const earlier = known.last === undefined ? undefined : log.newestOf(known.last);
  if (earlier !== undefined && earlier.weights !== digest) {
    const before = earlier.weights === own ? parameters : await find(earlier.weights);
    if (before !== null) {
      const bound = log.boundBetween(earlier, node);
      checkMoved(where, manifest, tensors, before, bound, node.number, log.roundsBetween(earlier, node));
    }
  }
  // The task used now comes first, so the ones beyond MAX_TASKS ended long ago.
  const accepted = [[use, node.again] as const, ...known.accepted.filter(([each]) => each !== use)];
  const value: Known = { history, accepted: accepted.slice(0, MAX_TASKS), last: digest };
  await database.write({ store: "books", key, value });
}

/** Read what the server has added to the log, and check each entry, and the evidence for new steps. */
async function readOn(
  log: LogReader,
  before: number,
  bundle: Bundle,
  session: DeviceSession,
  enrolment: Enrolment,
): Promise<void> {
  const url = `/v1/populations/${enrolment.population}/weights-log/${bundle.digest}`;
  const where = `weights log of bundle ${bundle.digest.slice(0, 16)}...`;
  const steps: WeightsStatement[] = [];
  for (;;) {
    const { number } = log.history;
    const page = await session.call("GET", `${url}?after=${number}`, weightsLog);
    // Also for an empty log: a server that claims to have lost its log could start an invented one.
    if (page.newest < number) {
      throw new ProvenanceError(
        `${where}: the server has ${page.newest} entries, this device has seen ${number}; the server has lost a part ` +
          "of it. The publisher can begin anew with a new bundle",
      );
    }
    if (page.newest - before > MAX_NEW) throw new ProvenanceError(`${where}: more than ${MAX_NEW} new entries`);
    for (const sealed of page.entries) {
      const entry = await log.add(sealed);
      // Only for steps of secure rounds are there devices' signed confirmations as evidence.
      if (entry.kind === "step" && entry.privacy === "secure") steps.push(entry);
    }
    if (log.history.number >= page.newest || !page.entries.length) break;
  }
  for (const entry of drawSteps(steps)) {
    const evidence = await session.call("GET", `${url}/${entry.number}/endorsement`, endorsement);
    await checkEndorsement(entry, evidence, bundle.manifest, log, enrolment);
  }
}

/** All steps if they are few, else the last one and a random sample that the server cannot predict. */
function drawSteps(steps: readonly WeightsStatement[]): readonly WeightsStatement[] {
  if (steps.length <= CHECKED) return steps;
  const drawn = steps.slice(0, -1).map((step) => [new DataView(randomBytes(4).buffer).getUint32(0), step] as const);
  drawn.sort(([one], [other]) => one - other);
  // The last step made the weights that the device is about to use.
  return [...drawn.slice(0, CHECKED - 1).map(([, step]) => step), steps.at(-1) as WeightsStatement];
}

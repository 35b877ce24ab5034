/** The device agent: it checks in and takes part in rounds (archipel/client/agent.py). */

import { sameBytes } from "./bytes.js";
import { type Config, checkedServer, configOf, type DeviceSettings } from "./config.js";
import type { Device, Examples } from "./device.js";
import { type Enrolment, readEnrolment, withAllowedPublishers } from "./enrolment.js";
import { enrolWith, readToken } from "./enrolling.js";
import {
  CertificateError, ClientError, MessageError, RefusedError, RoundAbandonedError, SessionRefusedError, UnreachableError,
} from "./errors.js";
import { type DeviceEvent, type Outcome, outcome, type Report } from "./events.js";
import { Gate, type MayWork, sleep } from "./gate.js";
import type { Sealed } from "./messages/identity.js";
import type { RoundPlan } from "./messages/rounds.js";
import { epsilonOf } from "./privacy.js";
import { rotate } from "./rotation.js";
import { isLater } from "./rounds/exchange.js";
import { Participation } from "./rounds/participation.js";
import { type Assigned, assignedOf, findInterrupted } from "./rounds/resuming.js";
import { DeviceSession } from "./rounds/session.js";
import { Settling } from "./rounds/settling.js";
import { Transport } from "./rounds/transport.js";
import { Waiting } from "./rounds/waiting.js";
import { jittered, waitAfter } from "./rounds/backoff.js";
import { DeviceDatabase } from "./storage/database.js";
import type { Entry, Totals } from "./storage/entry.js";
import { Journal } from "./storage/journal.js";
import { whyExpired } from "./storage/plan_book.js";
import { Vault } from "./storage/vault.js";
import { Adoption } from "./versions/adoption.js";
import { RunningModels } from "./versions/running.js";
import type { NdArray } from "../arrays.js";
import type { Engine } from "../runtime/delegates.js";

/** The secure rounds that this device speaks. */
const PROTOCOLS = ["complete", "neighbours"];
const SHORTEST_WAIT = 0.01;
const LONGEST_WAIT = 86400;

/** What the agent asks of the page. */
export interface Page {
  /** The local data, which never leaves this device; asked for when a round needs it. */
  readonly examples: () => Promise<Examples>;
  readonly mayWork: MayWork | null;
  readonly onEvent: (event: DeviceEvent) => void;
  readonly engine: () => Promise<Engine>;
  /** For the device's requests; default: the global one. */
  readonly fetch?: typeof globalThis.fetch;
}

/** What the owner of a device may look at. */
export interface DeviceReport {
  /** Empty before enrolment. */
  readonly deviceId: string;
  readonly population: string;
  readonly server: string;
  /** The owner's reason for a pause; null where there is none. */
  readonly paused: string | null;
  readonly totals: Totals;
  /** Of all rounds with noise together, at delta 1e-6; it says nothing of rounds without. */
  readonly epsilon: number;
  /** The journal, the oldest round first. */
  readonly rounds: readonly Entry[];
}

/** The name of the database of a device, and of the lock that makes it the only one of the profile. */
export function databaseName(name: string): string {
  return `archipel-device/${name}`;
}

/** One device. One agent at a time may use its database: see `lock.ts`. */
export class DeviceAgent {
  private transport: Transport | null = null;
  private session: DeviceSession | null = null;
  private roundId = "";
  private setAside = "";
  private busy = false;
  /** Whether the server may keep the next check-in back. */
  private patient = false;
  private readonly waiting: Waiting;
  private readonly models: RunningModels;
  private readonly adoption: Adoption;

  private constructor(
    private readonly config: Config,
    private readonly page: Page,
    private readonly device: Device,
    private enrolment: Enrolment | null,
  ) {
    this.waiting = new Waiting(config);
    this.models = new RunningModels(device);
    this.adoption = new Adoption(device, this.models);
  }

  /** Raises ClientError for settings that are none, NoStorageError, StorageError. */
  static async open(settings: DeviceSettings, page: Page): Promise<DeviceAgent> {
    const config = configOf(settings);
    const database = await DeviceDatabase.open(databaseName(config.name));
    const vault = await Vault.open(database);
    let agent: DeviceAgent | null = null;
    const report: Report = (name, detail, roundId) => agent?.emit(name, detail, roundId);
    const device: Device = {
      config,
      database,
      vault,
      journal: new Journal(database, vault),
      gate: new Gate(database, config, page.mayWork, report),
      report,
      examples: page.examples,
      engine: page.engine,
    };
    agent = new DeviceAgent(config, page, device, await readEnrolment(database, vault));
    return agent;
  }

  /** 32 hexadecimal digits; empty before enrolment. */
  get deviceId(): string {
    return this.enrolment?.deviceId ?? "";
  }

  /** End what is under way; a round goes on when the device does, unless its task is asynchronous. */
  stop(): void {
    this.device.gate.stop();
  }

  close(): void {
    this.stop();
    this.device.database.close();
  }

  /**
   * Join the token's population and pin the keys in the token (the text of the token file). After a failure it may be
   * called again with the same token; once the device is enrolled it does nothing.
   *
   * Raises MessageError or CertificateError (the token), OwnerRefusalError, RefusedError, UnreachableError, or
   * ClientError where the device is enrolled elsewhere.
   */
  async enrol(tokenText: string): Promise<string> {
    const token = readToken(tokenText);
    const record = this.enrolment;
    if (record !== null) {
      const same = sameBytes(record.serverKey, token.server_key) && record.population === token.population;
      if (same) return record.deviceId;
      throw new ClientError(
        `this device is enrolled already, in population ${record.population} at ${record.server}; erase it, or use ` +
          "another name",
      );
    }
    this.enrolment = await enrolWith(token, this.device, (server) => this.newTransport(server));
    this.emit("enrolled", { population: token.population });
    return this.enrolment.deviceId;
  }

  /**
   * Replace the device's key by a new one; the device's id stays. A reload at any point is safe.
   *
   * Whether the server has taken the new key; if it cannot now, such as during a round of this device, each `runOnce`
   * tries again. Raises CertificateError where the key was replaced eight times, ClientError before enrolment,
   * UnreachableError, RefusedError.
   */
  async rotateKey(): Promise<boolean> {
    const { transport, enrolment } = this.connect();
    const changed = await rotate(transport, this.device, enrolment);
    if (changed === null) return false;
    [this.enrolment, this.session] = [changed, null];
    this.emit("rotated", { number: changed.chain.rotations?.length ?? 0 });
    return true;
  }

  /**
   * Check in once, and take part in a round if there is one. A round that fails is an outcome, and no error.
   *
   * Raises ClientError (not enrolled), UnreachableError, RefusedError.
   */
  runOnce(): Promise<Outcome> {
    return this.once(false);
  }

  private async once(patient: boolean): Promise<Outcome> {
    if (this.busy) throw new ClientError("this device is at work already");
    [this.busy, this.patient] = [true, patient];
    try {
      const done = await this.checkInAsKnown();
      return { ...done, wait: done.wait + this.adoption.remainingSilence };
    } finally {
      this.busy = false;
    }
  }

  /**
   * Check in and take part in rounds until `stop`. Raises RefusedError if the server does not know this device,
   * ClientError if it is not enrolled.
   */
  async runForever(): Promise<void> {
    this.device.gate.restart();
    const stopped = this.device.gate.stopped;
    let failures = 0;
    while (!stopped.aborted) {
      let wait: number;
      try {
        wait = jittered((await this.once(true)).wait);
        failures = 0;
      } catch (error) {
        // `stop` was called while the device waited for the server.
        if (error instanceof RoundAbandonedError) continue;
        const refused = error instanceof RefusedError;
        // Any other refusal is final: the same request would be refused again.
        if (!(error instanceof UnreachableError || (refused && isLater(error.status)))) throw error;
        failures++;
        const asked = refused ? error.retryAfter : null;
        wait = waitAfter(failures, 2 * this.config.backoff, this.config.maxOfflineWait, asked);
      }
      await sleep(wait, stopped);
    }
  }

  /** Take part in nothing until `resume`, also after the page was closed; a round that waits too long is left. */
  async pause(reason: string): Promise<void> {
    await this.device.database.write({ store: "own", key: "paused", value: reason });
  }

  async resume(): Promise<void> {
    await this.device.database.write({ store: "own", key: "paused" });
  }

  /** Destroy the device's keys, its state, its journal and its enrolment. The device has to enrol again afterwards. */
  async erase(): Promise<void> {
    this.stop();
    await this.device.database.erase();
    this.enrolment = null;
    this.emit("erased", {});
  }

  async report(): Promise<DeviceReport> {
    const { database, journal } = this.device;
    const totals = await journal.totals();
    return {
      deviceId: this.deviceId,
      population: this.enrolment?.population ?? "",
      server: this.enrolment?.server ?? "",
      paused: (await database.get<string>("own", "paused")) ?? null,
      totals,
      epsilon: epsilonOf(totals.rho),
      rounds: await journal.entries(),
    };
  }

  /** The number of the version that this device runs, by model. */
  running(): Promise<Readonly<Record<string, number>>> {
    return this.models.slots.versions();
  }

  /** Predict with the version of a model that this device runs. Raises ClientError where it runs none. */
  predict(model: string, x: NdArray | Examples): Promise<NdArray | Record<string, NdArray>> {
    const { enrolment } = this;
    if (enrolment === null) throw new ClientError("this device is not enrolled, so it runs no model");
    return this.models.predict(model, x, withAllowedPublishers(enrolment, this.config).publisherKeys);
  }

  // --- inside -------------------------------------------------------------------------------------------------------

  private async checkInAsKnown(): Promise<Outcome> {
    try {
      return await this.checkIn();
    } catch (error) {
      // The request for the next key may reach the server long after the device gave up on an answer; the server then
      // refuses the old key. Sending the request again finds that out.
      const rotating = error instanceof SessionRefusedError && this.device.vault.rotating;
      if (!rotating || !(await this.rotateKey())) throw error;
    }
    return this.checkIn();
  }

  private async checkIn(): Promise<Outcome> {
    this.connect();
    const { device } = this;
    const reason = await device.gate.whyNot();
    if (reason) {
      this.emit("paused", { reason });
      return outcome("paused", this.config.pauseSeconds, { reason });
    }
    if (device.vault.rotating) await this.rotateKey();
    // After `rotateKey`, which replaces the record and ends the session.
    const { session, transport, enrolment } = this.connect();
    transport.sent = transport.received = 0;
    const settling = new Settling(device, session);
    // Before the check-in: a new round must not start from a state that an interrupted round may replace.
    const interrupted = await findInterrupted(device.journal, enrolment.serverKey);
    if (interrupted !== null) {
      return this.takePart(interrupted.assigned, (part) => part.resume(interrupted.journal, this.config.pauseSeconds));
    }
    const pending = await settling.recover();
    if (pending) {
      this.emit("waiting", { retry_after: this.config.pauseSeconds }, pending);
      const why = "the round's result is still to come";
      return outcome("waiting", this.config.pauseSeconds, { roundId: pending, reason: why });
    }
    const { attributes } = this.config;
    const report = {
      protocols: PROTOCOLS,
      attributes: Object.keys(attributes).length ? attributes : undefined,
      versions: (await this.adoption.fetchedVersions()) ?? undefined,
    };
    const answer = await this.waiting.checkIn(session, report, this.patient, () => device.gate.stopped.aborted);
    const wait = Math.min(Math.max(answer.retry_after, SHORTEST_WAIT), LONGEST_WAIT);
    let assigned: Assigned | null = null;
    if (answer.plan !== null) {
      try {
        assigned = await assignedOf(answer.plan, enrolment.serverKey);
      } catch (error) {
        if (!(error instanceof CertificateError || error instanceof MessageError)) throw error;
        this.emit("refused", { reason: error.message });
        return outcome("refused", wait, { reason: error.message });
      }
    }
    // Rounds in which this device sent nothing and that the server does not assign again go on without it.
    for (const journal of await device.journal.unfinished()) {
      if (journal.keysSent || journal.entry.roundId === assigned?.plan.round_id) continue;
      await journal.close("dropped", "interrupted before keys were sent; the round went on without this device", 0, 0);
    }
    const mine = withAllowedPublishers(enrolment, this.config);
    if (assigned === null || (await this.hasBeenIn(assigned.plan))) {
      await this.adoption.consider(answer.offers, session, mine);
      this.noteSetAside(answer.set_aside?.until ?? null, answer.set_aside?.reason ?? "");
      this.emit("waiting", { retry_after: wait });
      return outcome("waiting", wait, { reason: answer.set_aside?.reason ?? "" });
    }
    const { plan } = assigned;
    const old = whyExpired(plan, Date.now() / 1000, transport.serverTime) || (await device.journal.whyOld(plan));
    if (old) {
      // Not entered in the journal: old plans that are sent again must not push other rounds out of it.
      const text = `the plan of round ${plan.round_id} is an old one: ${old}`;
      await settling.leave(plan.round_id, "other");
      this.emit("refused", { reason: text }, plan.round_id);
      return outcome("refused", wait, { roundId: plan.round_id, reason: text });
    }
    const done = await this.takePart(assigned, (part) => part.run(wait));
    if (done.kind !== "paused" && !device.gate.stopped.aborted) await this.afterRound(answer.offers, session, mine);
    return done;
  }

  private async afterRound(offers: readonly Sealed[], session: DeviceSession, mine: Enrolment): Promise<void> {
    try {
      await this.adoption.consider(offers, session, mine);
    } catch (error) {
      // The round is over, so its outcome counts: the next check-in offers the versions again.
      if (!(error instanceof UnreachableError || error instanceof RefusedError)) throw error;
    }
  }

  private async takePart(assigned: Assigned, work: (part: Participation) => Promise<Outcome>): Promise<Outcome> {
    const { session, enrolment } = this.connect();
    this.roundId = assigned.plan.round_id;
    try {
      const mine = withAllowedPublishers(enrolment, this.config);
      return await work(new Participation(this.device, session, mine, assigned));
    } finally {
      this.roundId = "";
      await this.models.renew();
    }
  }

  /** Whether this device has sent something in the round already; it must not take part in it again. */
  private async hasBeenIn(plan: RoundPlan): Promise<boolean> {
    const before = await this.device.journal.get(plan.round_id);
    return before !== undefined && before.step !== "assigned";
  }

  private noteSetAside(until: number | null, reason: string): void {
    const now = until === null ? "" : `${until} ${reason}`;
    if (until !== null && now !== this.setAside) this.emit("set_aside", { until, reason });
    this.setAside = now;
  }

  private connect(): { session: DeviceSession; transport: Transport; enrolment: Enrolment } {
    const { enrolment } = this;
    if (enrolment === null) throw new ClientError("this device is not enrolled; call enrol with its token first");
    if (this.transport === null || this.session === null) {
      const server = checkedServer(this.config.server || enrolment.server, this.config.allowHttp);
      this.transport = this.newTransport(server);
      this.session = new DeviceSession(this.transport, enrolment, this.device.vault.identity);
    }
    return { session: this.session, transport: this.transport, enrolment };
  }

  private newTransport(server: string): Transport {
    const { gate } = this.device;
    const { fetch = globalThis.fetch } = this.page;
    return new Transport(server, this.config, (seconds) => gate.pause(seconds), () => gate.stopped, fetch);
  }

  private emit(name: DeviceEvent["name"], detail: DeviceEvent["detail"], roundId = this.roundId): void {
    const { sent = 0, received = 0 } = this.transport ?? {};
    const counted = { bytesSent: sent, bytesReceived: received };
    this.page.onEvent({ name, deviceId: this.deviceId, roundId, ...counted, detail });
  }
}

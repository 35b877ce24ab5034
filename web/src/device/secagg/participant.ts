/**
 * The device's side of secure aggregation: six steps, each once and in order (archipel/protocol/secagg/participant.py).
 *
 * Bonawitz et al. 2017, figure 4 with the steps against an active server, over a complete graph; and a step in which
 * devices complain about peers whose shares do not open, before anything that holds a vector is sent.
 */

import { type Bytes, concat, sameBytes } from "../bytes.js";
import { agree, agreementKey, drawExactly, publicKeyOf, randomBytes, type SigningKey } from "../crypto.js";
import {
  CertificateError, ConsistencyError, PolicyError, SecureAggregationError, ShareError, ThresholdError,
} from "../errors.js";
import { type VerifiedDevice, verifyChain } from "../identity.js";
import type { Chain, Sealed } from "../messages/identity.js";
import type { RoundPlan } from "../messages/rounds.js";
import type {
  Advertisement, AdvertiseRequest, Cohort, Complaint, Complaints, Confirmations, EncryptedShare, Shares,
  Survivors, Unmasking,
} from "../messages/secure.js";
import type { Revoked } from "../revocations.js";
import { seal } from "../sealed.js";
import { splits } from "../thresholds.js";
import { cohortDigest, readEnvelopeKeys, verifyCohort } from "./cohort.js";
import { checkComplaints, complaintsDigest } from "./complaints.js";
import { requireConfirmations, survivorsDigest } from "./confirmations.js";
import {
  checkSenders, checkSignature, type HeldShares, NONCE_BYTES, openShares, sealShares, signEnvelope,
} from "./envelope.js";
import { KeyTree } from "./key_tree.js";
import { envelopeKey, envelopePrivateKey, pairwiseMaskKey, roundSalt, selfMaskKey } from "./keys.js";
import { applyMask, checkVector, pairwiseSign, reduce } from "./masks.js";
import { type Peer, Session } from "./session.js";
import { split } from "./shamir.js";
import { LEFT, readState, State, type Step, STEPS, writeState } from "./state.js";

const NOTHING = new Uint8Array();

export interface Identity {
  readonly key: SigningKey;
  readonly chain: Chain;
  /** The key at the start of every member's chain. */
  readonly enrolmentKey: Uint8Array;
}

/**
 * One device in one secure round.
 *
 * A step that fails ends the participation: the secrets are dropped, and every later call raises
 * SecureAggregationError. A step out of order raises it, too, and changes nothing. `save` and `resume` take the device
 * over a reload.
 */
export class Participant {
  private readonly salt: Bytes;
  private state: State;
  private sent: Bytes = NOTHING;

  private constructor(
    private readonly plan: RoundPlan,
    private readonly planDigest: string,
    private readonly identity: Identity,
    private readonly own: VerifiedDevice,
    private readonly revoked: Revoked,
    private readonly randomness: (bytes: number) => Bytes,
  ) {
    this.salt = roundSalt(plan.round_id, planDigest);
    this.state = new State(plan.round_id, planDigest, own.deviceId);
  }

  /**
   * `plan` is verified and checked against the policy by the caller; cohorts with one of the `revoked` are refused.
   * Raises CertificateError (chain or identity) or PolicyError (not a plan that can be secure).
   */
  static async open(
    plan: RoundPlan,
    planDigest: string,
    identity: Identity,
    revoked: Revoked,
    randomness: (bytes: number) => Bytes = randomBytes,
  ): Promise<Participant> {
    const own = await verifyChain(identity.chain, identity.enrolmentKey);
    if (!sameBytes(identity.key.publicKey, own.deviceKey)) {
      throw new CertificateError(`device ${own.deviceId}: its chain is for another identity key`);
    }
    // The colluders' vectors are known to the server, so at least two others are needed to hide each other.
    if (plan.privacy !== "secure" || plan.min_cohort - plan.colluders < 2) {
      throw new PolicyError(
        `plan ${plan.round_id}: expected a secure round with min_cohort of at least ${2 + plan.colluders}, ` +
          `got ${plan.privacy} with ${plan.min_cohort}`,
      );
    }
    return new Participant(plan, planDigest, identity, own, revoked, randomness);
  }

  /**
   * The device after a reload, from what `save` gave; the other arguments are those of `open`. Raises MessageError for
   * a damaged state, ConsistencyError for one of another round or device.
   */
  static async resume(
    saved: Uint8Array,
    plan: RoundPlan,
    planDigest: string,
    ...given: [identity: Identity, revoked: Revoked, randomness?: (bytes: number) => Bytes]
  ): Promise<Participant> {
    const device = await Participant.open(plan, planDigest, ...given);
    const { state, said } = await readState(saved, plan, planDigest, device.deviceId);
    device.state = state;
    device.sent = said;
    return device;
  }

  /**
   * All that the device needs to go on after a reload, with `said`, the bytes that it is about to send. It has secrets.
   *
   * Whoever sends what a step returned MUST have stored this before, sealed and on disk: otherwise a device could be
   * led to say two different things. Raises SecureAggregationError where the device has left the round.
   */
  save(said: Uint8Array): Bytes {
    return writeState(this.state, said);
  }

  get deviceId(): string {
    return this.own.deviceId;
  }

  /** The step that comes next. */
  get next(): State["next"] {
    return this.state.next;
  }

  /** Of a device that was resumed: what it was about to send when it was saved. */
  get said(): Bytes {
    return this.sent;
  }

  /** Step 0: makes the round's X25519 keys, an envelope key for each possible sender among them. */
  advertise(): Promise<AdvertiseRequest> {
    return this.step("advertise", async () => {
      this.state.cipherSecret = this.draw(32);
      this.state.maskSecret = this.draw(32);
      this.state.envelopeSecret = this.draw(32);
      // The cohort is not known yet, so every place that it may have gets a key.
      const keys: Bytes[] = [];
      for (let place = 0; place < this.plan.max_cohort; place++) {
        keys.push(await publicKeyOf(await this.envelopePrivate(place)));
      }
      const envelopeKeys = concat(...keys);
      this.state.tree = await KeyTree.of(envelopeKeys, this.plan.max_cohort);
      const advertisement: Advertisement = {
        round_id: this.plan.round_id,
        plan: this.planDigest,
        cipher_key: await publicKeyOf(this.state.cipherSecret),
        mask_key: await publicKeyOf(this.state.maskSecret),
        envelope_root: this.state.tree.root,
      };
      return {
        advertisement: await seal("advertisement", advertisement, this.identity.key),
        envelope_keys: envelopeKeys,
      };
    });
  }

  /** Step 1: verifies U1; returns shares of the mask key and of the seed, sealed for each peer, signed. */
  share(cohort: Cohort): Promise<Shares> {
    return this.step("share", async () => {
      const { plan, planDigest, deviceId } = this;
      const { enrolmentKey } = this.identity;
      const peers = await verifyCohort(cohort, this.own, enrolmentKey, plan.round_id, planDigest, this.revoked);
      this.state.peers = peers;
      this.state.cohort = await cohortDigest(cohort);
      await this.checkCohort();
      const envelopeKeys = await readEnvelopeKeys(cohort, deviceId, this.session);
      // Every check of U1 is done: only now are secrets split and leave the device.
      this.state.seed = this.draw(32);
      const draw = (bytes: number): Bytes => this.draw(bytes);
      const maskKeyShares = split(this.state.maskSecret, plan.threshold, peers.size, draw);
      const seedShares = split(this.state.seed, plan.threshold, peers.size, draw);
      const dealt = (place: number): HeldShares => ({
        maskKey: maskKeyShares[place] as Bytes,
        seed: seedShares[place] as Bytes,
      });
      const own = this.session.peer(deviceId);
      // The device is its own peer here: `unmask` reveals its share of its own seed like that of any survivor.
      this.state.held.set(deviceId, dealt(own.place));
      const cipher = await agreementKey(this.state.cipherSecret);
      const shares: EncryptedShare[] = [];
      for (const peer of this.others(peers.keys())) {
        const publicKey = envelopeKeys.get(peer.deviceId) as Uint8Array;
        const associated = this.session.associated(deviceId, peer.deviceId);
        const key = await envelopeKey(await agree(cipher, publicKey), this.salt, own.cipherKey, publicKey);
        const ciphertext = await sealShares(key, this.draw(NONCE_BYTES), dealt(peer.place), associated);
        const signature = await signEnvelope(this.identity.key, ciphertext, associated);
        shares.push({ peer: peer.deviceId, ciphertext, signature });
      }
      // Each secret is dropped after its last use: what leaks from the device later opens no envelope.
      this.state.cipherSecret = NOTHING;
      return { shares };
    });
  }

  /**
   * Step 2: opens the envelopes that the other members of U2 sealed for this device. Returns a complaint about each
   * sender whose signed envelope holds no shares; mostly none.
   */
  complain(inbox: Shares): Promise<Complaints> {
    return this.step("complain", async () => {
      checkSenders(inbox, this.deviceId, this.session);
      const complaints: Complaint[] = [];
      for (const share of inbox.shares) {
        const complaint = await this.receive(share);
        if (complaint !== null) complaints.push(complaint);
      }
      this.state.accused = new Set(complaints.map((complaint) => complaint.accused));
      // The accused stay in U2 until `mask`, where all members exclude the same devices.
      this.state.sharers = new Set([...this.state.held.keys(), ...this.state.accused]);
      // A complaint carries the one private key that proves it; the secret opens no envelope after this.
      this.state.envelopeSecret = NOTHING;
      this.state.tree = KeyTree.empty;
      this.require("devices that shared keys", this.state.sharers.size);
      return { complaints: complaints.sort((one, other) => (one.accused < other.accused ? -1 : 1)) };
    });
  }

  /**
   * Step 3: masks `vector` (entries below 2^b, the plan's modulus) and returns the result. `list` are the round's
   * complaints; the device verifies each and takes the accused out of U2.
   */
  mask(vector: Uint32Array, list: Complaints): Promise<Uint32Array> {
    return this.step("mask", async () => {
      checkVector("update", vector, this.plan.modulus_bits);
      // Before the masks: with a device that the others exclude, a pairwise mask would never cancel.
      await this.exclude(list);
      const own = this.session.peer(this.deviceId);
      const masked = vector.slice();
      // The paper's double masking: the peers reveal the mask key of a device that seems to have dropped out. Should
      // its vector arrive after all, this mask alone still hides it.
      await applyMask(masked, await selfMaskKey(this.state.seed, this.salt, own.maskKey), 1);
      const secret = await agreementKey(this.state.maskSecret);
      for (const peer of this.others(this.state.sharers)) {
        const shared = await agree(secret, peer.maskKey);
        const key = await pairwiseMaskKey(shared, this.salt, own.maskKey, peer.maskKey);
        await applyMask(masked, key, pairwiseSign(this.deviceId, peer.deviceId));
      }
      reduce(masked, this.plan.modulus_bits);
      this.state.maskSecret = this.state.seed = NOTHING;
      return masked;
    });
  }

  /** Step 4: signs U3, the sorted list of devices whose masked vectors are in the sum, and the complaints. */
  confirm(survivors: Survivors): Promise<Sealed> {
    return this.step("confirm", async () => {
      const survivorsHash = await survivorsDigest(survivors);
      const foreign = survivors.devices.filter((device) => !this.state.sharers.has(device));
      if (foreign.length) {
        throw new ConsistencyError(`survivors: ${foreign.slice(0, 3).join(", ")} did not share keys with this device`);
      }
      // As a dropped device it would have its mask key revealed, while the server holds its masked vector.
      if (!survivors.devices.includes(this.deviceId)) {
        throw new ConsistencyError("survivors: this device is not among them, though its vector was sent");
      }
      this.require("survivors", survivors.devices.length);
      this.state.survivors = survivors.devices;
      this.state.confirmation = {
        round_id: this.plan.round_id,
        plan: this.planDigest,
        cohort: this.session.cohort,
        complaints: this.state.complaints,
        survivors: survivorsHash,
      };
      return seal("confirmation", this.state.confirmation, this.identity.key);
    });
  }

  /**
   * Step 5: reveals one share for every member of U2, once `threshold` survivors signed the same confirmation: of the
   * seed for a survivor, of the mask key for a dropped device. Both would let the server unmask that device's vector.
   */
  unmask(confirmations: Confirmations): Promise<Unmasking> {
    return this.step("unmask", async () => {
      // First: without this check a server could show two survivor sets and get both shares of one device.
      const { survivors, sharers, confirmation } = this.state;
      await requireConfirmations(confirmations, survivors, confirmation, this.session, this.plan.threshold);
      const dropped = [...sharers].filter((device) => !survivors.includes(device)).sort();
      const held = (device: string): HeldShares => this.state.held.get(device) as HeldShares;
      return {
        self_seeds: survivors.map((device) => ({ device, share: held(device).seed })),
        mask_keys: dropped.map((device) => ({ device, share: held(device).maskKey })),
      };
    });
  }

  // --- inside -------------------------------------------------------------------------------------------------------

  private get session(): Session {
    const { plan, planDigest, state } = this;
    return new Session(plan.round_id, planDigest, state.cohort, state.peers, plan.max_cohort);
  }

  private async checkCohort(): Promise<void> {
    const { plan } = this;
    const size = this.session.peers.size;
    const own = this.session.peers.get(this.deviceId);
    // Its own advertisement, which is signed, may still be one of an earlier attempt, whose private keys are gone.
    const known =
      own !== undefined &&
      sameBytes(own.cipherKey, await publicKeyOf(this.state.cipherSecret)) &&
      sameBytes(own.maskKey, await publicKeyOf(this.state.maskSecret)) &&
      sameBytes(own.envelopeRoot, this.state.tree.root);
    if (!known) throw new ConsistencyError("cohort: this device is not in it with the keys that it advertised");
    if (size > plan.max_cohort) {
      throw new ConsistencyError(`cohort: ${size} devices, the plan allows ${plan.max_cohort}`);
    }
    this.require("cohort", size);
    if (splits(plan.threshold, size, plan.colluders)) {
      throw new ThresholdError(
        `cohort: threshold ${plan.threshold} is not more than half of ${size} devices and ${plan.colluders} ` +
          "colluders together; a server could split the cohort into two groups that each unmask something else",
      );
    }
  }

  /** Keeps the envelope's two shares; returns a complaint where it holds none. */
  private async receive(share: EncryptedShare): Promise<Complaint | null> {
    const sender = share.peer;
    const peer = this.session.peer(sender);
    const associated = this.session.associated(sender, this.deviceId);
    // The signature first: only an envelope that the sender signed proves anything against it.
    await checkSignature(peer.deviceKey, share.signature, share.ciphertext, associated, sender);
    const secret = await this.envelopePrivate(peer.place);
    const shared = await agree(await agreementKey(secret), peer.cipherKey);
    const key = await envelopeKey(shared, this.salt, peer.cipherKey, this.state.tree.key(peer.place));
    try {
      this.state.held.set(sender, await openShares(key, share.ciphertext, associated, sender));
      return null;
    } catch (error) {
      if (!(error instanceof ShareError)) throw error;
      const { ciphertext, signature } = share;
      const path = this.state.tree.path(peer.place);
      return { complainer: this.deviceId, accused: sender, ciphertext, signature, key: secret, path };
    }
  }

  private async exclude(list: Complaints): Promise<void> {
    const accused = await checkComplaints(list, this.session);
    if (accused.has(this.deviceId)) {
      throw new ConsistencyError("complaints: this device is accused; leaving the round");
    }
    // The server may merge complaints, but must not suppress one: this device cannot reveal a share that it lacks.
    const missing = [...this.state.accused].filter((device) => !accused.has(device)).sort();
    if (missing.length) {
      throw new ConsistencyError(
        `complaints: nobody accuses ${missing.slice(0, 3).join(", ")}, about which this device complained`,
      );
    }
    for (const device of accused) this.state.held.delete(device);
    this.state.sharers = new Set([...this.state.sharers].filter((device) => !accused.has(device)));
    this.state.complaints = await complaintsDigest(list);
    this.require("devices that shared keys and are not accused", this.state.sharers.size);
  }

  private require(what: string, count: number): void {
    // The threshold lets the sum be unmasked; min_cohort is how many devices must be in it to hide each other.
    const needed = Math.max(this.plan.threshold, this.plan.min_cohort);
    if (count < needed) throw new ThresholdError(`${what}: ${count}, the plan needs ${needed}; leaving the round`);
  }

  private others(devices: Iterable<string>): Peer[] {
    const ids = [...devices].filter((device) => device !== this.deviceId);
    return ids.sort().map((device) => this.session.peer(device));
  }

  private envelopePrivate(place: number): Promise<Bytes> {
    return envelopePrivateKey(this.state.envelopeSecret, this.salt, place);
  }

  private draw(count: number): Bytes {
    return drawExactly(this.randomness, count);
  }

  private async step<T>(name: Exclude<Step, "done">, work: () => Promise<T>): Promise<T> {
    if (this.state.next !== name) {
      throw new SecureAggregationError(`step ${name} in round ${this.plan.round_id}: expected ${this.state.next}`);
    }
    // Before the step: an interrupted step cannot be repeated, such as `unmask` for other survivors.
    this.state.next = LEFT;
    let result: T;
    try {
      result = await work();
    } catch (error) {
      this.state.forget();
      throw error;
    }
    this.state.next = STEPS[STEPS.indexOf(name) + 1] as Step;
    if (name === "unmask") this.state.forget();
    return result;
  }
}

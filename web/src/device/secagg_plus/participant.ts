/**
 * The device's side of a secure round over neighbours: seven steps, each once and in order
 * (archipel/protocol/secagg_plus/participant.py, Bell et al. 2020).
 *
 * Every neighbour holds a share of both secrets of a device and shows one of the two, so that both stay out of reach
 * together (sizes.ts). Where the server may be malicious a device has, before it shows anything, the signatures of
 * `threshold` neighbours that they take it as present.
 */

import { type Bytes, concat, sameBytes } from "../bytes.js";
import { agree, agreementKey, KEY_BYTES, publicKeyOf, randomBytes, sign } from "../crypto.js";
import { CertificateError, ConsistencyError, SecureAggregationError, ShareError, ThresholdError } from "../errors.js";
import { type VerifiedDevice, verifyChain } from "../identity.js";
import type { Revoked } from "../revocations.js";
import { pairwiseMaskKey, roundSalt, selfMaskKey } from "../secagg/keys.js";
import { applyMask, checkVector, reduce } from "../secagg/masks.js";
import type { Identity } from "../secagg/participant.js";
import { checkNeighbours, checkQuestion, remaining } from "./checks.js";
import { drawNeighbours } from "./drawing.js";
import { commitPair, envelopeKey, NONCE_BYTES, type Pair, seal, unseal } from "./envelope.js";
import { inclusion, presence, requireInclusions } from "./inclusion.js";
import { joinKeys, type RoundKeys, seedDigest, signMember } from "./member.js";
import {
  type Answer, type Confirmed, DEALT_BYTES, type Dealt, divide, type Drawn, type Inbox, type Inclusions,
  type Invitation, type Neighbours, NOBODY_SAYS, type Partners, QUESTION, type Question, type Refused, write,
} from "./messages.js";
import { bind } from "./session.js";
import { split } from "./shares.js";
import { checkSizes } from "./sizes.js";
import { LEFT, readState, State, STEPS, type Step, writeState } from "./state.js";
import type { Terms } from "./terms.js";

const NOTHING = new Uint8Array();

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
    private readonly terms: Terms,
    private readonly identity: Identity,
    private readonly own: VerifiedDevice,
    private readonly revoked: Revoked,
    private readonly randomness: (bytes: number) => Bytes,
  ) {
    this.salt = roundSalt(terms.session.roundId, terms.session.plan);
    this.state = new State(terms.session, own.deviceId);
  }

  /**
   * `terms` are those of a plan that the caller has verified; nobody of `revoked` is taken as a neighbour. Raises
   * CertificateError when chain and identity do not belong together.
   */
  static async open(
    terms: Terms,
    identity: Identity,
    revoked: Revoked,
    randomness: (bytes: number) => Bytes = randomBytes,
  ): Promise<Participant> {
    const own = await verifyChain(identity.chain, identity.enrolmentKey);
    if (!sameBytes(identity.key.publicKey, own.deviceKey)) {
      throw new CertificateError(`device ${own.deviceId}: its chain is for another identity key`);
    }
    return new Participant(terms, identity, own, revoked, randomness);
  }

  /**
   * The device after a reload, from what `save` gave; the other arguments are those of `open`. Raises MessageError for
   * a damaged state, ConsistencyError for one of another round or device.
   */
  static async resume(
    saved: Uint8Array,
    terms: Terms,
    ...given: [identity: Identity, revoked: Revoked, randomness?: (bytes: number) => Bytes]
  ): Promise<Participant> {
    const device = await Participant.open(terms, ...given);
    const { state, said } = readState(saved, terms.session, device.deviceId);
    [device.state, device.sent] = [state, said];
    return device;
  }

  /**
   * All that the device needs to go on after a reload, with `said`, the bytes that it is about to send. It has secrets.
   *
   * Whoever sends what a step returned MUST have stored this before, sealed and on disk: otherwise a device could be
   * led to say two different things. Raises SecureAggregationError where the device has left the round.
   */
  save(said: Bytes = NOTHING): Bytes {
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

  /** The places that it drew. */
  get neighbours(): readonly number[] {
    return this.state.neighbours;
  }

  /** How many devices are in the cohort; 0 before it was invited. */
  get cohort(): number {
    return this.state.invitation?.size ?? 0;
  }

  /** The question that it has confirmed; null where there is none. */
  get question(): Question | null {
    return this.state.question;
  }

  /** Step 0: makes the round's secrets; returns this device as a member, with the public keys, signed. */
  advertise(): Promise<Bytes> {
    return this.step("advertise", async () => {
      [this.state.cipherSecret, this.state.maskSecret] = [this.random(KEY_BYTES), this.random(KEY_BYTES)];
      this.state.seed = this.random(KEY_BYTES);
      this.state.public = {
        cipherKey: await publicKeyOf(this.state.cipherSecret),
        maskKey: await publicKeyOf(this.state.maskSecret),
        seedDigest: await seedDigest(this.state.seed, this.terms.session),
      };
      const { chain, key } = this.identity;
      this.state.member = await signMember(this.terms.session, joinKeys(this.state.public), chain, key);
      return this.state.member;
    });
  }

  /** Step 1: draws neighbours among the cohort, which is fixed by its root. Raises PolicyError or ThresholdError. */
  draw(invitation: Invitation): Promise<Drawn> {
    return this.step("draw", async () => {
      const { sizes, assumed, minCohort, maxCohort } = this.terms;
      const { size, place } = invitation;
      if (size < minCohort || size > maxCohort || place >= size) {
        throw new ThresholdError(
          `cohort: place ${place} of ${size} devices, the plan has ${minCohort} to ${maxCohort}`,
        );
      }
      checkSizes(sizes, size, assumed);
      this.state.invitation = invitation;
      this.state.neighbours = drawNeighbours(size, place, sizes.neighbours, (bytes) => this.random(bytes));
      return { places: this.state.neighbours };
    });
  }

  /** Step 2: verifies the neighbours; returns shares of the mask key and of the seed, sealed for each. */
  deal(neighbours: Neighbours): Promise<Dealt> {
    return this.step("deal", async () => {
      const { session, sizes } = this.terms;
      const { enrolmentKey } = this.identity;
      const expected = { session, enrolmentKey, own: this.own, ownMember: this.state.member, revoked: this.revoked };
      const found = await checkNeighbours(neighbours, this.state.neighbours, this.invitation, expected);
      this.state.deviceKeys = new Map([...found].map(([place, { deviceKey }]) => [place, deviceKey]));
      const partners = this.state.neighbours.slice(0, sizes.partners);
      const keysAt = (place: number): RoundKeys => (found.get(place) as { keys: RoundKeys }).keys;
      this.state.maskKeys = new Map(partners.map((place) => [place, keysAt(place).maskKey]));
      // Every check is done: only now are secrets split and leave the device.
      const draw = (bytes: number): Bytes => this.random(bytes);
      const maskKeys = split(this.state.maskSecret, sizes.threshold, this.state.neighbours.length, draw);
      const seeds = split(this.state.seed, sizes.threshold, this.state.neighbours.length, draw);
      const cipher = await agreementKey(this.state.cipherSecret);
      const [own, mine] = [this.invitation.place, this.state.public.cipherKey];
      const dealt: Bytes[] = [];
      for (const [index, place] of this.state.neighbours.entries()) {
        const theirs = keysAt(place).cipherKey;
        const key = await envelopeKey(cipher, theirs, this.salt, mine, theirs);
        const pair: Pair = { maskKey: maskKeys[index] as Bytes, seed: seeds[index] as Bytes };
        dealt.push(await seal(key, this.bound, own, place, pair, this.random(NONCE_BYTES)));
        dealt.push(await commitPair(this.bound, own, index + 1, pair));
      }
      return { places: this.state.neighbours, dealt: concat(...dealt) };
    });
  }

  /**
   * Step 3: opens the envelopes that others sealed for this device; returns whose it cannot accept.
   *
   * Nobody is blamed for one: the server, the dealer or this device may have garbled it. Raises ShareError for an inbox
   * that no honest server makes.
   */
  receive(inbox: Inbox): Promise<Refused> {
    return this.step("receive", async () => {
      const { dealers } = inbox;
      const cipherKeys = divide("inbox", inbox.cipher_keys, KEY_BYTES, dealers.length);
      const envelopes = divide("inbox", inbox.dealt, DEALT_BYTES, dealers.length);
      const cipher = await agreementKey(this.state.cipherSecret);
      const [own, mine, refused] = [this.invitation.place, this.state.public.cipherKey, new Set<number>()];
      for (const [index, dealer] of dealers.entries()) {
        // A second envelope would replace the first, and a share of the one be shown for the other.
        if (this.state.held.has(dealer) || refused.has(dealer)) {
          throw new ShareError(`inbox: shares from place ${dealer} twice`);
        }
        if (dealer === own || dealer >= this.invitation.size) {
          throw new ShareError(`inbox: shares from place ${dealer}, which is nobody else's in the cohort`);
        }
        const [theirs, dealt] = [cipherKeys[index] as Bytes, envelopes[index] as Bytes];
        try {
          const key = await envelopeKey(cipher, theirs, this.salt, theirs, mine);
          const position = inbox.positions[index] as number;
          this.state.held.set(dealer, await unseal(key, this.bound, dealer, own, position, dealt));
        } catch (error) {
          if (!(error instanceof SecureAggregationError)) throw error;
          refused.add(dealer);
        }
      }
      // What leaks from the device later opens no envelope.
      this.state.cipherSecret = NOTHING;
      return { dealers: [...refused].sort((one, other) => one - other) };
    });
  }

  /**
   * Step 4: masks `vector` (entries below 2^b, the plan's modulus) and returns the result.
   *
   * The masks are the self mask and one for each partner: those that this device drew and that are not gone, and those
   * that drew it. Raises ConsistencyError, ThresholdError (too many are gone to hide this device) or ProtocolError.
   */
  mask(vector: Uint32Array, partners: Partners): Promise<Uint32Array> {
    return this.step("mask", async () => {
      const { modulusBits, sizes, assumed } = this.terms;
      checkVector("update", vector, modulusBits);
      const needed = assumed.server === "malicious" ? sizes.threshold : 1;
      const others = remaining(partners, this.state.maskKeys, this.invitation.place, needed);
      const masked = vector.slice();
      const mine = this.state.public.maskKey;
      // Should this device seem to have left, its mask key is reconstructed. If its vector comes after all, this mask
      // alone still hides it.
      await applyMask(masked, await selfMaskKey(this.state.seed, this.salt, mine), 1);
      const secret = await agreementKey(this.state.maskSecret);
      for (const [place, theirs] of others) {
        const key = await pairwiseMaskKey(await agree(secret, theirs), this.salt, mine, theirs);
        // The one at the higher place adds the pair's mask, the other subtracts it.
        await applyMask(masked, key, this.invitation.place > place ? 1 : -1);
      }
      reduce(masked, modulusBits);
      // Without these no other vector can be masked, by whatever way the step is reached again.
      this.state.maskSecret = this.state.seed = NOTHING;
      return masked;
    });
  }

  /**
   * Step 5: fixes what this device will answer. With a malicious server it signs for each present dealer whose shares
   * it holds that it is present. Raises ConsistencyError for a question that no honest server asks.
   */
  confirm(question: Question): Promise<Confirmed> {
    return this.step("confirm", async () => {
      checkQuestion(question, this.state.held);
      this.state.question = question;
      if (this.terms.assumed.server !== "malicious") return { signatures: NOTHING };
      const signatures: Bytes[] = [];
      for (const dealer of question.present) {
        signatures.push(await sign(this.identity.key, inclusion(this.bound, dealer, this.invitation.place)));
      }
      return { signatures: concat(...signatures) };
    });
  }

  /**
   * Step 6: shows one share of each dealer asked for: of the seed of those present, of the mask key of the rest.
   *
   * The question must be the one of step 5. With a malicious server `inclusions` must have signatures of at least
   * `threshold` neighbours that this device is present. Raises ConsistencyError or ThresholdError.
   */
  answer(question: Question, inclusions: Inclusions = NOBODY_SAYS): Promise<Answer> {
    return this.step("answer", async () => {
      checkQuestion(question, this.state.held);
      const { question: confirmed } = this.state;
      if (confirmed === null || !sameBytes(write(QUESTION, question), write(QUESTION, confirmed))) {
        throw new ConsistencyError("question: it is not the one that this device has confirmed");
      }
      const { assumed, sizes } = this.terms;
      if (assumed.server === "malicious") {
        await requireInclusions(inclusions, this.state.deviceKeys, this.bound, this.invitation.place, sizes.threshold);
      }
      const pair = (dealer: number): Pair => this.state.held.get(dealer) as Pair;
      return {
        seeds: concat(...question.present.map((dealer) => pair(dealer).seed)),
        mask_keys: concat(...question.left.map((dealer) => pair(dealer).maskKey)),
        presence: await sign(this.identity.key, presence(this.bound)),
      };
    });
  }

  // --- inside -------------------------------------------------------------------------------------------------------

  private get invitation(): Invitation {
    const { invitation } = this.state;
    if (invitation === null) throw new SecureAggregationError("this device has not been invited to a cohort");
    return invitation;
  }

  private get bound(): Bytes {
    return bind(this.terms.session, this.invitation.root);
  }

  private random(count: number): Bytes {
    const drawn = this.randomness(count);
    // Too short a draw would still make keys, which somebody could guess.
    if (drawn.length !== count) {
      throw new SecureAggregationError(`randomness: asked for ${count} bytes, got ${drawn.length}`);
    }
    return drawn;
  }

  private async step<T>(name: Exclude<Step, "done">, work: () => Promise<T>): Promise<T> {
    const { state } = this;
    if (state.next !== name) {
      throw new SecureAggregationError(`step ${name} in round ${this.terms.session.roundId}: expected ${state.next}`);
    }
    // Before the step: an interrupted step cannot be repeated, such as `answer` to another question.
    state.next = LEFT;
    let result: T;
    try {
      result = await work();
    } catch (error) {
      state.forget();
      throw error;
    }
    state.next = STEPS[STEPS.indexOf(name) + 1] as Step;
    if (name === "answer") state.forget();
    return result;
  }
}

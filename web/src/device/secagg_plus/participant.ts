/**
 * The device's side of a secure round over neighbours: seven steps, each once and in order
 * (archipel/protocol/secagg_plus/participant.py, Bell et al. 2020).
 *
 * Every neighbour holds a share of both secrets of a device and shows one of the two, so that both stay out of reach
 * together (sizes.ts). Where the server may be malicious a device has, before it shows anything, the signatures of
 * `threshold` neighbours that they take it as present.
 */

import { type Bytes, concat, sameBytes } from "../bytes.js";
import { agree, agreementKey, digest, KEY_BYTES, publicKeyOf, randomBytes, sign } from "../crypto.js";
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
  ANSWER, type Answer, CONFIRMED, type Confirmed, DEALT, DEALT_BYTES, type Dealt, divide, DRAWN, type Drawn, INBOX,
  type Inbox, INCLUSIONS, type Inclusions, INVITATION, type Invitation, type Kind, NEIGHBOURS, type Neighbours,
  NOBODY_SAYS, type Partners, QUESTION, type Question, read, REFUSED, type Refused, write,
} from "./messages.js";
import { bind } from "./session.js";
import { split } from "./shares.js";
import { checkSizes } from "./sizes.js";
import type { Terms } from "./terms.js";

const STEPS = ["advertise", "draw", "deal", "receive", "mask", "confirm", "answer", "done"] as const;
type Step = (typeof STEPS)[number];

const NOTHING = new Uint8Array();

/**
 * One device in one secure round.
 *
 * A step that fails ends the participation: the secrets are dropped, and every later call raises
 * SecureAggregationError. A step out of order raises it, too, and changes nothing. The last step may be repeated with
 * what it was given before and returns the same.
 */
export class Participant {
  private next: Step | "nothing, the device left the round" = "advertise";
  private readonly salt: Bytes;
  private cipherSecret: Bytes = NOTHING;
  private maskSecret: Bytes = NOTHING;
  private seed: Bytes = NOTHING;
  /** By dealer its shares that this device holds. */
  private readonly held = new Map<number, Pair>();
  private public: RoundKeys = { cipherKey: NOTHING, maskKey: NOTHING, seedDigest: NOTHING };
  private member: Bytes = NOTHING;
  private invited: Invitation | null = null;
  /** The places that this device drew. */
  private neighbours: readonly number[] = [];
  /** Of its partners, and of its neighbours, by place. */
  private maskKeys: ReadonlyMap<number, Uint8Array> = new Map();
  private deviceKeys: ReadonlyMap<number, Uint8Array> = new Map();
  /** The one that it has confirmed. */
  private question: Bytes | null = null;
  /** The last step, the digest of what it was given, and what it returned. */
  private done = "";
  private given: Bytes = NOTHING;
  private said: Bytes = NOTHING;

  private constructor(
    private readonly terms: Terms,
    private readonly identity: Identity,
    private readonly own: VerifiedDevice,
    private readonly revoked: Revoked,
    private readonly randomness: (bytes: number) => Bytes,
  ) {
    this.salt = roundSalt(terms.session.roundId, terms.session.plan);
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

  get deviceId(): string {
    return this.own.deviceId;
  }

  /** Step 0: makes the round's secrets; returns this device as a member, with the public keys, signed. */
  async advertise(): Promise<Bytes> {
    if (this.done === "advertise") return this.member;
    return this.step("advertise", async () => {
      [this.cipherSecret, this.maskSecret] = [this.draw(KEY_BYTES), this.draw(KEY_BYTES)];
      this.seed = this.draw(KEY_BYTES);
      this.public = {
        cipherKey: await publicKeyOf(this.cipherSecret),
        maskKey: await publicKeyOf(this.maskSecret),
        seedDigest: await seedDigest(this.seed, this.terms.session),
      };
      const { chain, key } = this.identity;
      this.member = await signMember(this.terms.session, joinKeys(this.public), chain, key);
      return this.member;
    });
  }

  /** Step 1: draws neighbours among the cohort, which is fixed by its root. Raises PolicyError or ThresholdError. */
  drawNeighbours(invitation: Invitation): Promise<Drawn> {
    return this.once("draw", write(INVITATION, invitation), DRAWN, async () => {
      const { sizes, assumed, minCohort, maxCohort } = this.terms;
      const { size, place } = invitation;
      if (size < minCohort || size > maxCohort || place >= size) {
        throw new ThresholdError(
          `cohort: place ${place} of ${size} devices, the plan has ${minCohort} to ${maxCohort}`,
        );
      }
      checkSizes(sizes, size, assumed);
      this.invited = invitation;
      this.neighbours = drawNeighbours(size, place, sizes.neighbours, (bytes) => this.draw(bytes));
      return { places: this.neighbours };
    });
  }

  /** Step 2: verifies the neighbours; returns shares of the mask key and of the seed, sealed for each. */
  deal(neighbours: Neighbours): Promise<Dealt> {
    return this.once("deal", write(NEIGHBOURS, neighbours), DEALT, async () => {
      const { session, sizes } = this.terms;
      const { enrolmentKey } = this.identity;
      const expected = { session, enrolmentKey, own: this.own, ownMember: this.member, revoked: this.revoked };
      const found = await checkNeighbours(neighbours, this.neighbours, this.invitation, expected);
      this.deviceKeys = new Map([...found].map(([place, { deviceKey }]) => [place, deviceKey]));
      const partners = this.neighbours.slice(0, sizes.partners);
      const keysAt = (place: number): RoundKeys => (found.get(place) as { keys: RoundKeys }).keys;
      this.maskKeys = new Map(partners.map((place) => [place, keysAt(place).maskKey]));
      // Every check is done: only now are secrets split and leave the device.
      const draw = (bytes: number): Bytes => this.draw(bytes);
      const maskKeys = split(this.maskSecret, sizes.threshold, this.neighbours.length, draw);
      const seeds = split(this.seed, sizes.threshold, this.neighbours.length, draw);
      const cipher = await agreementKey(this.cipherSecret);
      const [own, mine] = [this.invitation.place, this.public.cipherKey];
      const dealt: Bytes[] = [];
      for (const [index, place] of this.neighbours.entries()) {
        const theirs = keysAt(place).cipherKey;
        const key = await envelopeKey(cipher, theirs, this.salt, mine, theirs);
        const pair: Pair = { maskKey: maskKeys[index] as Bytes, seed: seeds[index] as Bytes };
        dealt.push(await seal(key, this.bound, own, place, pair, this.draw(NONCE_BYTES)));
        dealt.push(await commitPair(this.bound, own, index + 1, pair));
      }
      return { places: this.neighbours, dealt: concat(...dealt) };
    });
  }

  /**
   * Step 3: opens the envelopes that others sealed for this device; returns whose it cannot accept.
   *
   * Nobody is blamed for one: the server, the dealer or this device may have garbled it. Raises ShareError for an inbox
   * that no honest server makes.
   */
  receive(inbox: Inbox): Promise<Refused> {
    return this.once("receive", write(INBOX, inbox), REFUSED, async () => {
      const { dealers } = inbox;
      const cipherKeys = divide("inbox", inbox.cipher_keys, KEY_BYTES, dealers.length);
      const envelopes = divide("inbox", inbox.dealt, DEALT_BYTES, dealers.length);
      const cipher = await agreementKey(this.cipherSecret);
      const [own, mine, refused] = [this.invitation.place, this.public.cipherKey, new Set<number>()];
      for (const [index, dealer] of dealers.entries()) {
        // A second envelope would replace the first, and a share of the one be shown for the other.
        if (this.held.has(dealer) || refused.has(dealer)) {
          throw new ShareError(`inbox: shares from place ${dealer} twice`);
        }
        if (dealer === own || dealer >= this.invitation.size) {
          throw new ShareError(`inbox: shares from place ${dealer}, which is nobody else's in the cohort`);
        }
        const [theirs, dealt] = [cipherKeys[index] as Bytes, envelopes[index] as Bytes];
        try {
          const key = await envelopeKey(cipher, theirs, this.salt, theirs, mine);
          const position = inbox.positions[index] as number;
          this.held.set(dealer, await unseal(key, this.bound, dealer, own, position, dealt));
        } catch (error) {
          if (!(error instanceof SecureAggregationError)) throw error;
          refused.add(dealer);
        }
      }
      // What leaks from the device later opens no envelope.
      this.cipherSecret = NOTHING;
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
      const others = remaining(partners, this.maskKeys, this.invitation.place, needed);
      const masked = vector.slice();
      const mine = this.public.maskKey;
      // Should this device seem to have left, its mask key is reconstructed. If its vector comes after all, this mask
      // alone still hides it.
      await applyMask(masked, await selfMaskKey(this.seed, this.salt, mine), 1);
      const secret = await agreementKey(this.maskSecret);
      for (const [place, theirs] of others) {
        const key = await pairwiseMaskKey(await agree(secret, theirs), this.salt, mine, theirs);
        // The one at the higher place adds the pair's mask, the other subtracts it.
        await applyMask(masked, key, this.invitation.place > place ? 1 : -1);
      }
      reduce(masked, modulusBits);
      // Without these no other vector can be masked, by whatever way the step is reached again.
      this.maskSecret = this.seed = NOTHING;
      this.given = this.said = NOTHING;
      return masked;
    });
  }

  /**
   * Step 5: fixes what this device will answer. With a malicious server it signs for each present dealer whose shares
   * it holds that it is present. Raises ConsistencyError for a question that no honest server asks.
   */
  confirm(question: Question): Promise<Confirmed> {
    const asked = write(QUESTION, question);
    return this.once("confirm", asked, CONFIRMED, async () => {
      checkQuestion(question, this.held);
      this.question = asked;
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
    const asked = write(QUESTION, question);
    return this.once("answer", concat(asked, write(INCLUSIONS, inclusions)), ANSWER, async () => {
      checkQuestion(question, this.held);
      if (this.question === null || !sameBytes(asked, this.question)) {
        throw new ConsistencyError("question: it is not the one that this device has confirmed");
      }
      const { assumed, sizes } = this.terms;
      if (assumed.server === "malicious") {
        await requireInclusions(inclusions, this.deviceKeys, this.bound, this.invitation.place, sizes.threshold);
      }
      const pair = (dealer: number): Pair => this.held.get(dealer) as Pair;
      return {
        seeds: concat(...question.present.map((dealer) => pair(dealer).seed)),
        mask_keys: concat(...question.left.map((dealer) => pair(dealer).maskKey)),
        presence: await sign(this.identity.key, presence(this.bound)),
      };
    });
  }

  // --- inside -------------------------------------------------------------------------------------------------------

  private get invitation(): Invitation {
    if (this.invited === null) throw new SecureAggregationError("this device has not been invited to a cohort");
    return this.invited;
  }

  private get bound(): Bytes {
    return bind(this.terms.session, this.invitation.root);
  }

  private draw(count: number): Bytes {
    const drawn = this.randomness(count);
    // Too short a draw would still make keys, which somebody could guess.
    if (drawn.length !== count) {
      throw new SecureAggregationError(`randomness: asked for ${count} bytes, got ${drawn.length}`);
    }
    return drawn;
  }

  /** What `act` returns; where the step was done with the same `given`, what it has returned then. */
  private async once<T>(name: Exclude<Step, "done">, given: Bytes, kind: Kind<T>, act: () => Promise<T>): Promise<T> {
    const hash = await digest(given);
    if (this.done === name && sameBytes(this.given, hash)) return read(kind, this.said);
    return this.step(name, async () => {
      const message = await act();
      [this.given, this.said] = [hash, write(kind, message)];
      return message;
    });
  }

  private async step<T>(name: Exclude<Step, "done">, work: () => Promise<T>): Promise<T> {
    if (this.next !== name) {
      throw new SecureAggregationError(`step ${name} in round ${this.terms.session.roundId}: expected ${this.next}`);
    }
    // Before the step: an interrupted step cannot be repeated, such as `answer` to another question.
    this.next = "nothing, the device left the round";
    let result: T;
    try {
      result = await work();
    } catch (error) {
      this.forget();
      throw error;
    }
    [this.done, this.next] = [name, STEPS[STEPS.indexOf(name) + 1] as Step];
    if (name === "answer") this.forget();
    return result;
  }

  private forget(): void {
    this.cipherSecret = this.maskSecret = this.seed = NOTHING;
    this.held.clear();
  }
}

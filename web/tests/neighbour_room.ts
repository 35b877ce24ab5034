/** Devices in one round over neighbours, and a server that passes their messages on. */

import { type Bytes, concat, label, uint32Bytes } from "../src/device/bytes.js";
import { digest } from "../src/device/crypto.js";
import { splitKeys } from "../src/device/secagg_plus/member.js";
import {
  type Answer, type Confirmed, DEALT_BYTES, type Dealt, type Inbox, type Inclusions, type Invitation, type Neighbours,
  type Partners, type Question, type Refused, SIGNATURE_BYTES,
} from "../src/device/secagg_plus/messages.js";
import type { Participant } from "../src/device/secagg_plus/participant.js";
import type { Sizes } from "../src/device/secagg_plus/sizes.js";
import { hashMember } from "../src/device/secagg_plus/tree.js";

const NODE = label("member-node", 2);

/** A tree over members, as the server has it: level 0 has the leaves. */
async function treeOf(members: readonly Bytes[]): Promise<Bytes[][]> {
  let level = await Promise.all(members.map(hashMember));
  while (level.length & (level.length - 1)) level.push(new Uint8Array(32));
  const levels = [level];
  while (level.length > 1) {
    const pairs = level.filter((_, index) => index % 2 === 0).map((left, index) => [left, level[2 * index + 1]!]);
    level = await Promise.all(pairs.map((pair) => digest(concat(NODE, ...pair))));
    levels.push(level);
  }
  return levels;
}

export class NeighbourRoom {
  /** All of these by place. */
  readonly drawn: (readonly number[])[] = [];
  readonly dealt: Dealt[] = [];
  readonly inboxes: Inbox[] = [];
  readonly refused: Refused[] = [];
  readonly questions = new Map<number, Question>();
  readonly confirmed = new Map<number, Confirmed>();

  private constructor(
    readonly members: readonly Bytes[],
    readonly devices: readonly Participant[],
    private readonly tree: readonly Bytes[][],
    readonly root: Bytes,
    private readonly sizes: Sizes,
  ) {}

  /** Of devices in the order of their ids. */
  static async of(devices: readonly Participant[], sizes: Sizes): Promise<NeighbourRoom> {
    const members: Bytes[] = [];
    for (const device of devices) members.push(await device.advertise());
    return NeighbourRoom.with(members, sizes, devices);
  }

  /** Of members in the order of their ids, of whom somebody else may act for some. */
  static async with(
    members: readonly Bytes[],
    sizes: Sizes,
    devices: readonly Participant[] = [],
  ): Promise<NeighbourRoom> {
    const tree = await treeOf(members);
    const root = await digest(concat(label("cohort", 2), uint32Bytes(members.length), tree.at(-1)![0]!));
    return new NeighbourRoom(members, devices, tree, root, sizes);
  }

  invitation(place: number): Invitation {
    return { size: this.members.length, root: this.root, place };
  }

  introduce(place: number, drawn = this.drawn[place]!): Neighbours {
    const shown = [...drawn, place];
    let known = new Set(shown);
    const proof: Bytes[] = [];
    for (const level of this.tree.slice(0, -1)) {
      for (const each of [...known].sort((one, other) => one - other)) {
        if (!known.has(each ^ 1)) proof.push(level[each ^ 1]!);
      }
      known = new Set([...known].map((each) => each >> 1));
    }
    return { members: shown.map((each) => this.members[each]!), proof: concat(...proof) };
  }

  /** Steps 1 and 2 of everybody; what one of them deals may be garbled. */
  async deal(garble: (place: number, dealt: Dealt) => Dealt = (_, each) => each): Promise<void> {
    for (const [place, device] of this.devices.entries()) {
      const { places } = await device.draw(this.invitation(place));
      this.dealt[place] = garble(place, await device.deal(this.introduce(place, places)));
      this.drawn[place] = places;
    }
  }

  inbox(place: number): Inbox {
    const dealers = this.dealersOf(place);
    const positions = dealers.map((dealer) => this.drawn[dealer]!.indexOf(place) + 1);
    const envelopes = dealers.map((dealer, index) => {
      const start = DEALT_BYTES * (positions[index]! - 1);
      return this.dealt[dealer]!.dealt.slice(start, start + DEALT_BYTES);
    });
    const keys = dealers.map((dealer) => this.keysOf(dealer).cipherKey);
    return { dealers, positions, cipher_keys: concat(...keys), dealt: concat(...envelopes) };
  }

  /** Step 3 of everybody. */
  async receive(): Promise<void> {
    for (const [place, device] of this.devices.entries()) {
      this.inboxes[place] = this.inbox(place);
      this.refused[place] = await device.receive(this.inboxes[place]!);
    }
  }

  /** With whom a device shares masks where everybody is still there. */
  partners(place: number): Partners {
    const { partners } = this.sizes;
    const others = this.dealersOf(place).filter((dealer) => this.drawn[dealer]!.indexOf(place) < partners);
    return { gone: [], others, mask_keys: concat(...others.map((other) => this.keysOf(other).maskKey)) };
  }

  question(place: number, survivors: ReadonlySet<number>): Question {
    const held = this.dealersOf(place).filter((dealer) => !this.refused[place]!.dealers.includes(dealer));
    const present = held.filter((dealer) => survivors.has(dealer));
    return { present, left: held.filter((dealer) => !survivors.has(dealer)) };
  }

  /** Steps 5 and 6 of the survivors; their answers by place. */
  async answer(survivors: ReadonlySet<number>): Promise<Map<number, Answer>> {
    for (const place of survivors) {
      this.questions.set(place, this.question(place, survivors));
      this.confirmed.set(place, await this.devices[place]!.confirm(this.questions.get(place)!));
    }
    const answers = new Map<number, Answer>();
    for (const place of survivors) {
      answers.set(place, await this.devices[place]!.answer(this.questions.get(place)!, this.inclusions(place)));
    }
    return answers;
  }

  inclusions(place: number): Inclusions {
    const neighbours = this.drawn[place]!.filter((each) => this.questions.get(each)?.present.includes(place));
    const signatures = neighbours.map((each) => {
      const start = SIGNATURE_BYTES * this.questions.get(each)!.present.indexOf(place);
      return this.confirmed.get(each)!.signatures.slice(start, start + SIGNATURE_BYTES);
    });
    return { neighbours, signatures: concat(...signatures) };
  }

  /** Who drew this device. */
  dealersOf(place: number): number[] {
    return this.drawn.flatMap((drawn, dealer) => (drawn.includes(place) ? [dealer] : []));
  }

  keysOf(place: number): ReturnType<typeof splitKeys> {
    // A member ends with its keys, their length before them, and the signature with its length.
    const member = this.members[place]!;
    return splitKeys(member.slice(member.length - 66 - 96, member.length - 66));
  }
}

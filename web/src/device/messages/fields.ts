/** What all messages are made of: fields with their bounds, and one strict way to read and to write them. */

import {
  DecodeError, type Decoded, type Decoder, float, integer, list, mismatch, text,
} from "../../bundle/decoders.js";
import { JsonSyntaxError, parseJson } from "../../bundle/json.js";
import { type Bytes, base64, unbase64, utf8 } from "../bytes.js";
import { MessageError } from "../errors.js";

export const MAX_COHORT = 4096;
/** The longest Merkle path, to one of MAX_COHORT = 2^12 keys. */
export const KEY_PATH_BYTES = 12 * 32;
/** How often a device may replace its key. */
export const MAX_ROTATIONS = 8;
export const MAX_REVOKED = 14_000;
export const MAX_MODELS = 16;
/** Of one update (archipel/protocol/messages/base.py). */
export const MAX_PARTS = 4096;

/** Base64, of a length within these bounds (bytes). */
export function bytes(most: number, least = 0): Decoder<Bytes> {
  return (node, where) => {
    if (node.type !== "string") throw mismatch("base64", node, where);
    // The length of the text first: nothing is allocated for what is too long.
    const value = node.value.length > 4 * Math.ceil(most / 3) ? null : unbase64(node.value);
    if (value === null || value.length > most || value.length < least) {
      throw new DecodeError(`expected base64 of ${least === most ? most : `${least} to ${most}`} bytes`, where);
    }
    return { value, text: "" };
  };
}

export const key = bytes(32, 32);
export const signature = bytes(64, 64);

function matching(what: string, pattern: RegExp): Decoder<string> {
  return (node, where) => {
    if (node.type !== "string" || !pattern.test(node.value)) throw mismatch(what, node, where);
    return text(node, where);
  };
}

export const digestText = matching("64 hexadecimal digits", /^[0-9a-f]{64}$/);
export const id = matching("32 hexadecimal digits", /^[0-9a-f]{32}$/);
export const name = matching("a name", /^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$/);
export const bearerToken = matching("a bearer token", /^[A-Za-z0-9._~+/=-]{1,1024}$/);

export function short(most: number): Decoder<string> {
  return (node, where) => {
    const decoded = text(node, where);
    if ([...decoded.value].length > most) throw new DecodeError(`a text of more than ${most} characters`, where);
    return decoded;
  };
}

export function whole(least: number, most = Number.MAX_SAFE_INTEGER): Decoder<number> {
  return within(integer, least, most);
}

export function real(least: number, most: number): Decoder<number> {
  return within(float, least, most);
}

function within(decoder: Decoder<number>, least: number, most: number): Decoder<number> {
  return (node, where) => {
    const decoded = decoder(node, where);
    if (decoded.value < least || decoded.value > most) {
      throw new DecodeError(`expected a number from ${least} to ${most}, got ${decoded.value}`, where);
    }
    return decoded;
  };
}

export function listOf<T>(decoder: Decoder<T>, most: number): Decoder<readonly T[]> {
  const items = list(decoder);
  return (node, where) => {
    if (node.type === "array" && node.items.length > most) throw new DecodeError(`more than ${most} items`, where);
    return items(node, where);
  };
}

export function entriesOf<T>(decoder: Decoder<Readonly<Record<string, T>>>, most: number): typeof decoder {
  return (node, where): Decoded<Readonly<Record<string, T>>> => {
    if (node.type === "object" && node.members.size > most) throw new DecodeError(`more than ${most} entries`, where);
    return decoder(node, where);
  };
}

/** The message in `data`, read strictly. Raises MessageError, which begins with `what`. */
export function decode<T>(what: string, data: Uint8Array, decoder: Decoder<T>): T {
  try {
    return decoder(parseJson(data), "").value;
  } catch (error) {
    if (error instanceof JsonSyntaxError || error instanceof DecodeError) {
      throw new MessageError(`${what}: ${error.message}`);
    }
    throw error;
  }
}

/**
 * The message as JSON with sorted keys and no blanks; bytes as base64, and fields that are undefined left out. Fields
 * with their default values are the caller's to leave out.
 */
export function encode(message: object): Bytes {
  return utf8(write(message));
}

function write(value: unknown): string {
  if (value instanceof Uint8Array) return `"${base64(value)}"`;
  if (Array.isArray(value)) return `[${value.map(write).join(",")}]`;
  if (typeof value === "object" && value !== null) {
    const fields = Object.entries(value).filter(([, field]) => field !== undefined);
    fields.sort(([one], [other]) => (one < other ? -1 : 1));
    return `{${fields.map(([field, part]) => `${JSON.stringify(field)}:${write(part)}`).join(",")}}`;
  }
  if (typeof value === "number" && !Number.isFinite(value)) throw new MessageError(`${value} is no number in JSON`);
  return JSON.stringify(value);
}

/**
 * Small decoders that are put together into one for a whole document. Each takes a JSON node and gives the typed value
 * and its canonical text, so that "was this written canonically?" is one comparison at the end.
 *
 * Canonical: keys sorted by code point, no white space, default values left out, numbers and strings in their one form.
 */

import type { JsonNode } from "./json.js";

export interface Decoded<T> {
  readonly value: T;
  readonly text: string;
}

export type Decoder<T> = (node: JsonNode, where: string) => Decoded<T>;

/** The value has another type or form than the decoder's. `where` is the path, such as `programs.train.inputs[0]`. */
export class DecodeError extends Error {
  override name = "DecodeError";

  constructor(
    message: string,
    readonly where: string,
  ) {
    super(`${where || "document"}: ${message}`);
  }
}

/** A field of a struct: `fallback` makes it optional; its canonical text is left out where it equals `omit`. */
export interface Field<T> {
  readonly decoder: Decoder<T>;
  readonly fallback?: { readonly value: T };
  readonly omit?: string;
}

export type Fields<T> = { readonly [K in keyof T]-?: Field<T[K]> };

export function required<T>(decoder: Decoder<T>): Field<T> {
  return { decoder };
}

/**
 * A field that may be absent. Where its value is written as `omit`, canonical JSON leaves it out. A float has no `omit`:
 * the Python package writes a float that was there, also where it equals the default.
 */
export function optional<T>(decoder: Decoder<T>, value: T, omit?: string): Field<T> {
  return omit === undefined ? { decoder, fallback: { value } } : { decoder, fallback: { value }, omit };
}

export const integer: Decoder<number> = (node, where) => {
  if (node.type !== "number" || !/^-?[0-9]+$/.test(node.text)) throw mismatch("an integer", node, where);
  const value = Number(node.text);
  if (!Number.isSafeInteger(value)) throw new DecodeError("an integer beyond 2^53", where);
  return { value: value === 0 ? 0 : value, text: String(value) };
};

export const float: Decoder<number> = (node, where) => {
  if (node.type !== "number") throw mismatch("a number", node, where);
  const value = Number(node.text);
  if (!Number.isFinite(value)) throw new DecodeError("a number out of range", where);
  return { value, text: floatText(value) };
};

export const text: Decoder<string> = (node, where) => {
  if (node.type !== "string") throw mismatch("a string", node, where);
  return { value: node.value, text: stringText(node.value) };
};

export const bool: Decoder<boolean> = (node, where) => {
  if (node.type !== "true" && node.type !== "false") throw mismatch("true or false", node, where);
  return { value: node.type === "true", text: node.type };
};

export function oneOf<const T extends string>(...words: readonly T[]): Decoder<T> {
  return (node, where) => {
    if (node.type !== "string" || !(words as readonly string[]).includes(node.value)) {
      throw mismatch(`one of ${words.join(", ")}`, node, where);
    }
    return { value: node.value as T, text: stringText(node.value) };
  };
}

export function nullable<T>(decoder: Decoder<T>): Decoder<T | null> {
  return (node, where) => (node.type === "null" ? { value: null, text: "null" } : decoder(node, where));
}

/** The first decoder for strings, the second for everything else. */
export function textOr<T>(decoder: Decoder<T>): Decoder<string | T> {
  return (node, where) => (node.type === "string" ? text(node, where) : decoder(node, where));
}

export function list<T>(decoder: Decoder<T>): Decoder<readonly T[]> {
  return (node, where) => {
    if (node.type !== "array") throw mismatch("an array", node, where);
    const parts = node.items.map((item, index) => decoder(item, `${where}[${index}]`));
    return { value: parts.map((part) => part.value), text: `[${parts.map((part) => part.text).join(",")}]` };
  };
}

/** An object whose keys are data. It has no prototype, so that no key means anything else. */
export function dictionary<T>(decoder: Decoder<T>): Decoder<Readonly<Record<string, T>>> {
  return (node, where) => {
    if (node.type !== "object") throw mismatch("an object", node, where);
    const value = Object.create(null) as Record<string, T>;
    const texts = new Map<string, string>();
    for (const [key, member] of node.members) {
      const part = decoder(member, `${where}.${key.slice(0, 64)}`);
      value[key] = part.value;
      texts.set(key, part.text);
    }
    return { value, text: objectText(texts) };
  };
}

/** An object with exactly these fields; others are refused. `tag` is a constant field, read by someone else. */
export function struct<T extends object>(fields: Fields<T>, tag?: readonly [key: string, value: string]): Decoder<T> {
  const entries = Object.entries(fields) as [string, Field<unknown>][];
  const known = new Set(entries.map(([key]) => key));
  if (tag !== undefined) known.add(tag[0]);
  return (node, where) => {
    if (node.type !== "object") throw mismatch("an object", node, where);
    for (const key of node.members.keys()) {
      if (!known.has(key)) throw new DecodeError(`unknown field ${JSON.stringify(key.slice(0, 64))}`, where);
    }
    const value: Record<string, unknown> = {};
    const texts = new Map<string, string>();
    if (tag !== undefined) {
      value[tag[0]] = tag[1];
      texts.set(tag[0], stringText(tag[1]));
    }
    for (const [key, field] of entries) {
      const member = node.members.get(key);
      if (member === undefined) {
        if (field.fallback === undefined) throw new DecodeError(`field ${JSON.stringify(key)} is missing`, where);
        value[key] = field.fallback.value;
        continue;
      }
      const part = field.decoder(member, where ? `${where}.${key}` : key);
      value[key] = part.value;
      if (part.text !== field.omit) texts.set(key, part.text);
    }
    return { value: value as T, text: objectText(texts) };
  };
}

export function mismatch(expected: string, node: JsonNode, where: string): DecodeError {
  const got = node.type === "string" ? JSON.stringify(node.value.slice(0, 64)) : `a value of type ${node.type}`;
  return new DecodeError(`expected ${expected}, got ${node.type === "number" ? node.text.slice(0, 64) : got}`, where);
}

function objectText(texts: ReadonlyMap<string, string>): string {
  const keys = [...texts.keys()].sort(byCodePoint);
  return `{${keys.map((key) => `${stringText(key)}:${texts.get(key)}`).join(",")}}`;
}

function byCodePoint(first: string, second: string): number {
  // JavaScript compares UTF-16 units: surrogates would sort before U+E000 ... U+FFFF.
  const [a, b] = [[...first], [...second]];
  for (let i = 0; i < Math.min(a.length, b.length); i++) {
    const difference = (a[i]?.codePointAt(0) ?? 0) - (b[i]?.codePointAt(0) ?? 0);
    if (difference) return difference;
  }
  return a.length - b.length;
}

function stringText(value: string): string {
  // Raw characters but for quotes, backslashes and control characters: the same escapes as the Python package's.
  return JSON.stringify(value);
}

/** Shortest digits that read back the same; fixed notation from 1e-5 to below 1e16, always with a fraction. */
export function floatText(value: number): string {
  if (value === 0) return Object.is(value, -0) ? "-0.0" : "0.0";
  const magnitude = Math.abs(value);
  if (magnitude < 1e-5 || magnitude >= 1e16) return value.toExponential().replace("e+", "e");
  let fixed = String(value);
  if (fixed.includes("e")) {
    const [digits = "", exponent = ""] = magnitude.toExponential().split("e");
    fixed = `${value < 0 ? "-" : ""}0.${"0".repeat(-Number(exponent) - 1)}${digits.replace(".", "")}`;
  }
  return fixed.includes(".") ? fixed : `${fixed}.0`;
}

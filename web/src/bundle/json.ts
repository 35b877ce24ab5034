/**
 * A strict JSON parser that keeps what `JSON.parse` throws away: how a number was written, and that a key came twice.
 *
 * RFC 8259 without any extension; bounded depth. The manifest's canonical form is checked on what it returns.
 */

export type JsonNode =
  | { readonly type: "object"; readonly members: ReadonlyMap<string, JsonNode> }
  | { readonly type: "array"; readonly items: readonly JsonNode[] }
  | { readonly type: "string"; readonly value: string }
  | { readonly type: "number"; readonly text: string }
  | { readonly type: "true" | "false" | "null" };

/** Not JSON; the text says where. Decoders turn it into their own error. */
export class JsonSyntaxError extends Error {
  override name = "JsonSyntaxError";
}

const MAX_DEPTH = 64;
const NUMBER = /-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?/y;
const PLAIN = /[^"\\\u0000-\u001f]*/y;
const ESCAPES: Readonly<Record<string, string>> = {
  '"': '"',
  "\\": "\\",
  "/": "/",
  b: "\b",
  f: "\f",
  n: "\n",
  r: "\r",
  t: "\t",
};

/** Raises JsonSyntaxError, also for bytes that are not UTF-8. */
export function parseJson(bytes: Uint8Array): JsonNode {
  let text: string;
  try {
    // Without ignoreBOM a byte order mark would be dropped without a word.
    text = new TextDecoder("utf-8", { fatal: true, ignoreBOM: true }).decode(bytes);
  } catch {
    throw new JsonSyntaxError("not UTF-8");
  }
  return new Parser(text).document();
}

class Parser {
  private at = 0;

  constructor(private readonly text: string) {}

  document(): JsonNode {
    const node = this.value(0);
    this.space();
    if (this.at < this.text.length) this.fail("something follows the value");
    return node;
  }

  private value(depth: number): JsonNode {
    if (depth > MAX_DEPTH) this.fail(`nested deeper than ${MAX_DEPTH}`);
    this.space();
    const character = this.text[this.at];
    switch (character) {
      case "{":
        return this.object(depth);
      case "[":
        return this.array(depth);
      case '"':
        return { type: "string", value: this.string() };
      case "t":
        return this.word("true");
      case "f":
        return this.word("false");
      case "n":
        return this.word("null");
      default:
        return this.number();
    }
  }

  private object(depth: number): JsonNode {
    const members = new Map<string, JsonNode>();
    this.at++;
    this.space();
    if (this.take("}")) return { type: "object", members };
    do {
      this.space();
      if (this.text[this.at] !== '"') this.fail("expected a key");
      const key = this.string();
      if (members.has(key)) this.fail(`key ${JSON.stringify(key.slice(0, 64))} is there twice`);
      this.space();
      if (!this.take(":")) this.fail("expected ':'");
      members.set(key, this.value(depth + 1));
      this.space();
    } while (this.take(","));
    if (!this.take("}")) this.fail("expected ',' or '}'");
    return { type: "object", members };
  }

  private array(depth: number): JsonNode {
    const items: JsonNode[] = [];
    this.at++;
    this.space();
    if (this.take("]")) return { type: "array", items };
    do {
      items.push(this.value(depth + 1));
      this.space();
    } while (this.take(","));
    if (!this.take("]")) this.fail("expected ',' or ']'");
    return { type: "array", items };
  }

  private string(): string {
    this.at++;
    let value = "";
    for (;;) {
      PLAIN.lastIndex = this.at;
      const plain = PLAIN.exec(this.text)?.[0] ?? "";
      value += plain;
      this.at += plain.length;
      const character = this.text[this.at++];
      if (character === '"') {
        if (/\p{Surrogate}/u.test(value)) this.fail("half a surrogate pair");
        return value;
      }
      if (character !== "\\") this.fail("a string does not end, or holds a control character");
      value += this.escape();
    }
  }

  private escape(): string {
    const letter = this.text[this.at++] ?? "";
    if (letter === "u") {
      const digits = this.text.slice(this.at, this.at + 4);
      if (!/^[0-9a-fA-F]{4}$/.test(digits)) this.fail("expected four hexadecimal digits");
      this.at += 4;
      return String.fromCharCode(Number.parseInt(digits, 16));
    }
    const character = Object.hasOwn(ESCAPES, letter) ? ESCAPES[letter] : undefined;
    return character ?? this.fail("unknown escape");
  }

  private number(): JsonNode {
    NUMBER.lastIndex = this.at;
    const text = NUMBER.exec(this.text)?.[0];
    if (text === undefined) this.fail("expected a value");
    this.at += text.length;
    return { type: "number", text };
  }

  private word(word: "true" | "false" | "null"): JsonNode {
    if (!this.text.startsWith(word, this.at)) this.fail("expected a value");
    this.at += word.length;
    return { type: word };
  }

  private space(): void {
    while (" \t\n\r".includes(this.text[this.at] ?? "-")) this.at++;
  }

  private take(character: string): boolean {
    if (this.text[this.at] !== character) return false;
    this.at++;
    return true;
  }

  private fail(what: string): never {
    throw new JsonSyntaxError(`${what}, at character ${this.at}`);
  }
}

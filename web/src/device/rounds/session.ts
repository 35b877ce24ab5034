/** Authorized requests: a signed challenge gives a bearer token (archipel/client/connection/session.py). */

import type { Decoder } from "../../bundle/decoders.js";
import type { Bytes } from "../bytes.js";
import type { SigningKey } from "../crypto.js";
import type { Enrolment } from "../enrolment.js";
import { RefusedError, SessionRefusedError, UnreachableError } from "../errors.js";
import { encode } from "../messages/fields.js";
import { challenge, sessionResponse } from "../messages/identity.js";
import { seal } from "../sealed.js";
import type { Sending, Transport } from "./transport.js";

/** The share of a token's lifetime after which it is renewed. */
const RENEW_AT = 0.8;

export class DeviceSession {
  private token = "";
  private renewAt = 0;

  constructor(
    readonly transport: Transport,
    private readonly enrolment: Enrolment,
    private readonly key: SigningKey,
  ) {}

  /** A request with a token; after a 401 once more with a new one. Raises RefusedError, UnreachableError. */
  call<T>(
    method: string,
    path: string,
    decoder: Decoder<T>,
    body?: Bytes,
    headers: Readonly<Record<string, string>> = {},
    retry = true,
  ): Promise<T> {
    return this.authorized((bearer) =>
      this.transport.call(method, path, decoder, { body, headers: { ...headers, ...bearer }, retry }),
    );
  }

  /** As `call`, with an answer of at most `limit` bytes that is decoded by `read`. */
  exchange<T>(
    method: string,
    path: string,
    limit: number,
    read: (data: Bytes) => T,
    { body, headers = {} }: Sending = {},
  ): Promise<T> {
    return this.authorized((bearer) =>
      this.transport.exchange(method, path, limit, read, { body, headers: { ...headers, ...bearer } }),
    );
  }

  download(path: string, limit: number): Promise<Bytes> {
    return this.authorized((bearer) => this.transport.download(path, limit, bearer));
  }

  private async authorized<T>(request: (bearer: Readonly<Record<string, string>>) => Promise<T>): Promise<T> {
    if (!this.token || performance.now() >= this.renewAt) await this.open();
    try {
      return await request(this.bearer());
    } catch (error) {
      if (!(error instanceof RefusedError && error.status === 401)) throw error;
    }
    // Once: the server may have lost its sessions in a restart. A second 401 is for the caller.
    await this.open();
    return request(this.bearer());
  }

  private bearer(): Readonly<Record<string, string>> {
    return { Authorization: `Bearer ${this.token}` };
  }

  private async open(): Promise<void> {
    // The server accepts a nonce once, so each attempt needs a new challenge.
    let away: UnreachableError | null = null;
    for (let attempt = 1; ; attempt++) {
      const last = attempt >= this.transport.attempts;
      try {
        await this.handshake();
        return;
      } catch (error) {
        if (error instanceof UnreachableError) {
          away = error;
          if (last) throw error;
        } else if (error instanceof RefusedError && (error.status === 403 || error.status === 404)) {
          // 403 can also mean that the nonce was too old, so it counts only if it came at every attempt.
          if (last || error.status === 404) {
            throw away ?? new SessionRefusedError(error.message, error.status, error.retryAfter);
          }
        } else {
          throw error;
        }
      }
      await this.transport.wait(attempt);
    }
  }

  private async handshake(): Promise<void> {
    // The proof names the server's key: another server cannot pass on the challenge and use the answer. It is sent
    // once, because the server would refuse the same nonce again.
    const { deviceId, serverKey } = this.enrolment;
    const body = encode({ device_id: deviceId });
    const { nonce } = await this.transport.call("POST", "/v1/challenges", challenge, { body });
    const proof = await seal("session", { nonce, server_key: serverKey }, this.key);
    const given = await this.transport.call("POST", "/v1/sessions", sessionResponse, {
      body: encode({ device_id: deviceId, proof }),
      retry: false,
    });
    // A token's lifetime is the difference of two times of the server: the device's own clock may be wrong.
    const now = this.transport.serverTime;
    const lifetime = now === null ? 0 : given.expires - now;
    this.renewAt = lifetime > 0 ? performance.now() + 1000 * RENEW_AT * lifetime : Number.POSITIVE_INFINITY;
    this.token = given.token;
  }
}

/** Joining a population with a token (archipel/client/agent.py, `enrol`). */

import { utf8 } from "./bytes.js";
import { checkedServer } from "./config.js";
import type { Device } from "./device.js";
import { type Enrolment, recordEnrolment } from "./enrolment.js";
import { ClientError, MessageError, OwnerRefusalError } from "./errors.js";
import { enrolmentRequest, readDeviceId } from "./identity.js";
import { whyNotPopulation } from "./limits.js";
import { decode, encode } from "./messages/fields.js";
import { enrolmentResponse, type EnrolmentToken, enrolmentToken } from "./messages/identity.js";
import type { Transport } from "./rounds/transport.js";

/** The token in the text of a token file. Raises MessageError. */
export function readToken(text: string): EnrolmentToken {
  try {
    return decode("enrolment token", utf8(text), enrolmentToken);
  } catch (error) {
    if (!(error instanceof MessageError)) throw error;
    // Mostly somebody has chosen another file: the first words say which one is meant, the last what is wrong with it.
    throw new MessageError(
      "this is not an enrolment token; choose the file of archipel token that the operator gave you for this device " +
        `alone, unchanged (${error.message})`,
    );
  }
}

/**
 * Enrol, and record it. Raises CertificateError (the token), OwnerRefusalError, RefusedError, UnreachableError, or
 * ClientError where the server answers for another device.
 */
export async function enrolWith(
  token: EnrolmentToken,
  { config, database, vault }: Device,
  connect: (server: string) => Transport,
): Promise<Enrolment> {
  const reason = whyNotPopulation(token.population, config);
  if (reason) throw new OwnerRefusalError(reason, "population");
  const server = checkedServer(config.server || token.server, config.allowHttp);
  const request = await enrolmentRequest(token, vault.identity);
  const answer = await connect(server).call("POST", "/v1/devices", enrolmentResponse, { body: encode(request) });
  const deviceId = await readDeviceId(request.chain);
  if (answer.device_id !== deviceId) {
    throw new ClientError(`enrolment: the server answered for device ${answer.device_id}, this is ${deviceId}`);
  }
  return recordEnrolment(database, vault, token, request.chain, server);
}

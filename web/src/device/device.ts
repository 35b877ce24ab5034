/** The opened device, which all parts of an agent share. */

import type { Engine } from "../runtime/delegates.js";
import type { NdArray } from "../arrays.js";
import type { Config } from "./config.js";
import type { Report } from "./events.js";
import type { Gate } from "./gate.js";
import type { DeviceDatabase } from "./storage/database.js";
import type { Journal } from "./storage/journal.js";
import type { Vault } from "./storage/vault.js";

/** The local data, arrays by field name; first axis = examples. */
export type Examples = Readonly<Record<string, NdArray>>;

export interface Device {
  readonly config: Config;
  readonly database: DeviceDatabase;
  readonly vault: Vault;
  readonly journal: Journal;
  readonly gate: Gate;
  readonly report: Report;
  readonly examples: () => Promise<Examples>;
  /** What runs the graphs; opened for each round. */
  readonly engine: () => Promise<Engine>;
}

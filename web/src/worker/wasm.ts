/** The worker's script without WebGPU. The import is no dynamic one, as many bundlers make a single file of a worker. */

import * as ort from "onnxruntime-web/wasm";

import { serve } from "./serving.js";

serve({ wasm: async () => ort });

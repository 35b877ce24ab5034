/** The worker's script with WebGPU. The import is no dynamic one, as many bundlers make a single file of a worker. */

import * as ort from "onnxruntime-web/jspi";

import { serve } from "./serving.js";

serve({ webgpu: async () => ort });

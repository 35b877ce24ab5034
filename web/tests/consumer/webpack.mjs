/** Builds main.js into dist/ with webpack's own settings. */

import webpack from "webpack";

const settings = { mode: "production", entry: "./main.js", performance: { hints: false } };
webpack(settings, (error, result) => {
  if (error) throw error;
  console.log(result.toString({ chunks: false, modules: false }));
  process.exitCode = result.hasErrors() || result.hasWarnings() ? 1 : 0;
});

// Bundles each page's modules and style sheets into one template in src/headwise/report/page, which Python fills with results.
// A page is one file because browsers refuse to import modules from file: URLs. `node build.js --check` fails if a template is stale.

import { build } from "esbuild";
import { readFile, writeFile } from "node:fs/promises";
import process from "node:process";

const HERE = new URL(".", import.meta.url).pathname;
const TEMPLATES = `${HERE}../src/headwise/report/page/`;

/** The output of esbuild for an entry point. */
async function bundle(entry) {
  const { outputFiles } = await build({
    absWorkingDir: HERE, entryPoints: [entry], bundle: true, write: false, format: "esm", target: "es2022", charset: "utf8",
    minifySyntax: true, minifyWhitespace: true, legalComments: "none",
  });
  return outputFiles[0].text.trimEnd();
}

async function template(page) {
  const head = (await readFile(`${HERE}shared/head.html`, "utf8")).trimEnd();  // shared by all pages; its policy limits what they may load
  const parts = { head, style: await bundle(`${page}/${page}.css`), script: await bundle(`${page}/main.js`) };
  const html = await readFile(`${HERE}${page}/${page}.html`, "utf8");
  return html.replace(/@@(head|style|script)@@/g, (_, name) => parts[name]);
}

for (const page of ["report", "timeline", "trace"]) {
  const [place, made] = [`${TEMPLATES}${page}.html`, await template(page)];
  if (!process.argv.includes("--check")) await writeFile(place, made);
  else if (await readFile(place, "utf8").catch(() => "") !== made) {
    console.error(`report/page/${page}.html is out of date; rebuild it with \`make page\``);
    process.exitCode = 1;
  }
}

// Builds each page from its modules and style sheets into one template in src/headwise/report/page, which Python fills with
// results: browsers refuse to import modules from files. `node build.js --check` fails unless the templates are what this gives.

import { build } from "esbuild";
import { readFile, writeFile } from "node:fs/promises";
import process from "node:process";

const HERE = new URL(".", import.meta.url).pathname;
const TEMPLATES = `${HERE}../src/headwise/report/page/`;

/** The text that esbuild gives for an entry point. */
async function bundle(entry) {
  const { outputFiles } = await build({
    absWorkingDir: HERE, entryPoints: [entry], bundle: true, write: false, format: "esm", target: "es2022", charset: "utf8",
    minifySyntax: true, minifyWhitespace: true, legalComments: "none",
  });
  return outputFiles[0].text.trimEnd();
}

async function template(page) {
  const head = (await readFile(`${HERE}shared/head.html`, "utf8")).trimEnd();  // of all pages, with what they may load
  const parts = { head, style: await bundle(`${page}/${page}.css`), script: await bundle(`${page}/main.js`) };
  const html = await readFile(`${HERE}${page}/${page}.html`, "utf8");
  return html.replace(/@@(head|style|script)@@/g, (_, name) => parts[name]);
}

for (const page of ["report", "timeline", "trace"]) {
  const [place, made] = [`${TEMPLATES}${page}.html`, await template(page)];
  if (!process.argv.includes("--check")) await writeFile(place, made);
  else if (await readFile(place, "utf8").catch(() => "") !== made) {
    console.error(`report/page/${page}.html is not what its sources give; build it with \`make page\``);
    process.exitCode = 1;
  }
}

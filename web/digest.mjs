// Write the digest of the sources beside the built files. A test computes it again without Node, so a change of
// the sources without a build is noticed. Run by `npm run build`.
import { createHash } from "node:crypto";
import { readdirSync, readFileSync, writeFileSync } from "node:fs";
import { join } from "node:path";
import { fileURLToPath } from "node:url";

const here = fileURLToPath(new URL(".", import.meta.url));
const single = ["digest.mjs", "index.html", "package-lock.json", "package.json", "tsconfig.json", "vite.config.ts"];
const inside = ["public", "src"]
  .flatMap((folder) => readdirSync(join(here, folder), { recursive: true, withFileTypes: true }))
  .filter((entry) => entry.isFile())
  .map((entry) => join(entry.parentPath, entry.name).slice(here.length));

const digest = createHash("sha256");
for (const name of [...single, ...inside].sort()) {
  const bytes = readFileSync(join(here, name));
  digest.update(`${name}\0${bytes.length}\0`);
  digest.update(bytes);
}
writeFileSync(join(here, "../src/insitu/view/pages/sources.sha256"), `${digest.digest("hex")}\n`);

import { defineConfig } from "vite";

// Stable names without hashes: the built files are committed and compared byte for byte.
export default defineConfig({
  base: "./",
  publicDir: "public",
  build: {
    outDir: "../src/insitu/view/pages",
    emptyOutDir: true,
    target: "es2022",
    assetsInlineLimit: 0,
    cssCodeSplit: false,
    modulePreload: false,
    sourcemap: false,
    rolldownOptions: {
      output: {
        entryFileNames: "app.js",
        chunkFileNames: "[name].js",
        assetFileNames: "app[extname]",
        codeSplitting: false,
      },
    },
  },
});

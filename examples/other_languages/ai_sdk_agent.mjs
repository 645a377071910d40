// The same agent on the AI SDK, which runs the loop over tool calls itself.
import { text } from "node:stream/consumers";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, stepCountIs, tool } from "ai";
import { z } from "zod";
import { PRICES, price } from "./prices.mjs";

const provider = createOpenAICompatible({
  name: "insitu",
  baseURL: process.env.OPENAI_BASE_URL,
  apiKey: process.env.OPENAI_API_KEY,
});
const { text: answer } = await generateText({
  model: provider(process.env.OPENAI_MODEL),
  system: "You sell fruit. Reply with the number only.",
  prompt: await text(process.stdin),
  tools: {
    price: tool({
      description: `The price of an item: ${Object.keys(PRICES).join(", ")}.`,
      inputSchema: z.object({ item: z.string() }),
      execute: async ({ item }) => price(item),
    }),
  },
  stopWhen: stepCountIs(4),
  maxOutputTokens: 128,
});
process.stdout.write(answer);

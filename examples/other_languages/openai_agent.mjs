// An agent on the OpenAI SDK for Node.js: it may look up a price, then answers.
// The SDK reads OPENAI_BASE_URL and OPENAI_API_KEY by itself. The question comes on stdin, the answer goes to stdout.
import { text } from "node:stream/consumers";
import OpenAI from "openai";
import { PRICES, price } from "./prices.mjs";

const tools = [
  {
    type: "function",
    function: {
      name: "price",
      description: `The price of an item: ${Object.keys(PRICES).join(", ")}.`,
      parameters: { type: "object", properties: { item: { type: "string" } }, required: ["item"] },
    },
  },
];

const client = new OpenAI();
const messages = [
  { role: "system", content: "You sell fruit. Reply with the number only." },
  { role: "user", content: await text(process.stdin) },
];
for (let turn = 0; turn < 4; turn++) {
  const reply = await client.chat.completions.create({ model: process.env.OPENAI_MODEL, messages, tools, max_tokens: 128 });
  const message = reply.choices[0].message;
  messages.push(message);
  if (!message.tool_calls?.length) {
    process.stdout.write(message.content ?? "");
    break;
  }
  for (const call of message.tool_calls) {
    const { item } = JSON.parse(call.function.arguments);
    messages.push({ role: "tool", tool_call_id: call.id, content: price(item) });
  }
}

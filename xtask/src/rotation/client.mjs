// Calls of one stock client in JavaScript: `client.mjs openai` or `anthropic`.
import Anthropic from "@anthropic-ai/sdk";
import OpenAI from "openai";

const base = process.env.POORWILL_BASE;
const key = process.env.POORWILL_KEY;
const messages = [{ role: "user", content: "Tell me of trees." }];

async function call(name, run) {
  try {
    const answer = await run();
    console.log(answer ? `ok ${name}` : `failed ${name}: it gave ${JSON.stringify(answer)}`);
  } catch (error) {
    console.log(`failed ${name}: ${String(error).replaceAll("\n", " ").slice(0, 300)}`);
  }
}

async function withOpenai() {
  const client = new OpenAI({ baseURL: `${base}/v1`, apiKey: key, maxRetries: 0 });
  await call("models.list", async () => (await client.models.list()).data.some((one) => one.id === "birch"));
  for (const model of ["amber", "birch"]) {
    await call(`chat ${model}`, async () => {
      const answer = await client.chat.completions.create({ model, messages, max_tokens: 8 });
      return answer.choices[0].message.content;
    });
    await call(`stream ${model}`, async () => {
      let text = "";
      const stream = await client.chat.completions.create({ model, messages, max_tokens: 8, stream: true });
      for await (const event of stream) text += event.choices[0]?.delta?.content ?? "";
      return text;
    });
  }
  await call("unknown model", async () => {
    try {
      await client.chat.completions.create({ model: "nobody", messages });
    } catch (error) {
      return error instanceof OpenAI.NotFoundError && error.code === "model_not_found";
    }
  });
}

async function withAnthropic() {
  const client = new Anthropic({ baseURL: base, apiKey: key, maxRetries: 0 });
  await call("unknown model, apiKey", async () => {
    try {
      await client.messages.create({ model: "nobody", max_tokens: 8, messages });
    } catch (error) {
      return error instanceof Anthropic.NotFoundError && error.error?.error?.message?.includes("nobody");
    }
  });
}

await (process.argv[2] === "openai" ? withOpenai() : withAnthropic());

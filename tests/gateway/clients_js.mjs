// One small agent for each JavaScript client; input and output are those of clients_py.py.
import { readFileSync } from "node:fs";

const QUESTION = "How much is 6 x 7, and 8 more?";
const MODEL = "policy";
const TOOLS = { multiply: ({ a, b }) => a * b, add: ({ a, b }) => a + b };
const SCHEMA = { type: "object", properties: { a: { type: "integer" }, b: { type: "integer" } }, required: ["a", "b"] };

async function generate(model) {
  const { generateText, stepCountIs, tool, jsonSchema } = await import("ai");
  const tools = {};
  for (const [name, execute] of Object.entries(TOOLS)) {
    tools[name] = tool({ description: name, inputSchema: jsonSchema(SCHEMA), execute });
  }
  const { text } = await generateText({ model, prompt: QUESTION, tools, stopWhen: stepCountIs(5) });
  return text;
}

const CLIENTS = {
  async ai_openai() {
    return generate((await import("@ai-sdk/openai")).openai(MODEL));
  },
  async ai_openai_chat() {
    return generate((await import("@ai-sdk/openai")).openai.chat(MODEL));
  },
  async ai_anthropic() {
    return generate((await import("@ai-sdk/anthropic")).anthropic(MODEL));
  },
  async openai() {
    const { default: OpenAI } = await import("openai");
    const tools = Object.entries(TOOLS).map(([name, f]) => ({
      type: "function",
      function: { name, description: name, parameters: SCHEMA, parse: JSON.parse, function: (args) => String(f(args)) },
    }));
    const asked = { model: MODEL, messages: [{ role: "user", content: QUESTION }], tools, stream: true };
    return new OpenAI().chat.completions.runTools(asked).finalContent();
  },
  async anthropic() {
    const { default: Anthropic } = await import("@anthropic-ai/sdk");
    const client = new Anthropic();
    const tools = Object.keys(TOOLS).map((name) => ({ name, description: name, input_schema: SCHEMA }));
    const messages = [{ role: "user", content: QUESTION }];
    for (;;) {
      const said = await client.messages.create({ model: MODEL, max_tokens: 500, messages, tools });
      messages.push({ role: "assistant", content: said.content });
      const calls = said.content.filter((block) => block.type === "tool_use");
      if (!calls.length) return said.content[0].text;
      messages.push({
        role: "user",
        content: calls.map((c) => ({ type: "tool_result", tool_use_id: c.id, content: String(TOOLS[c.name](c.input)) })),
      });
    }
  },
};

const done = {};
for (const [name, variables] of JSON.parse(readFileSync(0, "utf8"))) {
  Object.assign(process.env, variables);
  try {
    done[name] = [await CLIENTS[name](), ""];
  } catch (failure) {
    done[name] = ["", String(failure.stack)];
  }
}
console.log(JSON.stringify(done));

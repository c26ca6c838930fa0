// AI SDK with @ai-sdk/openai-compatible: whole and streamed text, a forced tool's round trip, structured output.
// Called with the base URL (with /v1) and the model; a line for each check; exit code 1 if one failed.

import assert from "node:assert/strict";

import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, jsonSchema, Output, stepCountIs, streamText, tool } from "ai";

const [baseURL, name] = process.argv.slice(2);
const CITIES = ["Paris", "Rome"];
const ASK = "What is the capital of France?";
const ASK_WEATHER = "What is the weather in Paris?";

const provider = createOpenAICompatible({
  name: "shoal", baseURL, includeUsage: true, supportsStructuredOutputs: true,
});
const common = { model: provider(name), temperature: 0, maxRetries: 0 };

const weather = jsonSchema({
  type: "object", additionalProperties: false, required: ["city", "degrees"],
  properties: { city: { type: "string", enum: CITIES }, degrees: { type: "integer", minimum: 0, maximum: 40 } },
});

function isWeather(value) {
  return CITIES.includes(value.city) && Number.isInteger(value.degrees) && value.degrees >= 0 && value.degrees <= 40;
}

function tools(called) {
  return {
    get_weather: tool({
      description: "The weather of a city.",
      inputSchema: jsonSchema({
        type: "object", additionalProperties: false, required: ["city"],
        properties: { city: { type: "string", enum: CITIES } },
      }),
      execute: async ({ city }) => { called.push(city); return "21 degrees"; },
    }),
  };
}

// The first step must call a tool, the second must not.
const twoSteps = {
  stopWhen: stepCountIs(2),
  prepareStep: ({ stepNumber }) => ({ toolChoice: stepNumber === 0 ? "required" : "none" }),
};

const checks = {
  async wholeAndStreamedAreTheSameText() {
    const whole = await generateText({ ...common, prompt: ASK, maxOutputTokens: 24 });
    assert.ok(whole.text);
    assert.ok(["stop", "length"].includes(whole.finishReason));
    assert.ok(whole.usage.outputTokens > 0);
    const stream = streamText({ ...common, prompt: ASK, maxOutputTokens: 24 });
    let text = "";
    for await (const part of stream.textStream) text += part;
    assert.equal(text, whole.text);
    assert.equal((await stream.usage).outputTokens, whole.usage.outputTokens);
  },

  async aRequiredToolMakesItsRoundTrip() {
    const called = [];
    const result = await generateText({
      ...common, ...twoSteps, prompt: ASK_WEATHER, tools: tools(called), maxOutputTokens: 64 });
    assert.equal(called.length, 1);
    assert.ok(CITIES.includes(called[0]));
    assert.equal(result.steps[0].finishReason, "tool-calls");
    assert.ok(result.text);
  },

  async aRequiredToolMakesItsRoundTripStreamed() {
    const called = [];
    const result = streamText({
      ...common, ...twoSteps, prompt: ASK_WEATHER, tools: tools(called), maxOutputTokens: 64 });
    const kinds = new Set();
    for await (const part of result.fullStream) {
      assert.notEqual(part.type, "error", String(part.error));
      kinds.add(part.type);
    }
    assert.equal(called.length, 1);
    assert.ok(kinds.has("tool-input-delta") && kinds.has("tool-result"), [...kinds].join(" "));
    assert.ok(await result.text);
  },

  async aNamedToolIsCalled() {
    const called = [];
    await generateText({
      ...common, prompt: ASK_WEATHER, tools: tools(called), toolChoice: { type: "tool", toolName: "get_weather" },
      maxOutputTokens: 64 });
    assert.equal(called.length, 1);
  },

  async outputIsStructured() {
    const whole = await generateText({
      ...common, prompt: ASK_WEATHER, output: Output.object({ schema: weather }), maxOutputTokens: 64 });
    assert.ok(isWeather(whole.output), JSON.stringify(whole.output));
    const stream = streamText({
      ...common, prompt: ASK_WEATHER, output: Output.object({ schema: weather }), maxOutputTokens: 64 });
    let last;
    for await (const part of stream.partialOutputStream) last = part;
    assert.ok(isWeather(last), JSON.stringify(last));
  },
};

for (const [check, called] of Object.entries(checks)) {
  try {
    await called();
    console.log(`ok ${check}`);
  } catch (error) {
    process.exitCode = 1;
    console.log(`FAILED ${check}\n${error.stack}\n${error.responseBody ?? ""}`);
  }
}

// The Node client of OpenAI against `lily serve`, with a script and with the demo model.
//
//     node clients.mjs PATH_OF_LILY

import assert from "node:assert/strict";
import { spawn } from "node:child_process";
import { createInterface } from "node:readline";
import OpenAI from "openai";

const lily = process.argv[2];
const script = new URL("clients.jsonl", import.meta.url).pathname;
const model = "lily";
const city = { type: "object", properties: { city: { type: "string" } }, required: ["city"] };
const weather = { name: "get_weather", description: "Get the weather for a city.", parameters: city };
const tools = [{ type: "function", function: weather }];
const person = {
    type: "object",
    properties: { name: { type: "string", maxLength: 20 }, age: { type: "integer" } },
    required: ["name", "age"],
    additionalProperties: false,
};
const ask = (content) => [{ role: "user", content }];

/** A server on a free port. */
async function serve(...options) {
    const server = spawn(lily, ["serve", "--port", "0", ...options], { stdio: ["ignore", "ignore", "pipe"] });
    const log = [];
    for await (const line of createInterface({ input: server.stderr })) {
        log.push(line);
        const found = line.match(/http:\/\/(\S+) is ready/);
        if (found) {
            server.stderr.resume();
            return { server, url: `http://${found[1]}` };
        }
    }
    throw new Error(`the server did not start:\n${log.join("\n")}`);
}

async function metric(url, name) {
    const text = await (await fetch(`${url}/metrics`)).text();
    return Number(text.match(new RegExp(`^${name} (\\S+)$`, "m"))[1]);
}

const both = {
    async models(client) {
        assert.equal((await client.models.list()).data.length, 1);
    },
    async "a streamed chat is the whole one"(client) {
        const request = { model, messages: ask("Hello"), temperature: 0, max_tokens: 120 };
        const whole = await client.chat.completions.create(request);
        const stream = await client.chat.completions.create({
            ...request,
            stream: true,
            stream_options: { include_usage: true },
        });
        let [content, reason, usage] = ["", null, null];
        for await (const chunk of stream) {
            content += chunk.choices[0]?.delta.content ?? "";
            reason = chunk.choices[0]?.finish_reason ?? reason;
            usage = chunk.usage ?? usage;
        }
        assert.equal(content, whole.choices[0].message.content ?? "");
        assert.equal(reason, whole.choices[0].finish_reason);
        assert.equal(usage.completion_tokens, whole.usage.completion_tokens);
        assert.ok(usage.prompt_tokens_details.cached_tokens > 0);
    },
    async "tools go round"(client) {
        let city;
        const get_weather = {
            ...weather,
            parse: JSON.parse,
            function: (given) => {
                city = given.city;
                return "21 degrees, sunny";
            },
        };
        for (const stream of [false, true]) {
            const messages = ask("What is the weather in Rome?");
            const runner = client.chat.completions.runTools({
                model,
                messages,
                temperature: 0,
                stream,
                tools: [{ type: "function", function: get_weather }],
            });
            assert.match(await runner.finalContent(), /21 degrees/);
            assert.equal(city, "Rome");
        }
    },
    async "a response as events"(client) {
        const stream = client.responses.stream({
            model,
            input: "What is the weather in Rome?",
            temperature: 0,
            tools: [{ type: "function", ...weather }],
        });
        const kinds = [];
        for await (const event of stream) kinds.push(event.type);
        const call = (await stream.finalResponse()).output.find((item) => item.type === "function_call");
        assert.equal(JSON.parse(call.arguments).city, "Rome");
        assert.equal(kinds[0], "response.created");
        assert.equal(kinds.at(-1), "response.completed");
        assert.ok(kinds.includes("response.function_call_arguments.delta"));
    },
    async "JSON of a schema"(client) {
        const answer = await client.chat.completions.parse({
            model,
            messages: ask("Anna is a baker. Write her as an object."),
            temperature: 0,
            max_tokens: 400,
            response_format: { type: "json_schema", json_schema: { name: "person", schema: person, strict: true } },
            enable_thinking: false,
        });
        assert.deepEqual(Object.keys(JSON.parse(answer.choices[0].message.content)).sort(), ["age", "name"]);
    },
    async "a wrong field is named"(client) {
        const wrong = client.chat.completions.create({ model, messages: ask("Hello"), top_p: 7 });
        await assert.rejects(wrong, (error) => error instanceof OpenAI.BadRequestError && error.param === "top_p");
    },
};

const scripted = {
    async "an aborted stream ends its request"(client, url) {
        const stream = await client.chat.completions.create({ model, messages: ask("Count slowly"), stream: true });
        // The line takes three seconds.
        const deadline = Date.now() + 2000;
        for await (const _ of stream) break;
        while ((await metric(url, "lily_requests_running")) > 0) assert.ok(Date.now() < deadline, "it still runs");
    },
    async "an error in a stream is thrown"(client) {
        const read = async () => {
            const messages = ask("Please unplug it");
            for await (const _ of await client.chat.completions.create({ model, messages, stream: true }));
        };
        await assert.rejects(read, /unplugged/);
    },
};

let failed = 0;
for (const [name, options, tests] of [
    ["script", ["--script", script], { ...both, ...scripted }],
    ["demo model", [], both],
]) {
    const { server, url } = await serve(...options);
    const client = new OpenAI({ baseURL: `${url}/v1`, apiKey: "anything", maxRetries: 0 });
    for (const [test, run] of Object.entries(tests)) {
        try {
            await run(client, url);
            console.log(`ok      ${name}: ${test}`);
        } catch (error) {
            failed += 1;
            console.log(`FAILED  ${name}: ${test}\n`, error);
        }
    }
    server.kill("SIGTERM");
}
process.exitCode = failed > 0 ? 1 : 0;

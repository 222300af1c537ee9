"""The Python clients of OpenAI and Anthropic against `lily serve`, with a script and with the demo model.

    python clients.py PATH_OF_LILY
"""

import json
import os
import sys
import time

import anthropic
import openai

from serving import Server, run

LILY = sys.argv[1]
SCRIPT = os.path.join(os.path.dirname(os.path.abspath(__file__)), "clients.jsonl")
KEY = "a key"
MODEL = "lily"

CITY = {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}, "required": ["city"]}
FUNCTION = {"name": "get_weather", "description": "Get the weather for a city.", "parameters": CITY}
TOOLS = [{"type": "function", "function": FUNCTION}]
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 20}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON, "strict": True}}
# Anthropic's newest clients have no word of their own for it.
GREEDY = {"extra_body": {"temperature": 0}}


def ask(text):
    return [{"role": "user", "content": text}]


class Clients:
    """The clients of one server, and what is asked of both kinds of model."""

    def __init__(self, server, key="anything"):
        self.server = server
        # What a client would hide by asking again is to be seen.
        self.openai = openai.OpenAI(base_url=server.url + "/v1", api_key=key, max_retries=0)
        self.anthropic = anthropic.Anthropic(base_url=server.url, auth_token=key, max_retries=0)

    def chat(self, text, **more):
        messages = ask(text) if isinstance(text, str) else text
        return self.openai.chat.completions.create(model=MODEL, messages=messages, **{"temperature": 0, **more})

    def message(self, text, **more):
        messages = ask(text) if isinstance(text, str) else text
        return self.anthropic.messages.create(model=MODEL, messages=messages, **{**GREEDY, "max_tokens": 300, **more})

    def stream_chat(self, text, **more):
        """The parts of a streamed answer, joined, and its last chunk."""
        reasoning, content, calls, reason, last = "", "", {}, None, None
        for last in self.chat(text, stream=True, **more):
            for choice in last.choices:
                reasoning += getattr(choice.delta, "reasoning_content", None) or ""
                content += choice.delta.content or ""
                reason = choice.finish_reason or reason
                for call in choice.delta.tool_calls or []:
                    name, arguments = calls.get(call.index, ("", ""))
                    calls[call.index] = (name + (call.function.name or ""), arguments + (call.function.arguments or ""))
        return reasoning, content, list(calls.values()), reason, last


def parts_of(answer):
    choice = answer.choices[0]
    calls = [(call.function.name, call.function.arguments) for call in choice.message.tool_calls or []]
    reasoning = getattr(choice.message, "reasoning_content", None) or ""
    return reasoning, choice.message.content or "", calls, choice.finish_reason


def both(c):
    """What holds whatever the model says."""

    def models():
        assert len(list(c.openai.models.list())) == 1
        assert c.openai.models.retrieve("any").id

    def streamed_chat_is_the_whole_one():
        for text, more in [("Hello", {}), ("What is the weather in Rome?", {"tools": TOOLS})]:
            whole = parts_of(c.chat(text, max_tokens=120, **more))
            assert c.stream_chat(text, max_tokens=120, **more)[:4] == whole, whole

    def streamed_message_is_the_whole_one():
        thinking = {"type": "enabled", "budget_tokens": 1024}
        tools = [{"name": "get_weather", "description": "Get the weather for a city.", "input_schema": CITY}]
        for text, more in [("Hello", {}), ("What is the weather in Rome?", {"tools": tools})]:
            whole = c.message(text, thinking=thinking, max_tokens=1200, **more)
            with c.anthropic.messages.stream(
                model=MODEL, messages=ask(text), thinking=thinking, max_tokens=1200, **GREEDY, **more
            ) as stream:
                events = [event.type for event in stream]
                final = stream.get_final_message()
            simple = lambda m: [(b.type, getattr(b, "text", None), getattr(b, "input", None)) for b in m.content]
            assert simple(final) == simple(whole) and final.stop_reason == whole.stop_reason
            assert whole.content[0].type == "thinking" and whole.content[0].thinking and whole.content[0].signature
            assert events[0] == "message_start" and events[-1] == "message_stop", events
            assert final.usage.output_tokens == whole.usage.output_tokens

    def tools_go_round_in_chat():
        messages = ask("What is the weather in Rome?")
        answer = c.chat(messages, tools=TOOLS)
        call = answer.choices[0].message.tool_calls[0]
        assert answer.choices[0].finish_reason == "tool_calls"
        assert call.function.name == "get_weather" and json.loads(call.function.arguments)["city"] == "Rome"
        messages.append(answer.choices[0].message.model_dump(exclude_none=True))
        messages.append({"role": "tool", "tool_call_id": call.id, "content": "21 degrees, sunny"})
        end = c.chat(messages, tools=TOOLS)
        assert "21 degrees" in end.choices[0].message.content and end.choices[0].finish_reason == "stop", end
        assert end.usage.prompt_tokens_details.cached_tokens > answer.usage.prompt_tokens // 2, end.usage

    def tools_go_round_in_messages():
        tools = [{"name": "get_weather", "description": "Get the weather for a city.", "input_schema": CITY}]
        messages = ask("What is the weather in Rome?")
        answer = c.message(messages, tools=tools)
        use = next(block for block in answer.content if block.type == "tool_use")
        assert answer.stop_reason == "tool_use" and use.name == "get_weather" and use.input["city"] == "Rome"
        messages.append({"role": "assistant", "content": [block.model_dump(exclude_none=True) for block in answer.content]})
        result = {"type": "tool_result", "tool_use_id": use.id, "content": [{"type": "text", "text": "21 degrees, sunny"}]}
        messages.append({"role": "user", "content": [result]})
        end = c.message(messages, tools=tools)
        assert "21 degrees" in end.content[-1].text and end.stop_reason == "end_turn", end
        assert end.usage.cache_read_input_tokens > 0, end.usage

    def tools_go_round_in_responses():
        tools = [{"type": "function", **FUNCTION}, {"type": "web_search"}]
        items = ask("What is the weather in Rome?")
        create = lambda: c.openai.responses.create(model=MODEL, input=items, tools=tools, temperature=0)
        answer = create()
        call = next(item for item in answer.output if item.type == "function_call")
        assert call.name == "get_weather" and json.loads(call.arguments)["city"] == "Rome"
        items += [item.model_dump(exclude_none=True) for item in answer.output]
        items.append({"type": "function_call_output", "call_id": call.call_id, "output": "21 degrees, sunny"})
        end = create()
        assert "21 degrees" in end.output_text and end.status == "completed", end
        assert end.usage.input_tokens_details.cached_tokens > 0, end.usage

    def responses_stream():
        more = {"model": MODEL, "input": "Hello", "temperature": 0, "max_output_tokens": 120}
        whole = c.openai.responses.create(**more)
        events = list(c.openai.responses.create(stream=True, **more))
        kinds = [event.type for event in events]
        assert [event.sequence_number for event in events] == list(range(len(events)))
        assert kinds[:2] == ["response.created", "response.in_progress"], kinds
        assert kinds[-1] in ("response.completed", "response.incomplete"), kinds
        text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
        assert text == whole.output_text == events[-1].response.output_text
        assert "response.reasoning_text.delta" in kinds and "response.output_item.done" in kinds, kinds

    def json_schema():
        # The demo model would end its answer within these thoughts.
        budget = {"thinking_budget": 300}
        for thinking in (True, False):
            answer = c.chat(
                "Anna is a baker. Write her as an object.",
                response_format=FORMAT,
                max_tokens=400,
                extra_body={"chat_template_kwargs": {"enable_thinking": thinking}, **budget},
            )
            reasoning, content, _, reason = parts_of(answer)
            person = json.loads(content)
            assert person.keys() == {"name", "age"} and isinstance(person["age"], int), content
            assert bool(reasoning) == thinking and reason == "stop", answer
        answer = c.openai.responses.create(
            model=MODEL,
            input="Anna is a baker. Write her as an object.",
            text={"format": {"type": "json_schema", "name": "person", "schema": PERSON}},
            temperature=0,
            extra_body=budget,
        )
        assert json.loads(answer.output_text).keys() == {"name", "age"}, answer.output_text

    def usage():
        text = "Hello"
        whole = c.chat(text, max_tokens=120).usage
        assert whole.total_tokens == whole.prompt_tokens + whole.completion_tokens
        with_usage = c.stream_chat(text, max_tokens=120, stream_options={"include_usage": True})[4]
        assert with_usage.choices == [] and with_usage.usage.completion_tokens == whole.completion_tokens
        assert c.stream_chat(text, max_tokens=120)[4].usage is None
        assert with_usage.usage.prompt_tokens_details.cached_tokens > 0

    def a_second_turn_reads_only_what_is_new():
        text = "Tell me a story about a fox. " + "The fox is red and likes the forest. " * 20
        first = c.chat(text, max_tokens=60)
        said = {"role": "assistant", "content": first.choices[0].message.content}
        second = c.chat([*ask(text), said, *ask("And then?")], max_tokens=20)
        new = second.usage.prompt_tokens - second.usage.prompt_tokens_details.cached_tokens
        assert new < second.usage.prompt_tokens - first.usage.prompt_tokens + 16, (first.usage, second.usage)

    def logprobs():
        off = {"enable_thinking": False}
        answer = c.chat("Hello", logprobs=True, top_logprobs=3, max_tokens=8, extra_body=off)
        tokens = answer.choices[0].logprobs.content
        assert "".join(token.token for token in tokens) == answer.choices[0].message.content, answer
        for token in tokens:
            assert token.logprob <= 0 and len(token.top_logprobs) == 3
            assert token.top_logprobs == sorted(token.top_logprobs, key=lambda top: -top.logprob)
            assert bytes(token.bytes).decode() == token.token

    def completions():
        more = {"model": MODEL, "prompt": "Once upon a time", "max_tokens": 12, "temperature": 0}
        whole = c.openai.completions.create(**more)
        text = "".join(chunk.choices[0].text for chunk in c.openai.completions.create(stream=True, **more))
        assert text == whole.choices[0].text and text, (text, whole)
        echo = c.openai.completions.create(echo=True, **more)
        assert echo.choices[0].text == more["prompt"] + whole.choices[0].text

    def count_tokens():
        count = c.anthropic.messages.count_tokens(model=MODEL, messages=ask("Hello"), system="Be brief.").input_tokens
        used = c.message("Hello", system="Be brief.").usage
        assert count == used.input_tokens + (used.cache_read_input_tokens or 0), (count, used)

    def stop_strings():
        whole = parts_of(c.chat("Hello", max_tokens=120))[1]
        stop = whole.split()[1]
        reasoning, content, _, reason = parts_of(c.chat("Hello", stop=[stop, "never said"], max_tokens=120))
        assert (content, reason) == (whole[: whole.index(stop)], "stop"), content
        answer = c.message("Hello", stop_sequences=[stop])
        assert answer.stop_reason in ("stop_sequence", "end_turn")
        if answer.stop_reason == "stop_sequence":
            assert answer.stop_sequence == stop

    def the_end_of_max_tokens():
        assert c.chat("Hello", max_tokens=2).choices[0].finish_reason == "length"
        assert c.message("Hello", max_tokens=2).stop_reason == "max_tokens"
        assert c.openai.responses.create(model=MODEL, input="Hello", max_output_tokens=2).status == "incomplete"

    def a_field_that_is_wrong_is_named():
        for field, value in [("temperature", -3), ("top_p", 7), ("max_tokens", "many"), ("messages", [])]:
            try:
                c.chat(value if field == "messages" else "Hello", **({} if field == "messages" else {field: value}))
                raise AssertionError(f"{field}: {value} was taken")
            except openai.BadRequestError as error:
                assert field in error.body["message"] and error.body["param"] == field, error.body
        try:
            c.message("Hello", extra_body={"top_p": 7})
            raise AssertionError("top_p: 7 was taken")
        except anthropic.BadRequestError as error:
            assert "top_p" in error.body["error"]["message"], error.body

    def a_path_that_is_not_there():
        for client, kind in [(c.openai, openai.NotFoundError), (c.anthropic, anthropic.NotFoundError)]:
            try:
                client.post("/v1/nothing", cast_to=object, body={})
                raise AssertionError("it is there")
            except kind:
                pass

    return [(name, f) for name, f in locals().items() if f is not c]


def scripted(c):
    """What the script says, word for word."""

    def the_script_comes_through():
        assert parts_of(c.chat("Hello")) == ("A greeting.", "Hello, how are you today?", [], "stop")
        calls = [("get_weather", '{"city":"Rome","days":2}')]
        found = parts_of(c.chat("What is the weather in Rome?", tools=TOOLS))
        assert found == ("A tool knows.", "I look.", calls, "tool_calls"), found
        assert [block.type for block in c.message("Hello").content] == ["text"]

    def a_device_that_fails_in_a_stream():
        stream = c.chat("Please unplug it", stream=True)
        text = ""
        try:
            for chunk in stream:
                text += chunk.choices[0].delta.content or ""
            raise AssertionError("the stream ended well")
        except openai.APIError as error:
            assert "unplugged" in error.message and text == "So far", (error.message, text)
        try:
            with c.anthropic.messages.stream(model=MODEL, messages=ask("Please unplug it"), max_tokens=50) as stream:
                list(stream)
            raise AssertionError("the stream ended well")
        except anthropic.APIError as error:
            assert "unplugged" in str(error), error
        # Three failures without a token between them would be the end of the server.
        assert parts_of(c.chat("Hello"))[1] == "Hello, how are you today?"

    def closed_streams_end_their_requests():
        running = lambda metrics: metrics["lily_requests_running"] > 0
        for open_stream in [
            lambda: c.chat("Count slowly", stream=True),
            lambda: c.openai.responses.create(model=MODEL, input="Count slowly", stream=True),
            lambda: c.message("Count slowly", stream=True),
        ]:
            stream = open_stream()
            next(iter(stream))
            c.server.wait_until("running", running)
            start = time.monotonic()
            stream.close()
            c.server.wait_idle(2)
            # The line takes about 4 s.
            assert time.monotonic() - start < 2

    return [(name, f) for name, f in locals().items() if f is not c]


def a_key_is_asked_for():
    with Server(LILY, "--script", SCRIPT, "--api-key", KEY) as server:
        assert Clients(server, KEY).chat("Hello").choices
        assert Clients(server, KEY).message("Hello").content
        for ask_it, kind in [
            (lambda c: c.chat("Hello"), openai.AuthenticationError),
            (lambda c: c.openai.models.list(), openai.AuthenticationError),
            (lambda c: c.message("Hello"), anthropic.AuthenticationError),
        ]:
            try:
                ask_it(Clients(server, "another"))
                raise AssertionError("another key was taken")
            except kind:
                pass


def a_full_queue_says_when_to_come_again():
    with Server(LILY, "--script", SCRIPT, "--parallel", 1, "--queue", 1) as server:
        c = Clients(server)
        running, waiting = c.chat("Count slowly", stream=True), None
        next(iter(running))
        # The headers of this one come when it is accepted, its text when the first is over.
        waiting = c.chat("Count slowly", stream=True)
        for ask_it, kind in [(c.chat, openai.RateLimitError), (c.message, anthropic.RateLimitError)]:
            try:
                ask_it("Hello")
                raise AssertionError("there was room")
            except kind as error:
                assert int(error.response.headers["retry-after"]) >= 1
        running.close()
        waiting.close()
        server.wait_idle()
        # With its retries the client gets its answer.
        patient = c.openai.with_options(max_retries=3)
        assert patient.chat.completions.create(model=MODEL, messages=ask("Hello")).choices


def a_drained_server_refuses():
    with Server(LILY, "--script", SCRIPT) as server:
        c = Clients(server)
        stream = c.chat("Count slowly", stream=True)
        next(iter(stream))
        assert server.request("POST", "/drain")[0] == 200
        try:
            c.chat("Hello")
            raise AssertionError("a drained server took a request")
        except openai.APIStatusError as error:
            assert error.status_code == 503 and int(error.response.headers["retry-after"]) >= 1
        assert server.request("GET", "/ready")[0] == 503 and server.request("GET", "/health")[0] == 200
        text = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
        assert text.endswith("nine ten"), text


def main():
    tests = []
    with Server(LILY, "--script", SCRIPT) as script, Server(LILY, "--threads", 2) as demo:
        for name, server, kinds in [("script", script, [both, scripted]), ("demo model", demo, [both])]:
            clients = Clients(server)
            tests += [(f"{name}: {test}", f) for kind in kinds for test, f in kind(clients)]
        tests += [(f.__name__, f) for f in (a_key_is_asked_for, a_full_queue_says_when_to_come_again, a_drained_server_refuses)]
        run(tests)


if __name__ == "__main__":
    main()

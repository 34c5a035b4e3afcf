"""Streams a chat, a tool call and a JSON-schema answer with the official client. Usage: openai_client.py URL"""

import json
import sys

from openai import BadRequestError, OpenAI

client = OpenAI(base_url=sys.argv[1], api_key="none", max_retries=0)
model = client.models.list().data[0].id


def ask(**more):
    return client.chat.completions.create(
        model=model, temperature=0, stream=True, stream_options={"include_usage": True}, **more
    )


# A chat: streamed, it is the text that comes in one piece otherwise.
question = {"messages": [{"role": "user", "content": "Name three colours."}], "max_tokens": 48}
whole = client.chat.completions.create(model=model, temperature=0, **question)
text, usage = "", None
for chunk in ask(**question):
    if chunk.choices:
        text += chunk.choices[0].delta.content or ""
    usage = chunk.usage or usage
assert text and text == whole.choices[0].message.content, (text, whole)
assert usage.completion_tokens > 0 and usage.total_tokens == usage.prompt_tokens + usage.completion_tokens, usage

# A tool call.
tool = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather in a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 30}},
            "required": ["city"],
        },
    },
}
name, arguments, reason = "", "", None
for chunk in ask(
    messages=[{"role": "user", "content": "What is the weather in Paris?"}],
    tools=[tool],
    tool_choice="required",
    max_tokens=200,
):
    if not chunk.choices:
        continue
    for call in chunk.choices[0].delta.tool_calls or []:
        name += call.function.name or ""
        arguments += call.function.arguments or ""
    reason = chunk.choices[0].finish_reason or reason
assert name == "get_weather", name
assert isinstance(json.loads(arguments)["city"], str), arguments
assert reason == "tool_calls", reason

# An answer that follows a JSON schema.
schema = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 20}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
text = ""
for chunk in ask(
    messages=[{"role": "user", "content": "Invent a person."}],
    response_format={"type": "json_schema", "json_schema": {"name": "person", "schema": schema, "strict": True}},
    max_tokens=120,
):
    if chunk.choices:
        text += chunk.choices[0].delta.content or ""
person = json.loads(text)
assert set(person) == {"name", "age"} and isinstance(person["age"], int), person

# A refusal arrives as the client's own exception.
try:
    ask(messages=[{"role": "user", "content": "word " * 3000}], max_tokens=8)
except BadRequestError as error:
    assert error.code == "context_length_exceeded", error
else:
    raise AssertionError("a prompt longer than the slot was accepted")
print("ok")

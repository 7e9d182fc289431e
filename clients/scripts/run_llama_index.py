"""LlamaIndex: complete, chat, streams, tools, structured answers."""

import asyncio
import sys

from llama_index.core.llms import ChatMessage
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike
from pydantic import BaseModel


class Person(BaseModel):
    """A person."""

    name: str
    age: int


def get_weather(city: str) -> str:
    """The weather in a city."""
    return f"Sunny in {city}."


def main(url: str, model: str) -> None:
    how = {"model": model, "api_base": f"{url}/v1", "api_key": "none", "max_tokens": 60, "temperature": 0}
    chat = OpenAILike(**how, is_chat_model=True, is_function_calling_model=True, context_window=8192)
    question = ChatMessage(role="user", content="What is the capital of France?")
    whole = chat.chat([question]).message.content
    assert whole
    assert "".join(piece.delta or "" for piece in chat.stream_chat([question])) == whole
    assert asyncio.run(chat.achat([question])).message.content == whole
    raw = OpenAILike(**how, is_chat_model=False, context_window=8192)
    text = raw.complete("one, two, three,").text
    assert "".join(piece.delta or "" for piece in raw.stream_complete("one, two, three,")) == text
    print("chat, complete, both streamed, achat")

    tools = [FunctionTool.from_defaults(get_weather)]
    asked = chat.chat_with_tools(tools, user_msg="What is the weather in Zurich?", tool_required=True)
    calls = chat.get_tool_calls_from_response(asked)
    assert calls[0].tool_name == "get_weather"
    assert set(calls[0].tool_kwargs) == {"city"}
    print("chat_with_tools")

    person = chat.as_structured_llm(Person).complete("Ann is 30 years old.").raw
    assert isinstance(person, Person)
    schema = OpenAILike(
        **how, is_chat_model=True, is_function_calling_model=True, should_use_structured_outputs=True
    )
    assert isinstance(schema.as_structured_llm(Person).complete("Ann is 30 years old.").raw, Person)
    print("as_structured_llm, by a tool and by a schema")


main(*sys.argv[1:])

"""LangChain: invoke, stream, batch, tools, structured output by each of its methods."""

import asyncio
import sys

from langchain.agents import create_agent
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel


class Person(BaseModel):
    """A person."""

    name: str
    age: int


@tool
def get_weather(city: str) -> str:
    """The weather in a city."""
    return f"Sunny in {city}."


def main(url: str, model: str) -> None:
    chat = ChatOpenAI(base_url=f"{url}/v1", api_key="none", model=model, temperature=0, max_tokens=60)
    answer = chat.invoke("What is the capital of France?")
    assert answer.content
    assert answer.usage_metadata["output_tokens"] > 0
    assert "".join(piece.content for piece in chat.stream("What is the capital of France?")) == answer.content
    assert [one.content for one in asyncio.run(chat.abatch(["Hello", "Bye"]))]
    print("invoke, stream, abatch")

    question = HumanMessage("What is the weather in Zurich?")
    bound = chat.bind_tools([get_weather], tool_choice="any")
    called = bound.invoke([question])
    assert called.tool_calls[0]["name"] == "get_weather"
    assert set(called.tool_calls[0]["args"]) == {"city"}
    joined = None
    for piece in bound.stream([question]):
        joined = piece if joined is None else joined + piece
    assert [call["args"] for call in joined.tool_calls] == [call["args"] for call in called.tool_calls]
    results = [ToolMessage("Sunny.", tool_call_id=call["id"]) for call in called.tool_calls]
    assert chat.bind_tools([get_weather]).invoke([question, called, *results]).content
    assert create_agent(chat, [get_weather]).invoke({"messages": [question]})["messages"][-1].content
    print("bind_tools, streamed too; an agent")

    for method in ("function_calling", "json_schema", "json_mode"):
        asked = "A person called Ann, 30 years old, as JSON with the keys name and age."
        formed = chat.with_structured_output(Person, method=method, include_raw=True).invoke(asked)
        if method == "json_mode":  # holds to JSON, not to this schema
            assert formed["raw"].content.startswith("{")
        else:
            assert isinstance(formed["parsed"], Person), formed
    print("with_structured_output: function_calling, json_schema, json_mode")

    by_responses = ChatOpenAI(
        base_url=f"{url}/v1", api_key="none", model=model, temperature=0, max_tokens=60, use_responses_api=True
    )
    assert by_responses.invoke("What is the capital of France?").text
    assert by_responses.bind_tools([get_weather], tool_choice="any").invoke([question]).tool_calls
    assert "".join(piece.text for piece in by_responses.stream("What is the capital of France?"))
    print("Responses: invoke, tools, stream")


main(*sys.argv[1:])

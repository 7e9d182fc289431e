"""LiteLLM: chat, stream, completions, tools, JSON schema, Responses, and Anthropic's route."""

import asyncio
import json
import sys

import litellm
from pydantic import BaseModel


class Person(BaseModel):
    """A person."""

    name: str
    age: int


TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}


def main(url: str, model: str) -> None:
    common = {"api_base": f"{url}/v1", "api_key": "none", "temperature": 0, "max_tokens": 60}
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    for provider in ("openai", "hosted_vllm"):
        how = {**common, "model": f"{provider}/{model}", "messages": messages}
        whole = litellm.completion(**how).choices[0].message.content
        assert whole
        pieces = [piece.choices[0].delta.content or "" for piece in litellm.completion(**how, stream=True)]
        assert "".join(pieces) == whole
        assert asyncio.run(litellm.acompletion(**how)).choices[0].message.content == whole
        scored = litellm.completion(**how, logprobs=True, top_logprobs=2).choices[0]
        assert len(scored.logprobs.content[0].top_logprobs) == 2
        calls = litellm.completion(**how, tools=[TOOL], tool_choice="required").choices[0].message.tool_calls
        assert "city" in json.loads(calls[0].function.arguments)
        formed = litellm.completion(**how, response_format=Person).choices[0].message.content
        Person.model_validate_json(formed)
    print("completion, stream, acompletion, logprobs, tools, response_format: as openai and as hosted_vllm")

    text = litellm.text_completion(prompt="one, two,", model=f"text-completion-openai/{model}", **common)
    assert text.choices[0].text
    print("text_completion")
    response = litellm.responses(
        model=f"openai/{model}", input="Hello", api_base=f"{url}/v1", api_key="none", max_output_tokens=20
    )
    assert response.output[0].content[0].text
    print("responses")
    anthropic = {"model": f"anthropic/{model}", "api_base": url, "api_key": "none", "max_tokens": 20}
    assert litellm.completion(messages=messages, **anthropic).choices[0].message.content
    assert list(litellm.completion(messages=messages, stream=True, **anthropic))
    print("anthropic, whole and streamed")


main(*sys.argv[1:])

"""instructor: four modes of OpenAI's chats, waited for and not, and partial answers."""

import asyncio
import sys
from typing import Annotated

import instructor
import openai
from instructor import Mode
from pydantic import BaseModel, ConfigDict, Field


class Person(BaseModel):
    """A person."""

    model_config = ConfigDict(extra="forbid")
    name: Annotated[str, Field(max_length=20)]
    age: Annotated[int, Field(ge=0, le=120)]


MESSAGES = [{"role": "user", "content": "Ann is 30 years old."}]
FORCED = (Mode.TOOLS, Mode.TOOLS_STRICT, Mode.JSON_SCHEMA)
HOPING = (Mode.MD_JSON,)
"""Only asks for JSON of the right form in the prompt; a small model needs to be held to it."""


def main(url: str, model: str) -> None:
    how = {"messages": MESSAGES, "response_model": Person, "max_retries": 0}
    chat = {**how, "model": model, "temperature": 0, "max_tokens": 200}
    held = {"extra_body": {"guided_json": Person.model_json_schema()}}
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    for mode in (*FORCED, *HOPING):
        extra = held if mode in HOPING else {}
        person = instructor.from_openai(client, mode=mode).chat.completions.create(**chat, **extra)
        assert isinstance(person, Person)
        later = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)  # one an event loop
        awaited = instructor.from_openai(later, mode=mode).chat.completions.create(**chat, **extra)
        assert isinstance(asyncio.run(awaited), Person)
        print(mode)
    for mode in FORCED:
        partial = instructor.from_openai(client, mode=mode).chat.completions.create_partial(**chat)
        assert Person.model_validate(list(partial)[-1].model_dump())
    print("create_partial")


main(*sys.argv[1:])

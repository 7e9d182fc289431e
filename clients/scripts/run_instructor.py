"""instructor: every mode that it has for OpenAI's clients, waited for and not, and partial answers."""

import asyncio
import sys
from collections.abc import Iterable
from typing import Annotated

import instructor
import openai
from instructor import Mode
from instructor.v2.core.errors import ModeError
from pydantic import BaseModel, ConfigDict, Field


class Person(BaseModel):
    """A person."""

    model_config = ConfigDict(extra="forbid")
    name: Annotated[str, Field(max_length=20)]
    age: Annotated[int, Field(ge=0, le=120)]


MESSAGES = [{"role": "user", "content": "Ann is 30 years old."}]
FORCED = (
    Mode.TOOLS,
    Mode.TOOLS_STRICT,
    Mode.FUNCTIONS,
    Mode.JSON_SCHEMA,
    Mode.JSON_O1,
    Mode.RESPONSES_TOOLS,
    Mode.RESPONSES_TOOLS_WITH_INBUILT_TOOLS,
)
HOPING = (Mode.JSON, Mode.MD_JSON)
"""Only ask for JSON of the right form in the prompt; a small model needs to be held to it."""
HELD = {"guided_json": Person.model_json_schema(), "response_format": None}


def modes(client: openai.OpenAI) -> set[Mode]:
    """Those that instructor has for OpenAI's clients; it refuses the others itself, before any request."""
    found = set()
    for mode in Mode:
        try:
            instructor.from_openai(client, mode=mode)
        except ModeError:
            continue
        found.add(mode)
    return found


def main(url: str, model: str) -> None:
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    assert modes(client) == {*FORCED, *HOPING, Mode.PARALLEL_TOOLS}
    how = {"messages": MESSAGES, "max_retries": 0, "model": model, "temperature": 0}
    for mode in (*FORCED, *HOPING):
        most = "max_output_tokens" if "RESPONSES" in mode.name else "max_tokens"
        chat = {**how, "response_model": Person, most: 200}
        if mode in HOPING:
            chat["extra_body"] = HELD
        person = instructor.from_openai(client, mode=mode).chat.completions.create(**chat)
        assert isinstance(person, Person)
        later = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)  # one an event loop
        awaited = instructor.from_openai(later, mode=mode).chat.completions.create(**chat)
        assert isinstance(asyncio.run(awaited), Person)
        print(mode)
    several = instructor.from_openai(client, mode=Mode.PARALLEL_TOOLS).chat.completions.create(
        **how, response_model=Iterable[Person], max_tokens=400, extra_body={"tool_choice": "required"}
    )
    assert all(isinstance(person, Person) for person in several)
    print(Mode.PARALLEL_TOOLS)
    for mode in (Mode.TOOLS, Mode.JSON_SCHEMA):
        chat = {**how, "response_model": Person, "max_tokens": 200}
        partial = instructor.from_openai(client, mode=mode).chat.completions.create_partial(**chat)
        assert Person.model_validate(list(partial)[-1].model_dump())
    print("create_partial")


main(*sys.argv[1:])

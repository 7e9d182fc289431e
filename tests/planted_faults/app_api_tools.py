"""Faults in tools, reasoning, and the routes that translate to chats."""

from __future__ import annotations

from tests.planted_faults.fault import Fault

_PARSERS = ("app/api/tools/test_answer_parsers.py",)
_USE = ("app/api/tools/test_tool_use.py",)
_CONVERSATION = ("app/api/tools/test_conversation.py",)
_CHAT = ("app/api/test_chat_tools.py",)
_RESPONSES = ("app/api/responses/test_responses_route.py",)
_MESSAGES = ("app/api/messages/test_messages_route.py",)
_OPENAPI = ("app/api/test_openapi.py",)
_OPTIONS = ("app/api/test_client_options.py",)

TOOLS: list[Fault] = [
    Fault(
        "app/api/tools/tool_use.py",
        "return tuple(tool for tool in tools if tool.name in named), value",
        "return tools, value",
        _OPTIONS,
        "the model is told of tools that it may not call",
    ),
    Fault(
        "app/api/tools/answer_text.py",
        "keep = len(self.text) if self.ended else _beginning(self.text, marker, self.at)",
        "keep = len(self.text)",
        _PARSERS,
        "a marker that comes in two pieces is taken for text",
    ),
    Fault(
        "app/api/tools/answer_text.py",
        "        if self._space and not self.num_calls:",
        "        if self._space:",
        _PARSERS,
        "the line break after a call is content",
    ),
    Fault(
        "app/api/tools/forced.py",
        "                yield from source.rest(lambda _: None)",
        "                pass",
        _PARSERS,
        "the beginning of a forced call that was cut short is content",
    ),
    Fault(
        "app/api/json_fields.py",
        "        if meant and value.get(meant) is None:\n",
        "        if meant:\n",
        ("app/api/test_translations.py",),
        "the context beside a message's content is taken for a misspelling",
    ),
    Fault(
        "app/api/json_fields.py",
        '    check_names(value, name, ("type", *kinds[kind]))\n',
        "",
        ("app/api/test_translations.py",),
        "a misspelt field of an item, a block, or a part is ignored",
    ),
    Fault(
        "app/api/json_fields.py",
        "return name.lower().replace",
        "return name.replace",
        ("app/api/test_translations.py",),
        "thinking.budgetTokens is ignored",
    ),
    Fault(
        "app/api/messages/request.py",
        '    if last["role"] == "assistant" and "tool_calls" not in last:',
        "    if False:",
        _MESSAGES,
        "an answer that a client began is not continued",
    ),
    Fault(
        "app/api/tools/hermes.py",
        "                source.content(OPEN)\n",
        "",
        _PARSERS,
        "a malformed call loses its marker",
    ),
    Fault(
        "app/api/tools/json_grammar.py",
        "    if depth >= MAX_DEPTH:\n        raise MalformedError\n",
        "",
        _PARSERS,
        "arguments nest without limit",
    ),
    Fault(
        "app/api/tools/json_grammar.py",
        "        if not is_object(text):\n            raise MalformedError\n",
        "",
        _PARSERS,
        "arguments that are text need be no object",
    ),
    Fault(
        "app/api/tools/reasoning.py",
        "        source.drop_space()\n",
        "",
        _PARSERS,
        "white space after reasoning is content",
    ),
    Fault(
        "app/api/tools/tool_use.py",
        "    if len(value) > MAX_TOOLS:",
        "    if False:",
        _USE,
        "a request may have any number of tools",
    ),
    Fault(
        "app/api/tools/tool_use.py",
        "        if depth > MAX_SCHEMA_DEPTH:",
        "        if False:",
        _USE,
        "parameters nest without limit",
    ),
    Fault(
        "app/api/tools/answer_form.py",
        "            moved[keyword] = to + inner[1:]",
        "            moved[keyword] = inner",
        _USE,
        "a reference in one tool's parameters leads to the root of all",
    ),
    Fault(
        "app/api/prompt_tokenizer.py",
        "        texts += [text for tool in tools for text in tool.texts]\n",
        "",
        _CONVERSATION,
        "a tool's description may write control tokens",
    ),
    Fault(
        "app/api/tools/conversation.py",
        'found.append({"role": "user", "content": "\\n".join(results)})',
        'found += [{"role": "user", "content": result} for result in results]',
        _CONVERSATION,
        "two results are two turns of the user",
    ),
    Fault(
        "app/api/choices.py",
        '    if parser.complete or (reason == "stop" and parser.num_calls):',
        "    if reason is not None and parser.num_calls:",
        (*_CHAT, *_MESSAGES),
        "an answer that is cut short says that it ends with calls, or does not end with its only one",
    ),
    Fault(
        "app/api/responses/request.py",
        '        "store": False,',
        '        "store": fields.get("store", False),',
        _OPTIONS,
        "a response says that it is stored",
    ),
    Fault(
        "app/api/responses/reply.py",
        "            if known:\n                events += self._done(known - 1)\n",
        "",
        _RESPONSES,
        "only the last item ends",
    ),
    Fault(
        "app/api/messages/reply.py",
        '"input_tokens": usage.prompt_tokens - usage.cached_tokens,',
        '"input_tokens": usage.prompt_tokens,',
        _MESSAGES,
        "cached tokens count twice",
    ),
    Fault(
        "app/api/errors.py",
        '    return path == "/v1/messages" or path.startswith("/v1/messages/")',
        "    return False",
        _MESSAGES,
        "Anthropic's clients get OpenAI's errors",
    ),
    Fault(
        "app/api/openapi.py",
        '_body({*shared, *openai_types.CHAT_ONLY}, ["messages"], PARAMETERS, of_chat)',
        '_body({*shared, "messages"}, ["messages"], {**PARAMETERS, "n": _integer(1, 8)}, of_chat)',
        _OPENAPI,
        "the document has another limit than the code",
    ),
    Fault(
        "app/api/openapi.py",
        "    parts: list[Any] = [options, options.params, options.output]",
        "    parts: list[Any] = [options, type(options.params)(temperature=0.5), options.output]",
        _OPENAPI,
        "the document has another default than the code",
    ),
]

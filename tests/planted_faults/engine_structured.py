"""Faults in structured output: forms, grammars, matchers, masks."""

from __future__ import annotations

from tests.planted_faults.fault import Fault

_FORMS = ("engine/test_structured_output.py",)
_GRAMMARS = ("engine/structured/test_grammars.py",)
_ENGINE = ("engine/structured/test_structured_engine.py",)
_SAMPLER = ("engine/execution/test_sampler.py",)
_API = ("app/api/test_output_form.py",)
_ATTEMPT = ("app/channel/test_channel.py",)

STRUCTURED: list[Fault] = [
    Fault(
        "engine/structured_output.py",
        "        if depth > MAX_NESTING:\n",
        "        if depth > MAX_NESTING + 1:\n",
        _FORMS,
        "schemas may be nested deeper than the limit says",
    ),
    Fault(
        "engine/structured/grammar.py",
        "    if matcher.is_error():\n        raise refused(form, matcher.get_error())\n",
        "",
        _GRAMMARS,
        "a schema that no output can match is found out only when the request runs",
    ),
    Fault(
        "engine/structured/matcher.py",
        "            if self._restart(began, alone=soon):\n",
        "            if False:\n",
        _GRAMMARS,
        "outputs of one client fail those of another with the same form",
    ),
    Fault(
        "engine/structured/matcher.py",
        "            self.mask[word] &= bits\n",
        "            pass\n",
        _GRAMMARS,
        "tokens that the model does not have are allowed",
    ),
    Fault(
        "engine/structured/checker.py",
        "    signal.setitimer(signal.ITIMER_PROF, CPU_LIMIT_S)  # its signal ends the process\n",
        "",
        _GRAMMARS,
        "a schema that takes hours to compile holds up all others",
    ),
    Fault(
        "engine/structured/checker.py",
        "        yield_to_steps(process.pid)  # already while it loads\n",
        "",
        _GRAMMARS,
        "steps share the cores with the process that tries grammars",
    ),
    Fault(
        "engine/structured/compiler.py",
        "            yield_to_steps(threading.get_native_id())\n",
        "            pass\n",
        _GRAMMARS,
        "steps share the cores with threads that compile grammars",
    ),
    Fault(
        "engine/structured/compiler.py",
        "self._checkers[-1].start()",
        "self._checkers[0].start()",
        _GRAMMARS,
        "the process that was started in advance is not the one that the first grammar is tried in",
    ),
    Fault(
        "engine/structured/checker.py",
        "            self._check_open()\n            if code in",
        "            if code in",
        _GRAMMARS,
        "a grammar that is being compiled when the engine stops is refused, not tried elsewhere",
    ),
    Fault(
        "engine/structured/round_robin_queue.py",
        "                self._waiting[client] = items  # after all others\n",
        "                self._waiting[client] = items\n                self._waiting.move_to_end(client, last=False)\n",
        _GRAMMARS,
        "one client's forms are compiled before everyone else's",
    ),
    Fault(
        "engine/structured/compiler.py",
        "        if self._checked and (owed_s := budget.owed_s()):",
        "        if False:",
        _GRAMMARS,
        "a client that sends slow forms anew each time holds up everyone's steps",
    ),
    Fault(
        "engine/structured/checker.py",
        "            if code in _GRAMMARS_FAULT:\n                reason = _GRAMMARS_FAULT[code]\n",
        '            if True:\n                reason = _GRAMMARS_FAULT.get(code, "too much memory")\n',
        _GRAMMARS,
        "a form is refused for ever because a process was killed",
    ),
    Fault(
        "engine/structured/compiler.py",
        "                self._kept.move_to_end(form)\n",
        "                pass\n",
        _GRAMMARS,
        "a grammar that is used all the time is dropped for its age",
    ),
    Fault(
        "engine/structured/budget.py",
        "        return self._left_s >= 0 or took_s <= allowed_s\n",
        "        return self._left_s >= 0\n",
        _GRAMMARS,
        "a sequence that takes little time fails because others of its form took long",
    ),
    Fault(
        "engine/structured/grammar.py",
        "        if after.is_error():\n",
        "        if False:\n",
        _GRAMMARS,
        "a form that can never be finished is accepted",
    ),
    Fault(
        "engine/structured/matcher.py",
        "        if not self._grammar.budget.spend(took_s, paid) and error is None:\n",
        "        if False:\n",
        _ENGINE,
        "a form that takes long to follow holds up everyone's steps",
    ),
    Fault(
        "engine/structured/matcher.py",
        "        if not mask.any():\n            mask[:] = before\n",
        "",
        _ENGINE,
        "min_tokens beyond the form's end leaves no token",
    ),
    Fault(
        "engine/structured/matcher.py",
        "            self._tokens.extend(tokens)\n",
        "            self._tokens.append(tokens[-1])\n",
        _ENGINE,
        "a request that moved follows its output twice",
    ),
    Fault(
        "engine/scheduling/state.py",
        "            grammar=parent.grammar,\n",
        "",
        _ENGINE,
        "forks are free of the form",
    ),
    Fault(
        "engine/scheduling/intake.py",
        "            grammar=request.grammar,\n",
        "",
        _ENGINE,
        "no form is kept to",
    ),
    Fault(
        "engine/scheduling/outcomes.py",
        "    if sequence.grammar is not None and token in sequence.grammar.end_token_ids:",
        "    if False:",
        _ENGINE,
        "with min_tokens a sequence goes on after the end of its form",
    ),
    Fault(
        "engine/scheduling/intake.py",
        " or request.grammar is not None:  # nothing",
        ":  # nothing",
        _ENGINE,
        "with ignore_eos a sequence goes on after the end of its form",
    ),
    Fault(
        "engine/engine.py",
        "                self.grammars.forget(sequence.params.structured_output)\n",
        "                pass\n",
        _ENGINE,
        "a grammar that has become too complex fails every later request, too",
    ),
    Fault(
        "engine/engine.py",
        "            return self.runner.run(chunks), failed\n",
        "            return self.runner.run(chunks), {}\n",
        _ENGINE,
        "a request whose grammar cannot go on is free of it from then on",
    ),
    Fault(
        "engine/execution/sampler.py",
        "        return bool(self.forbidden) or self.edit is not None or self.allowed is not None\n",
        "        return bool(self.forbidden) or self.edit is not None\n",
        _ENGINE,
        "log probabilities are taken after the form has left tokens out",
    ),
    Fault(
        "kernels/cpu/sampling.cpp",
        "row[t] = bits >> (t - first) & 1 ? row[t]",
        "row[t] = bits >> (31 - t + first) & 1 ? row[t]",
        _SAMPLER,
        "a mask's words are read from the wrong end",
    ),
    Fault(
        "engine/execution/sampler.py",
        "    return torch.from_numpy(other) if mask is None else mask & torch.from_numpy(other)\n",
        "    return torch.from_numpy(other) if mask is None else mask\n",
        ("engine/execution/test_logit_edits.py",),
        "allowed_token_ids mean nothing beside a form",
    ),
    Fault(
        "app/api/output_form.py",
        "    if len(found) > 1:\n",
        "    if len(found) > 9:\n",
        _API,
        "of two forms one is dropped without a word",
    ),
    Fault(
        "app/channel/engine_attempt.py",
        "engine.compile(form, submission.sender)",
        "engine.compile(form, submission.client)",
        _ATTEMPT,
        "a new `user` for each request leaves the debt of slow forms behind",
    ),
    Fault(
        "engine/structured/budget.py",
        " if not budget.owed_s()), oldest)]",
        "), oldest)]",
        _GRAMMARS,
        "a client's debt is forgotten once enough others have come",
    ),
    Fault(
        "app/channel/engine_attempt.py",
        "                    grammar=grammar,\n",
        "",
        _ATTEMPT,
        "the grammar is compiled again on the caller's thread",
    ),
]

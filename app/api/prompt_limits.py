"""What the prompts of one response, and what it says of its output, must keep to, once they are tokens."""

from __future__ import annotations

from dataclasses import replace

from app.api.choices import GenerationJob
from app.api.key_limits import KeyLimits
from app.api.openai_types import GenerationOptions
from app.fleet.fleet_limits import FleetLimits
from engine.errors import InvalidRequestError, counted, shown
from engine.request import check_prompt_scores

MAX_IDS = 2**18
"""Token ids that the options of a request name for all its prompts together, if these are several."""

MAX_BIASES = 2**14
"""Entries of ``logit_bias``, counted once for each prompt of a request. One costs as much as 16 ids."""

MAX_FORM_CHARS = 2**20
"""Characters of the output's form, counted once for each prompt of a request."""


def kept_tokens(options: GenerationOptions, limits: FleetLimits, key: KeyLimits | None) -> int | None:
    """How many tokens of a prompt's end ``truncate_prompt_tokens`` keeps; ``None``: all."""
    keep, wanted = options.output.keep_last, options.params.max_tokens
    if keep is None or keep > 0:
        return keep
    output = 1 if wanted is None else wanted
    longest = limits.longest_prompt(output)
    if key is not None and key.key.max_context_tokens is not None:
        longest = min(longest, key.key.max_context_tokens - output)
    return max(longest, 1)


def kept_end(prompt: list[int], keep: int | None) -> list[int]:
    """The last ``keep`` tokens of ``prompt``; all, if that is ``None``."""
    return prompt if keep is None else prompt[-keep:]


def within_context(job: GenerationJob, key: KeyLimits, limits: FleetLimits) -> GenerationJob:
    """The job with no more output than the key's longest context allows; the replicas' may be shorter.

    Raises:
        InvalidRequestError: it asks for more.
    """
    params = job.options.params
    longest = max(map(len, job.prompts))
    most = key.context(longest, params.max_tokens)
    if most is None or most == params.max_tokens or longest + most >= limits.max_tokens:
        return job
    return replace(job, options=replace(job.options, params=replace(params, max_tokens=most)))


def within_logprobs(job: GenerationJob, limits: FleetLimits, most: int) -> GenerationJob:
    """The job, whose whole response has at most ``most`` log probabilities of output tokens.

    Where the request does not say how many tokens it wants, it gets as many as fit. A stream is sent as it
    comes, so it may have any number, unless its last events repeat them.

    Raises:
        InvalidRequestError: it asks for more.
    """
    params = job.options.params
    times = job.repeats if job.options.stream else 1
    if params.logprobs is None or not times:
        return job
    sequences = len(job.prompts) * params.width
    fit = most // (sequences * (params.logprobs + 1) * times)
    room = limits.max_tokens - max(map(len, job.prompts))
    wanted = params.max_tokens
    if (room if wanted is None else wanted) <= fit:
        return job
    if wanted is None and fit:
        return replace(job, options=replace(job.options, params=replace(params, max_tokens=fit)))
    tokens = room if wanted is None else wanted
    other = "" if job.repeats else ", or set stream to true"
    scores = sequences * tokens * (params.logprobs + 1)
    raise InvalidRequestError(
        f"{counted(sequences, 'sequence')} of up to {counted(tokens, 'token')} with "
        f"{counted(params.logprobs, 'alternative')} each may have {shown(scores)} log probabilities, but one "
        f"response has at most {most // times} (max_response_logprobs); ask for fewer tokens, choices or "
        f"alternatives{other}",
        "logprobs",
    )


def check_prompts(job: GenerationJob, limits: FleetLimits) -> None:
    """Refuse what the engine would refuse, while the response can still have an error status."""
    check_prompt_scores(job.prompt_tokens, job.options.params)  # of all together
    _check_ids(job)
    _check_biases(job)
    _check_form(job)
    for prompt in job.prompts:
        _check_prompt(prompt, job, limits)


def _check_ids(job: GenerationJob) -> None:
    """Each prompt goes to an engine with all ids that the options name, which takes each loop milliseconds."""
    params, prompts = job.options.params, len(job.prompts)
    named = {
        "allowed_token_ids": len(params.allowed_token_ids or ()),
        "bad_words": sum(map(len, params.bad_words)),
    }
    ids = sum(named.values())
    if prompts > 1 and prompts * ids > MAX_IDS:
        name = max(named, key=lambda name: named[name])
        raise InvalidRequestError(
            f"prompt has {prompts} entries, and {name} has {named[name]} token ids for each, but at most "
            f"{MAX_IDS} ids are allowed for all prompts together; send fewer prompts at a time",
            name,
        )


def _check_biases(job: GenerationJob) -> None:
    """Each prompt goes to an engine with all entries, which both loops check one by one."""
    biases, prompts = len(job.options.params.bias), len(job.prompts)
    if prompts * biases > MAX_BIASES:
        raise InvalidRequestError(
            f"prompt has {prompts} entries, and logit_bias has {biases} for each, but at most {MAX_BIASES} are "
            "allowed for all prompts together; send fewer prompts at a time",
            "logit_bias",
        )


def _check_form(job: GenerationJob) -> None:
    """Each prompt goes to an engine with the whole form; packing a long one takes the loop milliseconds."""
    form, prompts = job.options.params.structured_output, len(job.prompts)
    if form is not None and prompts * len(form.text) > MAX_FORM_CHARS:
        raise InvalidRequestError(
            f"prompt has {prompts} entries, and the form of the output has {len(form.text)} characters for "
            f"each, but at most {MAX_FORM_CHARS} are allowed for all prompts together; send fewer prompts at a "
            "time",
            "prompt",
        )


def _check_prompt(prompt: list[int], job: GenerationJob, limits: FleetLimits) -> None:
    param = "messages" if job.chat else "prompt"
    if len(prompt) > limits.max_model_len:  # before the tokens themselves are looked at
        raise InvalidRequestError(
            f"{param} of {len(prompt)} tokens exceeds the context length of {limits.max_model_len} tokens",
            param,
            "context_length_exceeded",
        )
    params = job.options.params
    try:
        longest = limits.validate(prompt, params)
    except InvalidRequestError as error:
        if job.chat and error.param == "prompt":
            raise InvalidRequestError(error.message, param, error.code) from error
        raise
    if params.min_tokens > longest - len(prompt):
        raise InvalidRequestError(
            f"min_tokens is {shown(params.min_tokens)} but after a prompt of {counted(len(prompt), 'token')} "
            f"at most {longest - len(prompt)} more can be generated",
            "min_tokens",
            "context_length_exceeded",
        )

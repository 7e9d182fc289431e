"""Faults in deploys: checks, versions, room, and options that change live."""

from __future__ import annotations

from tests.planted_faults.fault import Fault

_VERSION = ("app/test_deployment_version.py",)
_CHECK = ("app/launch/test_model_check.py",)
_PLACEMENT = ("app/launch/test_placement.py",)
_CONFIG = ("app/test_config.py",)
_INGRESS = ("app/test_ingress_replica.py",)

DEPLOYS: list[Fault] = [
    Fault(
        "app/deployment_version.py",
        '        if name != "version":\n',
        "        if True:\n",
        _VERSION,
        "every option restarts every replica, by Serve's version of the whole application",
    ),
    Fault(
        "app/deployment_version.py",
        '        "options": options.fixed(deployment),\n',
        "",
        _VERSION,
        "an option that needs a restart changes nothing",
    ),
    Fault(
        "app/deployment_version.py",
        '        "code": _code(),\n',
        "",
        _VERSION,
        "engines of the release before talk to ingresses of this one",
    ),
    Fault(
        "app/application.py",
        "        max_surge_percent=100,\n",
        "",
        _VERSION,
        "the only ingress stops before its successor starts",
    ),
    Fault(
        "app/launch/model_check.py",
        "    if not nodes or here in nodes:\n",
        "    if True:\n",
        _CHECK,
        "a head without engines must have the model",
    ),
    Fault(
        "app/launch/model_check.py",
        "        PromptTokenizer(TokenizerParts.read(folder))\n",
        "",
        _CHECK,
        "a model without a tokenizer is deployed",
    ),
    Fault(
        "app/launch/model_check.py",
        "psutil.virtual_memory().total, sharers + 1, needs)",
        "psutil.virtual_memory().total, sharers, needs)",
        _CHECK,
        "a successor is started without memory for it",
    ),
    Fault(
        "app/launch/placement.py",
        "            replicas += 1\n",
        "            pass\n",
        _PLACEMENT,
        "no room is left for a successor on the only node",
    ),
    Fault(
        "app/launch/placement.py",
        "        share = _cores(model.options, nodes) / engines_on_a_node(model, nodes)\n    return",
        '        share = actor_options(model, nodes)["num_cpus"]\n    return',
        _PLACEMENT,
        "the room for a successor costs every engine threads",
    ),
    Fault(
        "app/launch/placement.py",
        "for name, amount in asked.items() if amount]",
        'for name, amount in asked.items() if name == "CPU" and amount]',
        _PLACEMENT,
        "a successor waits for a GPU that there is not",
    ),
    Fault(
        "app/config.py",
        "                    base.get(option.group, {}).pop(name, None)",
        "                    pass",
        _CONFIG,
        "an option that was taken back keeps its value",
    ),
    Fault(
        "app/ingress.py",
        "        if first and not options.scaling.to_zero:\n",
        "        if False:\n",
        _INGRESS,
        "the old ingress leaves while the new one has no engine",
    ),
    Fault(
        "app/ingress.py",
        "        if first and not options.scaling.to_zero:\n",
        "        if not options.scaling.to_zero:\n",
        _INGRESS,
        "a change of options hangs while no engine is routable",
    ),
    Fault(
        "app/fleet/engine_client.py",
        "            self._running.attempts.unavailable_after_s = unavailable_after_s\n",
        "            pass\n",
        _INGRESS,
        "unavailable_after_s needs a restart",
    ),
    Fault(
        "app/launch/haproxy.py",
        "here or known.get(name, [])",
        "here",
        ("app/launch/test_haproxy_servers.py",),
        "no ingress answers while Serve builds",
    ),
    Fault(
        "app/launch/haproxy.py",
        "    return known if known.pop(OWNER, None) == owner() else {}",
        "    return known",
        ("app/launch/test_haproxy_servers.py",),
        "HAProxy sends requests to the servers of another Serve",
    ),
]

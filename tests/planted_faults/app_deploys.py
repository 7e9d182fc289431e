"""Faults in deploys: checks, versions, room, and options that change live."""

from __future__ import annotations

from tests.planted_faults.fault import Fault

_VERSION = ("app/test_deployment_version.py",)
_CHECK = ("app/launch/test_model_check.py",)
_PLACEMENT = ("app/launch/test_placement.py",)
_CONFIG = ("app/test_config.py",)
_INGRESS = ("app/test_ingress_replica.py",)
_ENTRIES = ("app/test_model_entries.py",)
_CHOICE = ("app/api/test_several_models.py",)
_LAUNCHER = ("app/launch/test_launcher.py",)

DEPLOYS: list[Fault] = [
    Fault(
        "app/model_entries.py",
        "        if keys.count(key) > 1:\n",
        "        if False:\n",
        _ENTRIES,
        "of two models with one name in a file, one vanishes without a word",
    ),
    Fault(
        "app/launch/local_server.py",
        "    return dict(found) if isinstance(found, dict) else dict(zip(names, found, strict=True))\n",
        "    return dict(found) if isinstance(found, dict) else {}\n",
        _LAUNCHER,
        "where several models need keys, the launcher never sees that they serve, and ends the server",
    ),
    Fault(
        "app/config.py",
        '{"model": entry["name"], **own, "served_model_name": entry["name"]}',
        '{"model": entry["name"], **own}',
        _ENTRIES,
        "a model is called by its folder instead of its name",
    ),
    Fault(
        "app/config.py",
        "            tree[option.group].pop(name, None)\n",
        "            pass\n",
        _ENTRIES,
        "`auto` of one model does not undo an option of the application",
    ),
    Fault(
        "app/config.py",
        'lambda match: f"~{ord(match[0]):02x}"',
        'lambda match: "-"',
        _ENTRIES,
        "two models share a deployment",
    ),
    Fault(
        "app/config.py",
        "[model.options.fixed(deployment) for model in served_models(self)]",
        "self.service.models",
        _VERSION,
        "an engine's option of one model restarts the ingresses",
    ),
    Fault(
        "app/launch/placement.py",
        "    return replicas_on_a_node(model.options, nodes) + others\n",
        "    return replicas_on_a_node(model.options, nodes)\n",
        _PLACEMENT,
        "engines of several models each take all cores and all memory",
    ),
    Fault(
        "app/launch/placement.py",
        "cpus is None and (model.one_of_several or ",
        "cpus is None and (False or ",
        _PLACEMENT,
        "another model restarts the engines of all",
    ),
    Fault(
        "app/launch/preflight.py",
        "    left = available - each * most - beside.bytes\n",
        "    left = available - each * most\n",
        _LAUNCHER,
        "models are started that do not fit together",
    ),
    Fault(
        "app/launch/launcher.py",
        '        args["models"] = options.service.models\n',
        "        pass\n",
        _LAUNCHER,
        "replicas look for the file of models in a folder of their own",
    ),
    Fault(
        "app/api/api_server.py",
        "            raise model_not_found(wanted, usable)\n",
        "            raise model_not_found(wanted, self._names)\n",
        _CHOICE,
        "a client learns of models that are not for its key",
    ),
    Fault(
        "app/api/api_server.py",
        "        wanted = next(iter(usable), self._names[0]) if name is None else name\n",
        "        wanted = self._names[0] if name is None else name\n",
        _CHOICE,
        "a key for another than the first model must name it",
    ),
    Fault(
        "app/api/routes.py",
        "    setattr(request.state, CHOSEN, service.model)\n",
        "",
        _CHOICE,
        "refusals are counted for the first model",
    ),
    Fault(
        "app/ingress.py",
        "return_when=asyncio.FIRST_COMPLETED",
        "return_when=asyncio.ALL_COMPLETED",
        _INGRESS,
        "a model whose engines do not start keeps the ingress from serving the others",
    ),
    Fault(
        "app/ingress.py",
        "            if not model.one_of_several:\n",
        "            if True:\n",
        _INGRESS,
        "a model that cannot be loaded takes the others down",
    ),
    Fault(
        "app/ingress.py",
        "await asyncio.to_thread(ModelFolder.read, model.options.service.model)",
        "ModelFolder.read(model.options.service.model)",
        _INGRESS,
        "an ingress answers nobody while it reads a further model",
    ),
    Fault(
        "app/ingress_model.py",
        "        if not self.model.options.scaling.to_zero:\n",
        "        if True:\n",
        _INGRESS,
        "an ingress waits for engines that sleep",
        hangs=True,
    ),
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
        " or len(_usable(options, nodes)) == 1):",
        "):",
        _PLACEMENT,
        "on the only node another number of engines never gets its CPUs",
    ),
    Fault(
        "app/launch/placement.py",
        "            spare = min(spare, len(_usable(model.options, nodes)))\n",
        "            pass\n",
        _PLACEMENT,
        "a deploy starts more engines at once than there is memory for",
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
        '            if option.group == "service" and "engine" not in option.restarts\n',
        '            if name in self.service.model_fields_set and "engine" not in option.restarts\n',
        _CONFIG,
        "an option that was taken back keeps its value",
    ),
    Fault(
        "app/ingress.py",
        "            await self._first_answers()\n",
        "            pass\n",
        _INGRESS,
        "the old ingress leaves while the new one has no engine",
    ),
    Fault(
        "app/ingress.py",
        "            await self._first_answers()\n",
        "        await self._first_answers()\n",
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

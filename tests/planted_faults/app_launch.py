"""Faults in what a server has for itself on its host, and in how HAProxy runs."""

from __future__ import annotations

from tests.planted_faults.fault import Fault

_HAPROXY = ("app/launch/test_haproxy.py",)
_PORTS = ("app/launch/test_port_block.py",)
_INSTANCE = ("app/launch/test_instance.py",)
_STARTS = ("app/launch/test_model_starts.py",)
_LAUNCHER = ("app/launch/test_launcher.py",)

LAUNCH: list[Fault] = [
    Fault(
        "app/ingress.py",
        "            model.client.end_requests()\n",
        "            pass\n",
        ("app/test_ended_requests.py",),
        "streams that a server cuts when it stops look complete",
    ),
    Fault(
        "app/launch/local_server.py",
        "            telling.start()\n            telling.join(TOLD_WITHIN_S)\n",
        "",
        ("app/launch/test_launcher.py",),
        "Ctrl-C kills ingresses before they have told their clients",
    ),
    Fault(
        "app/launch/local_server.py",
        "        except Exception as error:  # Ray raises a bare one",
        "        except (RuntimeError, OSError) as error:  # Ray raises a bare one",
        _LAUNCHER,
        "a start of Ray that takes too long ends in a traceback",
    ),
    Fault(
        "app/launch/local_server.py",
        "if application is not None and application.deployments else None",
        "if application is not None else None",
        _LAUNCHER,
        "while Serve builds another application, the launcher says that all replicas have gone",
    ),
    Fault(
        "app/launch/haproxy.py",
        '        "x-serve-.*",\n',
        "",
        _HAPROXY,
        "a client steers Serve by its router headers",
    ),
    Fault(
        "app/launch/haproxy.py",
        "deny deny_status 503",
        "return status 404",
        _HAPROXY,
        "a client that asks while Serve starts is told that there is no such path",
    ),
    Fault(
        "app/launch/haproxy.py",
        'if re.search(r"^ *use_backend ", config, re.MULTILINE)',
        "if False",
        _HAPROXY,
        "paths of no application look like an outage",
    ),
    Fault(
        "app/launch/haproxy.py",
        "[] if THREADS in environment else ",
        "",
        _HAPROXY,
        "the operator's number of HAProxy's threads is overruled",
    ),
    Fault(
        "app/launch/instance.py",
        "            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)",
        "            pass",
        _INSTANCE,
        "the folder of a running server is removed",
    ),
    Fault(
        "app/launch/haproxy.py",
        "-m beg text/event-stream }",
        "-m beg text/plain }",
        _HAPROXY,
        "after a stream during a deploy the client's next request is refused",
    ),
    Fault(
        "app/launch/haproxy.py",
        '        (r"^( *server \\S+ \\S+ check backup)$", r"\\1 disabled"),\n',
        "",
        _HAPROXY,
        "without an ingress another server answers",
    ),
    Fault(
        "app/launch/haproxy.py",
        "    if TABLE in config:\n        return config\n",
        "",
        _HAPROXY,
        "a configuration that was changed before is changed again",
    ),
    Fault(
        "app/launch/haproxy.py",
        "signal.SIGUSR1)",
        "signal.SIGKILL)",
        _HAPROXY,
        "running answers are cut when the proxy actor ends",
    ),
    Fault(
        "app/launch/haproxy.py",
        "    die_with_parent()\n    binary",
        "    binary",
        _HAPROXY,
        "HAProxy outlives its server and keeps the port",
    ),
    Fault(
        "app/launch/haproxy.py",
        "(files - OTHER_FILES) // 2)",
        "files - OTHER_FILES)",
        _HAPROXY,
        "HAProxy asks for more files than it may open, and does not start",
    ),
    Fault(
        "app/launch/haproxy.py",
        "    os.environ.pop(BINARY, None)  # it names this\n",
        "",
        _HAPROXY,
        "the wrapper runs itself without end",
    ),
    Fault(
        "app/launch/port_block.py",
        "            self._reservation = reservation\n",
        "            reservation.close()\n            self._reservation = reservation\n",
        _PORTS,
        "two servers draw the same ports",
    ),
    Fault(
        "app/launch/port_block.py",
        "                    continue  # of some other program",
        "                    pass",
        _PORTS,
        "a port is handed out that another program uses",
    ),
    Fault(
        "app/launch/instance.py",
        '            "RAY_SERVE_FALLBACK_PROXY_HTTP_PORT": str(self.ports.take()),\n',
        "",
        _INSTANCE,
        "two clusters share the port of Serve's fallback",
    ),
    Fault(
        "app/launch/instance.py",
        "            for name in os.environ.keys() - before.keys():\n                del os.environ[name]\n",
        "",
        _INSTANCE,
        "what Serve needs stays in the environment of the process that started Ray",
    ),
    Fault(
        "app/launch/ray_processes.py",
        "            setattr(Node, name, method)",
        "            pass",
        ("app/launch/test_ray_processes.py",),
        "a Ray that starts later lacks processes",
    ),
    Fault(
        "app/launch/ray_processes.py",
        "node._ray_params.dashboard_agent_listen_port = 0",
        "pass",
        ("app/launch/test_ray_processes.py",),
        "a start beside another Ray waits seconds for its port",
    ),
    Fault(
        "app/launch/ray_processes.py",
        "return controller, []",
        "return controller, proxies",
        ("app/launch/test_ray_processes.py",),
        "engines do not load until Serve's proxies have started",
    ),
    Fault(
        "app/launch/model_starts.py",
        "            self._retries[model.name].current_from = now + SETTLE_S\n",
        "",
        _STARTS,
        "a new try of a model is given up for the failure of the one before",
    ),
    Fault(
        "app/launch/model_starts.py",
        "        one.pause_s = min(2 * one.pause_s, MAX_RETRY_S)\n",
        "",
        _STARTS,
        "a model that cannot start is tried every minute for ever",
    ),
    Fault(
        "app/launch/model_starts.py",
        "(later and now - self._first < LATER_S)",
        "later",
        _STARTS,
        "a model that takes long to start keeps the launcher from saying that others serve",
    ),
    Fault(
        "app/launch/local_server.py",
        " or deployed.source == APIType.DECLARATIVE",
        "",
        _LAUNCHER,
        "a retry of a model undoes what `serve deploy` has deployed since",
    ),
    Fault(
        "app/launch/local_server.py",
        "answered, self._proxies = ray.wait",
        "answered, _ = [], ray.wait",
        _LAUNCHER,
        "a proxy that does not start is waited for until the start's time is over",
    ),
    Fault(
        "app/launch/local_server.py",
        'health if health.get("instance") == self._instance.name else {}',
        "health",
        _LAUNCHER,
        "another server's answer makes this one seem ready",
    ),
]

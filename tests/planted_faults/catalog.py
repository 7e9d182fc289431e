"""All planted faults."""

from __future__ import annotations

from tests.planted_faults.app_api import API
from tests.planted_faults.app_api_tools import TOOLS
from tests.planted_faults.app_autoscaling import AUTOSCALING
from tests.planted_faults.app_channel import CHANNEL
from tests.planted_faults.app_deploys import DEPLOYS
from tests.planted_faults.app_fleet import FLEET
from tests.planted_faults.app_launch import LAUNCH
from tests.planted_faults.app_metrics import METRICS
from tests.planted_faults.app_routing import ROUTING
from tests.planted_faults.engine_execution import EXECUTION
from tests.planted_faults.engine_kv import KV
from tests.planted_faults.engine_scheduling import SCHEDULING
from tests.planted_faults.engine_structured import STRUCTURED
from tests.planted_faults.fault import Fault

FAULTS: list[Fault] = [
    *KV,
    *SCHEDULING,
    *EXECUTION,
    *STRUCTURED,
    *API,
    *TOOLS,
    *CHANNEL,
    *ROUTING,
    *FLEET,
    *AUTOSCALING,
    *LAUNCH,
    *DEPLOYS,
    *METRICS,
]

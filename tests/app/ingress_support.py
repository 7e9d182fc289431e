"""An ingress replica for one model, without Serve."""

from __future__ import annotations

from typing import Any

from app.config import AppConfig, served_models
from app.ingress import IngressReplica
from app.ingress_model import IngressModel


def ingress_for(options: AppConfig, *engines: Any) -> IngressReplica:
    """An ingress whose models have the ``engines``, Serve handles, in their order."""
    models = served_models(options)
    return IngressReplica(options, {model.name: engine for model, engine in zip(models, engines, strict=True)})


def only_model(ingress: IngressReplica) -> IngressModel:
    """That of an ingress with one model."""
    (model,) = ingress._models.values()
    return model

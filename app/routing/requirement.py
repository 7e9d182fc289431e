"""What a replica offers, and what a request requires: replicas may differ."""

from __future__ import annotations

from dataclasses import dataclass, field

from engine.errors import InvalidRequestError
from engine.models.identity import ModelIdentity
from engine.request import ModelLimits, check_size
from engine.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True)
class ReplicaProfile:
    """What one replica said about itself when its channel opened."""

    limits: ModelLimits
    model: ModelIdentity = field(default_factory=ModelIdentity)


@dataclass(frozen=True, slots=True)
class Build:
    """What a replica is made of, and since when, in seconds since the epoch.

    ``version`` is that of its deployment (see ``app/deployment_version.py``). While a redeploy rolls, replicas
    of the version of the last one that started stay, and all others go.
    """

    version: str = ""
    started_at: float = 0.0


UNKNOWN_BUILD = Build()


@dataclass(frozen=True, slots=True)
class Requirement:
    """What a request requires of its next replica.

    ``prompt`` is the client's, in tokens. ``model`` has generated the output so far, which no other may
    continue; ``None`` before the first token. ``alone``: not where another request runs that must be alone.
    """

    prompt: int
    params: SamplingParams
    model: ModelIdentity | None = None
    alone: bool = False

    def met_by(self, profile: ReplicaProfile | None) -> bool:
        """Whether a replica could run it when idle; true if the replica's profile is unknown."""
        return profile is None or (self.same_model(profile) and self.fits(profile.limits))

    def same_model(self, profile: ReplicaProfile) -> bool:
        """Whether the replica may continue the output; releases of Quire may differ."""
        own, other = self.model, profile.model
        return own is None or (own.revision, own.dtype, own.tokenizer) == (
            other.revision,
            other.dtype,
            other.tokenizer,
        )

    def fits(self, limits: ModelLimits) -> bool:
        """Whether its longest sequence fits the context and the pool."""
        try:
            check_size(self.prompt, self.params, limits)
        except InvalidRequestError:
            return False
        return True

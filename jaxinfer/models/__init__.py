"""One configurable decoder, and the model families as data over it."""

from jaxinfer.models.config import DecoderConfig, RopeConfig
from jaxinfer.models.decoder import Decoder, abstract_params, init_params
from jaxinfer.models.families import FAMILIES, Family, family_of
from jaxinfer.models.layer_config import MLAConfig, MoEConfig
from jaxinfer.models.tensors import ModelError, assemble_params

__all__ = [
    "FAMILIES",
    "Decoder",
    "DecoderConfig",
    "Family",
    "MLAConfig",
    "MoEConfig",
    "ModelError",
    "RopeConfig",
    "abstract_params",
    "assemble_params",
    "family_of",
    "init_params",
]

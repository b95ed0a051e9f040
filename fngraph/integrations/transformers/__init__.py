"""Hugging Face models as they are, causal LMs and vision towers, with graphs around them."""

from fngraph.integrations.transformers.model import (
    GraphifiedModel as GraphifiedModel,
    LayerSupport as LayerSupport,
    ModelSupport as ModelSupport,
    Served as Served,
    graphify_model as graphify_model,
)
from fngraph.integrations.transformers.vision import (
    pictures as pictures,
    vision_encoder as vision_encoder,
)

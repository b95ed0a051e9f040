"""Hugging Face models as they are, causal LMs, vision towers and both, with graphs around them."""

from fngraph.integrations.transformers.model import (
    GraphifiedModel as GraphifiedModel,
    Served as Served,
    graphify_model as graphify_model,
)
from fngraph.integrations.transformers.support import (
    LayerSupport as LayerSupport,
    ModelSupport as ModelSupport,
)
from fngraph.integrations.transformers.vision import (
    Picture as Picture,
    pictures as pictures,
    vision_encoder as vision_encoder,
)

"""Hugging Face causal LMs as they are: attention over a paged cache, graphs around it."""

from fngraph.integrations.transformers.model import (
    GraphifiedModel as GraphifiedModel,
    LayerSupport as LayerSupport,
    ModelSupport as ModelSupport,
    Served as Served,
    graphify_model as graphify_model,
)

"""Encoders: items (images, videos) packed into the token budgets that graphs were captured for.

    items --measure--> Measured --balance--> this rank's --pack--> runs --collate--> batches
          --step--> rows by item --postprocess--> outputs --gather--> all, in the caller's order

| file            | what it holds |
|-----------------|---------------|
| `model.py`      | `EncoderModel`: what an encoder is, as pure functions |
| `planning.py`   | the plan of a model's graphs, and of the runs of some items |
| `run.py`        | `encode`: runs of a plan on captured steps, each on the key that was planned |
| `statistics.py` | `EncoderStats`: what items ran as |
| `ranks.py`      | items over ranks, and their rows gathered |
| `graphs.py`     | `graphify_encoder`: all of it, as one callable |
"""

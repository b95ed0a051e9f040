"""Words only: from the recorded cases of vLLM 0.33 to `fngraph.core`, and back.

`answer(section, given)` says what fngraph answers, in the words of the case files. It renames
fields and spells out defaults; every rule that decides something is a function of core.
"""

from __future__ import annotations

from fngraph import core
from fngraph.core import BatchSpec, Limits, Mode
from fngraph.errors import FnGraphError


def answer(section: str, given):
    """What fngraph says to one recorded input of `section`."""
    try:
        return SECTIONS[section](given)
    except FnGraphError:
        return {"error": "ValueError"}


# --- configurations ---------------------------------------------------------------------------


def _limits(config: dict) -> Limits:
    return Limits(config.get("max_num_batched_tokens", 8192), config.get("max_num_seqs", 256))


def _query_len(config: dict) -> int:
    return 1 + config.get("num_speculative_tokens", 0)


def _sizes(config: dict) -> tuple[int, ...]:
    if "capture_sizes" in config:
        return core.check_sizes(config["capture_sizes"], _limits(config))
    query_lens = (_query_len(config),)
    return core.default_sizes(_limits(config), query_lens, top=config.get("max_capture_size"))


def _cut(config: dict) -> str:
    """The build options that say whether graphs can be cut at attention."""
    if config.get("breakable"):
        return "yes"
    if config.get("compile_mode", "VLLM_COMPILE") != "VLLM_COMPILE":
        return "no"
    if config.get("v2") and not config.get("piecewise_available", True):
        return "no"
    attention = config.get("splitting", "attention") == "attention"
    return "yes" if attention or config.get("inductor_partition") else "declined"


def _resolve(config: dict, second: bool) -> core.Resolution:
    """`second`: as the second of the reference's two runners does."""
    stock = config.get("compile_mode") == "STOCK_TORCH_COMPILE"
    return core.resolve(
        config.get("mode", "FULL_AND_PIECEWISE"),
        core.Support[config.get("attn_support", "ALWAYS")],
        _cut(config),
        (_query_len(config),),
        limits=_limits(config),
        sizes=_sizes(config),
        align="uniform" if second else "all",
        beyond="drop",
        eager=config.get("enforce_eager", False) or (second and stock),
        pooling=config.get("pooling", False),
        encoder_decoder=config.get("encoder_decoder", False),
        layerwise=config.get("kv_layerwise", False),
        state_blocks=config.get("mamba_blocks"),
    )


def _table(config: dict, second: bool) -> core.DispatchTable:
    found = _resolve(config, second)
    lora, specialized = config.get("lora") or {}, config.get("specialize_lora", True)
    counts = core.adapter_counts(
        lora.get("max_loras", 0),
        powers=specialized and lora.get("specialize_active_lora", False),
        without=second or specialized,
    )
    overflow = "clamp" if second else "eager"
    return core.build_table(found.modes, found.sizes, _limits(config), counts, overflow=overflow)


def sizes(config):
    found = _sizes(config)
    return {"sizes": list(found), "max": found[-1]}


def resolution(config):
    found = _resolve(config, config.get("v2", False))
    if found.modes is Mode.NONE:
        return {"mode": "NONE"}
    mixed = found.sizes.mixed
    return {"mode": str(found.modes), "num_sizes": len(mixed), "max": mixed[-1]}


# --- the first dispatcher -----------------------------------------------------------------------


def v1_keys(config):
    table = _table(config, second=False)
    keys = {
        str(mode): [[k.num_tokens, k.num_reqs, k.query_len is not None, k.adapters] for k in found]
        for mode in (Mode.PIECEWISE, Mode.FULL)
        if (found := table.keys(mode))
    }
    return keys


def v1_dispatch(given):
    config, spec = given["config"], given["spec"]
    tokens, query_len = spec["num_tokens"], _query_len(config)
    counts = (tokens // query_len, query_len) if spec["uniform_decode"] else (1, None)
    allowed = set(spec.get("valid_modes") or ("NONE", "PIECEWISE", "FULL"))
    allowed -= set(spec.get("invalid_modes", ()))
    batch = BatchSpec(tokens, *counts, adapters=spec.get("num_active_loras", 0))
    mode, key, _ = core.dispatch(_table(config, second=False), batch, allowed)
    said = key if mode is not Mode.NONE else core.BatchDescriptor(tokens)  # NONE says no more
    return [
        str(mode),
        {
            "num_tokens": said.num_tokens,
            "num_reqs": said.num_reqs,
            "uniform": said.query_len is not None,
            "has_lora": said.adapters > 0,
            "num_active_loras": said.adapters,
        },
    ]


def dp_v1(given):
    _, padded, modes = given
    asked = [core.Proposal(Mode.parse(mode), tokens) for mode, tokens in zip(modes, padded)]
    decisions = core.agree(asked)
    return [str(decisions[0].mode), [decision.num_tokens for decision in decisions], False]


# --- the second dispatcher ----------------------------------------------------------------------


def v2_keys(config):
    table = _table(config, second=True)
    keys = {
        str(mode): [[k.num_tokens, k.num_reqs, k.query_len, k.adapters] for k in found]
        for mode in (Mode.FULL, Mode.PIECEWISE)
        if (found := table.keys(mode))
    }
    return {mode: sorted(found, key=lambda k: (-k[0], k[3])) for mode, found in keys.items()}


def _v2_spec(spec) -> BatchSpec:
    counts = spec["num_tokens"], spec["num_reqs"], spec["uniform_token_count"]
    return BatchSpec(*counts, adapters=spec.get("num_active_loras", 0))


def _v2_descriptor(table, spec, ran):
    mode, key, _ = ran
    return {
        "cg_mode": str(mode),
        "num_tokens": key.num_tokens,
        "num_reqs": key.num_reqs,
        "uniform_token_count": key.query_len if mode is not Mode.NONE else None,
        "max_query_len": None,
        "num_active_loras": table.adapters.round(spec.adapters),
        "num_ubatches": 1,
    }


def v2_dispatch(given):
    table, spec = _table(given["config"], second=True), _v2_spec(given["spec"])
    return _v2_descriptor(table, spec, core.dispatch(table, spec))


def dp_v2(given):
    config, batches = given
    table, specs = _table(config, second=True), [_v2_spec(spec) for spec in batches]
    decisions = core.agree([core.propose(table, spec) for spec in specs])
    ran = [core.settle(table, spec, decision) for spec, decision in zip(specs, decisions)]
    across = {"tokens_across_dp": [one.descriptor.num_tokens for one in ran]}
    return [_v2_descriptor(table, spec, one) | across for spec, one in zip(specs, ran)]


# --- encoders -----------------------------------------------------------------------------------


def _encoder(config) -> core.EncoderPlan:
    words = {"min_token_budget": "min_budget", "allow_zero_tokens": "allow_zero"}
    paths = {
        name: core.Path(**{words[word]: value for word, value in path.items()})
        for name, path in config.get("paths", {}).items()
    }
    options = {word: config.get(word) for word in ("budgets", "max_items")}
    return core.plan_encoder(*config["range"], **options, paths=paths or None)


def encoder_init(config):
    plan = _encoder(config)
    return {
        "budgets": list(plan.budgets),
        "path_budgets": {path: list(budgets) for path, budgets in plan.path_budgets.items()},
        "max_items": plan.max_items,
        "max_frames": plan.max_frames,
        "num_graphs": plan.num_graphs,
    }


def encoder_pack(given):
    packed = core.pack(given["items"], _encoder(given["cfg"]))
    runs = [{"path": r.path, "items": list(r.items), "budget": r.budget} for r in packed.runs]
    hits = sum(len(r.items) for r in packed.runs if r.budget)  # those without tokens were some too
    return {"runs": runs, "hits": hits, "misses": packed.misses}


SECTIONS = {
    "sizes": sizes,
    "resolve": resolution,
    "v1_keys": v1_keys,
    "v1_dispatch": v1_dispatch,
    "dp_v1": dp_v1,
    "v2_keys": v2_keys,
    "v2_dispatch": v2_dispatch,
    "dp_v2": dp_v2,
    "budgets": lambda given: list(core.token_budgets(*given)),
    "fit": lambda given: core.fit(*given),
    "encoder_init": encoder_init,
    "encoder_pack": encoder_pack,
    "load_balance": lambda given: [list(part) for part in core.balance(*given)],
}

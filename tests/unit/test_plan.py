import io
import json
from dataclasses import replace
from typing import Any

import pytest
from rich.console import Console

from swiftfp8.config.schema import OptimConfig
from swiftfp8.errors import SwiftFP8Error, SwiftFP8Errors
from swiftfp8.hardware import Hardware, parse_hardware
from swiftfp8.models.meta import LinearMeta
from swiftfp8.plan import FP8_RECIPES, LayerPlan, Plan
from swiftfp8.report.plan_table import group_layers, plan_to_json, precision_report, print_plan
from tests.plan_kit import decoder_meta, map_linears, plan_for, qwen_7b, qwen_half_b, resize

pytestmark = pytest.mark.usefixtures("te_alone")
NATIVE_BF16 = {"bf16": "this CPU has no native BF16"}


def cpu(unavailable: dict[str, str] | None = None) -> Hardware:
    reason = "there is no NVIDIA GPU; FP8 matmuls need compute capability 8.9 or newer"
    reasons = dict.fromkeys(FP8_RECIPES, reason) | {"fp16": "FP16 on a CPU is slow"}
    return Hardware(
        name="CPU", device="cpu", sm=None, memory_gib=16, unavailable=reasons | (unavailable or {})
    )


def without_te(name: str = "h200") -> Hardware:
    reason = "Transformer Engine is not installed"
    return replace(
        parse_hardware(name),
        te_unavailable=dict.fromkeys(FP8_RECIPES, reason),
        te_version=None,
        te_reason=reason,
        cuda_version="12.8",
        probed=True,
    )


def layer(plan: Plan, name: str) -> LayerPlan:
    return next(found for found in plan.layers if found.name == name)


def fp8_names(plan: Plan) -> set[str]:
    return {found.name for found in plan.layers if found.precision in FP8_RECIPES}


# --- the ladder ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("hardware", "recipe", "compute", "reason"),
    [
        ("a100", None, "bf16", "compute capability 8.0; FP8 matmuls need 8.9 or newer"),
        ("v100", None, "fp16", "BF16 needs 8.0 or newer"),
        ("t4", None, "fp16", "FP8 matmuls need 8.9 or newer"),
        ("rtx4090", "fp8_current", "bf16", None),
        ("l40s", "fp8_current", "bf16", None),
        ("h100", "fp8_current", "bf16", None),
        ("h200", "fp8_current", "bf16", None),
        ("b200", "mxfp8", "bf16", None),
        ("rtx5090", "fp8_current", "bf16", None),
        ("mygpu:8.6:24", None, "bf16", "mygpu has compute capability 8.6"),
    ],
)
def test_fp8_asked_everywhere(
    hardware: str, recipe: str | None, compute: str, reason: str | None
) -> None:
    plan = plan_for(hardware)
    assert (plan.recipe.recipe if plan.recipe else None) == recipe
    assert plan.compute_dtype == compute
    assert plan.loss_scaler == (compute == "fp16")
    if recipe is None:
        (fallback,) = plan.fallbacks
        assert (fallback.asked, fallback.given) == ("fp8", compute)
        assert reason and reason in fallback.reason
        assert plan.backend is None and fp8_names(plan) == set()
        assert plan.coverage == 0 and plan.fp8_token_multiple == 1
    else:
        assert plan.fallbacks == ()
        assert plan.backend == "te"
        assert len(fp8_names(plan)) == 24 * 7  # all but the head


@pytest.mark.parametrize("hardware", ["a100", "v100"])
def test_strict_makes_the_fallback_an_error(hardware: str) -> None:
    with pytest.raises(SwiftFP8Error) as caught:
        plan_for(hardware, precision={"strict": True})
    assert "FP8 matmuls need 8.9 or newer" in str(caught.value)
    assert "precision.strict" in str(caught.value)
    assert "dtype=" in str(caught.value)


@pytest.mark.parametrize("hardware", ["rtx4090", "h200", "b200"])
def test_strict_is_content_where_fp8_is_given(hardware: str) -> None:
    assert plan_for(hardware, precision={"strict": True}).recipe is not None


@pytest.mark.parametrize(
    ("hardware", "asked", "given"),
    [
        ("rtx4090", "fp8_block", "fp8_current"),
        ("h200", "mxfp8", "fp8_block"),
        ("b200", "fp8_block", "mxfp8"),
        ("rtx5090", "mxfp8", "fp8_current"),
    ],
)
def test_a_recipe_that_is_not_there_gives_the_next_rung(
    hardware: str, asked: str, given: str
) -> None:
    plan = plan_for(hardware, qwen_7b(), precision={"recipe": asked})
    assert plan.recipe is not None and plan.recipe.recipe == given
    (fallback,) = plan.fallbacks
    assert (fallback.asked, fallback.given) == (asked, given)
    with pytest.raises(SwiftFP8Error, match=f"{asked} can't be had"):
        plan_for(hardware, qwen_7b(), precision={"recipe": asked, "strict": True})


@pytest.mark.parametrize("recipe", ["fp8_block", "fp8_current", "fp8_delayed"])
def test_a_recipe_that_is_there_is_given(recipe: str) -> None:
    plan = plan_for("h200", precision={"recipe": recipe})
    assert plan.recipe is not None and plan.recipe.recipe == recipe
    assert plan.fallbacks == ()
    assert plan.fp8_token_multiple == (128 if recipe == "fp8_block" else 16)


def test_auto_says_why_it_stopped_where_it_did() -> None:
    assert any("auto took fp8_current" in note for note in plan_for("h200").notes)
    assert any("auto took mxfp8" in note for note in plan_for("b200").notes)


def test_missing_transformer_engine_is_a_reason_with_a_remedy() -> None:
    plan = plan_for(without_te())
    assert plan.compute_dtype == "bf16" and plan.recipe is None
    assert "Transformer Engine is not installed" in plan.fallbacks[0].reason
    with pytest.raises(SwiftFP8Error) as caught:
        plan_for(without_te(), precision={"strict": True})
    assert "swiftfp8[te-cu12]" in str(caught.value)


@pytest.mark.parametrize(
    ("hardware", "asked", "given"),
    [
        ("v100", "bf16", "fp16"),
        ("v100", "fp16", "fp16"),
        ("h200", "fp16", "fp16"),
        ("h200", "bf16", "bf16"),
        ("a100", "fp32", "fp32"),
    ],
)
def test_high_precision_asked(hardware: str, asked: str, given: str) -> None:
    plan = plan_for(hardware, dtype=asked)
    assert plan.compute_dtype == given
    assert plan.loss_scaler == (given == "fp16")
    assert [(f.asked, f.given) for f in plan.fallbacks] == (
        [] if asked == given else [(asked, given)]
    )
    assert {found.precision for found in plan.layers} == {given}


@pytest.mark.parametrize(
    ("reasons", "asked", "given"),
    [
        ({}, "fp8", "bf16"),
        (NATIVE_BF16, "fp8", "fp32"),
        ({}, "bf16", "bf16"),
        (NATIVE_BF16, "bf16", "fp32"),
        ({}, "fp16", "bf16"),
        (NATIVE_BF16, "fp16", "fp32"),
        ({}, "fp32", "fp32"),
    ],
)
def test_a_cpu_computes_in_bf16_only_where_it_is_native(
    reasons: dict[str, str], asked: str, given: str
) -> None:
    plan = plan_for(cpu(reasons), dtype=asked)
    assert (plan.compute_dtype, plan.device, plan.loss_scaler) == (given, "cpu", False)
    if asked != given:
        assert all(reason in plan.fallbacks[0].reason for reason in reasons.values())


# --- emulation ----------------------------------------------------------------------------------


@pytest.mark.parametrize("hardware", [cpu(), cpu(NATIVE_BF16), "a100", "v100", without_te()])
def test_emulate_gives_fp8_numerics_where_there_is_no_fp8(hardware: str | Hardware) -> None:
    plan = plan_for(hardware, precision={"emulate": True, "strict": True})
    assert plan.backend == "emulated"
    assert plan.recipe is not None and plan.recipe.recipe == "fp8_current"
    assert len(fp8_names(plan)) == 24 * 7 and plan.fallbacks == ()
    assert any("emulated" in note for note in plan.notes)


@pytest.mark.parametrize("recipe", FP8_RECIPES)
def test_the_emulated_backend_runs_any_recipe(recipe: str) -> None:
    plan = plan_for(cpu(), precision={"backend": "emulated", "recipe": recipe})
    assert plan.backend == "emulated"
    assert plan.recipe is not None and plan.recipe.recipe == recipe


def test_emulate_leaves_real_fp8_alone() -> None:
    assert plan_for("h200", precision={"emulate": True}).backend == "te"
    assert plan_for("h200", precision={"backend": "emulated"}).backend == "emulated"


def test_the_torch_backend_needs_no_transformer_engine() -> None:
    plan = plan_for(without_te(), qwen_7b(), precision={"backend": "torch"})
    assert plan.backend == "torch"
    assert plan.recipe is not None and plan.recipe.recipe == "fp8_current"
    assert not plan.fallbacks
    assert any("each token and each output channel" in note for note in plan.notes)


def test_only_tested_forms_run_swiglu_as_one_function() -> None:
    """Others are compiled as they are, and keep the product of gate and up for the way back."""
    options = {"tuner": "full", "precision": {"backend": "torch"}}
    known = plan_for("h200", qwen_7b(), **options)
    other = plan_for("h200", replace(qwen_7b(), architecture="SeedOssForCausalLM"), **options)
    assert known.fusion.compiled and known.fusion.swiglu
    assert other.fusion.compiled and not other.fusion.swiglu
    assert other.memory.activations > known.memory.activations


@pytest.mark.parametrize(
    ("change", "options", "fused", "why"),
    [
        ({}, {}, 28, None),
        ({}, {"lora_dropout": 0.1}, 0, "LoRA has dropout"),
        ({}, {"tuner": "full"}, 0, "tuner=full"),
        ({"unfused_layers": "its norms have another form"}, {}, 0, "norms have another form"),
        ({"architecture": "GraniteForCausalLM"}, {}, 0, "not among the architectures"),
        ({}, {"precision": {"exclude": ["layers.3.mlp.up_proj"]}}, 27, "precision.exclude="),
    ],
)
def test_the_plan_says_which_layers_are_fused(
    change: dict[str, str], options: dict[str, Any], fused: int, why: str | None
) -> None:
    precision = {"backend": "torch", **options.pop("precision", {})}
    plan = plan_for("h200", replace(qwen_7b(), **change), precision=precision, **options)
    assert (plan.fusion.layers, plan.fusion.total) == (fused, 28)
    assert why is None if plan.fusion.reason is None else why and why in plan.fusion.reason
    assert f"{fused} of 28 fused" in " ".join(printed(plan).split())
    assert "fused into" not in printed(plan_for("h200"))
    assert plan.fusion.compiled == plan.fusion.swiglu == (options.get("tuner") == "full")
    assert any("are compiled" in note for note in plan.notes) == plan.fusion.compiled
    assert plan.fusion.graphs == (fused > 0)


def test_graphs_and_compilation_can_be_switched_off() -> None:
    precision, off = {"backend": "torch"}, {"cuda_graphs": False, "compile": False}
    assert not plan_for("h200", qwen_7b(), precision=precision, train=off).fusion.graphs
    full = plan_for("h200", qwen_7b(), precision=precision, train=off, tuner="full")
    assert not full.fusion.compiled


def test_the_torch_backend_names_the_recipe_that_it_lacks() -> None:
    plan = plan_for("h200", qwen_7b(), precision={"backend": "torch", "recipe": "fp8_block"})
    assert plan.recipe is not None and plan.recipe.recipe == "fp8_current"
    assert "torch backend runs fp8_current only" in plan.fallbacks[0].reason


def test_the_torch_backend_without_triton_falls_back_with_the_reason() -> None:
    hardware = replace(parse_hardware("h200"), torch_reason="Triton is not installed")
    plan = plan_for(hardware, qwen_7b(), precision={"backend": "torch"})
    assert plan.backend is None and plan.compute_dtype == "bf16"
    assert "Triton is not installed" in plan.fallbacks[0].reason


def test_backend_te_that_is_not_installed() -> None:
    wanted = {"backend": "te"}
    assert plan_for(without_te(), precision=wanted).fallbacks[0].given == "bf16"
    emulated = plan_for(without_te(), precision=wanted | {"emulate": True})
    assert (emulated.backend, emulated.fallbacks[0].asked) == ("emulated", "backend te")
    with pytest.raises(SwiftFP8Error, match="not installed"):
        plan_for(without_te(), precision=wanted | {"strict": True})


# --- layers -------------------------------------------------------------------------------------


def test_head_router_and_family_patterns_stay_high() -> None:
    meta = decoder_meta(
        hidden=128,
        intermediate=256,
        layers=2,
        heads=4,
        kv_heads=4,
        vocab=512,
        tied=False,
        keep_high={"*.o_proj": "its input has outliers"},
    )
    router = LinearMeta(
        name="model.layers.1.mlp.gate",
        in_features=128,
        out_features=16,
        bias=False,
        kind="router",
        layer=1,
    )
    meta = replace(meta, linears=(*meta.linears, router))
    plan = plan_for("h200", meta)
    assert layer(plan, "lm_head").precision == "bf16"
    assert "head" in layer(plan, "lm_head").reason
    assert layer(plan, router.name).precision == "bf16"
    assert not layer(plan, router.name).lora and not layer(plan, "lm_head").lora
    assert layer(plan, "model.layers.0.self_attn.o_proj").reason == "its input has outliers"
    assert len(fp8_names(plan)) == 2 * 6


@pytest.mark.parametrize(
    ("recipe", "hardware", "size", "multiple"),
    [
        ("fp8_current", "h200", 1000, 16),
        ("fp8_delayed", "h200", 1000, 16),
        ("fp8_block", "h200", 4880, 128),
        ("mxfp8", "b200", 4880, 32),
    ],
)
def test_an_odd_shape_stays_high_and_its_siblings_do_not(
    recipe: str, hardware: str, size: int, multiple: int
) -> None:
    odd = "model.layers.5.mlp.up_proj"
    meta = resize(qwen_half_b(), odd, out_features=size)
    plan = plan_for(hardware, meta, precision={"recipe": recipe})
    assert layer(plan, odd).precision == "bf16"
    assert f"out_features {size} is no multiple of {multiple}" in layer(plan, odd).reason
    assert layer(plan, odd).lora
    assert len(fp8_names(plan)) == 24 * 7 - 1


@pytest.mark.parametrize(
    ("pattern", "count"),
    [
        ("down_proj", 24),
        ("mlp.down_proj", 24),
        ("model.layers.0.*", 7),
        ("layers.3.self_attn.q_proj", 1),
        ("*.self_attn.?_proj", 24 * 4),
    ],
)
def test_exclude_takes_globs_and_dotted_suffixes(pattern: str, count: int) -> None:
    plan = plan_for("h200", precision={"exclude": [pattern]})
    kept = [found for found in plan.layers if found.reason == f"precision.exclude={pattern}"]
    assert len(kept) == count
    assert {found.precision for found in kept} == {"bf16"}
    assert len(fp8_names(plan)) == 24 * 7 - count


@pytest.mark.parametrize(
    ("pattern", "hint"),
    [("down_prj", "did you mean down_proj?"), ("self_attn", "did you mean self_attn.*?")],
)
def test_an_exclude_that_matches_nothing_is_an_error(pattern: str, hint: str) -> None:
    with pytest.raises(SwiftFP8Error, match="matches no linear") as caught:
        plan_for("a100", precision={"exclude": [pattern]})
    assert hint in str(caught.value)


def test_first_and_last_layers() -> None:
    plan = plan_for("h200", precision={"first_layers_bf16": 1, "last_layers_bf16": 2})
    kept = {n.name.split(".")[2] for n in plan.layers if "layers_bf16" in n.reason}
    assert kept == {"0", "22", "23"}
    assert len(fp8_names(plan)) == 21 * 7


def test_fp8_that_no_layer_takes_is_a_fallback() -> None:
    wanted = {"first_layers_bf16": 24}
    plan = plan_for("h200", precision=wanted)
    assert plan.recipe is None and plan.backend is None
    assert "no linear takes FP8" in plan.fallbacks[0].reason
    with pytest.raises(SwiftFP8Error, match="no linear takes FP8"):
        plan_for("h200", precision=wanted | {"strict": True})


# --- coverage -----------------------------------------------------------------------------------


def test_coverage_is_the_share_of_flops() -> None:
    plan = plan_for("h200")
    decoder = 24 * (2 * 896 * 896 + 2 * 896 * 128 + 3 * 896 * 4864)
    assert plan.coverage == pytest.approx(decoder / (decoder + 896 * 151936))
    assert plan.decoder_coverage == 1.0
    assert plan_for("h200", qwen_7b()).coverage > 0.91


def test_min_coverage_names_what_costs_it() -> None:
    wanted = {"min_coverage": 0.9, "exclude": ["up_proj"]}
    with pytest.raises(SwiftFP8Error) as caught:
        plan_for("h200", precision=wanted)
    text = str(caught.value)
    assert "less than 90.0%" in text
    assert "lm_head 27.6% (output head" in text and "up_proj 21.2% (precision.exclude" in text
    assert plan_for("h200", precision={"min_coverage": 0.7}).min_coverage == 0.7


def test_min_coverage_without_fp8() -> None:
    with pytest.raises(SwiftFP8Error, match=r"FP8 matmuls need 8\.9"):
        plan_for("a100", precision={"min_coverage": 0.5})
    asked_high = plan_for("a100", dtype="bf16", precision={"min_coverage": 0.5})
    assert (asked_high.coverage, asked_high.min_coverage) == (0, 0)  # else the run would fail


# --- tuning -------------------------------------------------------------------------------------


def test_all_linear_is_every_linear_but_the_head() -> None:
    plan = plan_for("h200", lora_rank=4, lora_alpha=8, use_rslora=True)
    assert plan.lora is not None
    assert len(plan.lora.targets) == 24 * 7 and "lm_head" not in plan.lora.targets
    assert (plan.lora.rank, plan.lora.alpha, plan.lora.use_rslora) == (4, 8, True)
    assert not any(found.trainable for found in plan.layers)


def test_targets_by_last_name() -> None:
    plan = plan_for("h200", target_modules=["q_proj", "v_proj"])
    assert plan.lora is not None and len(plan.lora.targets) == 48
    assert not layer(plan, "model.layers.0.mlp.up_proj").lora


def test_a_target_that_is_no_whole_name_part_is_unknown() -> None:
    with pytest.raises(SwiftFP8Error, match="unknown target module 'q_prj'") as caught:
        plan_for("h200", target_modules=["q_prj"])
    assert "did you mean q_proj?" in str(caught.value)
    with pytest.raises(SwiftFP8Error, match="unknown target module 'proj'"):
        plan_for("h200", target_modules=["proj"])


def test_a_tied_head_and_a_router_take_no_lora() -> None:
    with pytest.raises(SwiftFP8Error, match="embedding"):
        plan_for("h200", target_modules=["lm_head"])
    assert plan_for("h200", qwen_7b(), target_modules=["lm_head"]).lora is not None
    routed = map_linears(qwen_7b(), "gate_proj", lambda linear: replace(linear, kind="router"))
    with pytest.raises(SwiftFP8Error, match="it is a router"):
        plan_for("h200", routed, target_modules=["gate_proj"])


def test_a_model_without_linears_has_nothing_to_adapt() -> None:
    head_only = replace(qwen_7b(), linears=qwen_7b().linears[-1:])
    with pytest.raises(SwiftFP8Error, match="no linear to adapt") as caught:
        plan_for("h200", head_only)
    assert caught.value.fix == "set tuner=full"
    assert plan_for("h200", head_only, tuner="full").lora is None


def test_experts_stay_high_count_in_coverage_and_take_no_lora() -> None:
    meta = qwen_half_b()
    experts = LinearMeta(
        name="model.layers.0.mlp.experts.down_proj",
        in_features=4864,
        out_features=896,
        bias=False,
        kind="experts",
        layer=0,
        count=8,
    )
    dense = plan_for("h200", meta)
    plan = plan_for("h200", replace(meta, linears=(*meta.linears, experts)))
    found = layer(plan, experts.name)
    assert found.precision == "bf16" and "experts" in found.reason and not found.lora
    assert found.flops == 8 * 4864 * 896
    assert plan.decoder_coverage < dense.decoder_coverage == 1.0
    with pytest.raises(SwiftFP8Error, match="3-D parameter of all experts"):
        plan_for(
            "h200",
            replace(meta, linears=(*meta.linears, replace(experts, name="m.experts.up"))),
            target_modules=["experts.up"],
        )


def test_a_small_model_takes_one_cpu_thread() -> None:
    small = replace(qwen_half_b(), total_params=3_000_000)
    assert plan_for(cpu(), small).cpu_threads == 1
    assert plan_for(cpu()).cpu_threads is None
    assert plan_for("h200", small).cpu_threads is None


def test_full_tuning_trains_every_weight_and_has_no_adapters() -> None:
    plan = plan_for("h200", tuner="full")
    assert plan.lora is None
    assert all(found.trainable and not found.lora for found in plan.layers)


@pytest.mark.parametrize(
    ("hardware", "tuner", "dtype"),
    [("v100", "full", "fp32"), ("v100", "lora", "fp16"), ("h200", "full", "bf16")],
)
def test_fp16_trains_fp32_masters(hardware: str, tuner: str, dtype: str) -> None:
    assert plan_for(hardware, tuner=tuner).weight_dtype == dtype


# --- options ------------------------------------------------------------------------------------


def test_options_reach_the_recipe() -> None:
    options = {"recipe": "fp8_delayed", "margin": 1, "amax_history_len": 16, "start_step": 20}
    plan = plan_for("h200", precision=options | {"split_accumulator": True})
    assert plan.recipe is not None
    assert (plan.recipe.margin, plan.recipe.amax_history_len) == (1, 16)
    assert plan.recipe.split_accumulator and plan.recipe.fp8_format == "hybrid"
    assert plan.start_step == 20
    assert any("step 20" in note for note in plan.notes)


def test_local_scales_take_e4m3_gradients_and_say_so() -> None:
    plan = plan_for("b200")
    assert plan.recipe is not None and plan.recipe.fp8_format == "e4m3"
    assert any("e4m3 for gradients" in note for note in plan.notes)


def test_options_without_effect_are_named() -> None:
    plan = plan_for("h200", precision={"margin": 2, "interval": 1})
    assert any("margin=2" in note and "fp8_delayed" in note for note in plan.notes)
    assert any("interval" in note for note in plan.notes)


def test_delayed_scaling_refuses_backward_override() -> None:
    options = {"recipe": "fp8_delayed", "backward_override": "high_precision"}
    with pytest.raises(SwiftFP8Error, match="no backward_override"):
        plan_for("h200", precision=options)


def test_all_problems_come_at_once() -> None:
    with pytest.raises(SwiftFP8Errors) as caught:
        plan_for(
            "a100", target_modules=["q_prj"], precision={"exclude": ["dwn_proj"], "strict": True}
        )
    assert len(caught.value.problems) == 3


# --- report -------------------------------------------------------------------------------------


def printed(plan: Plan) -> str:
    out = io.StringIO()
    print_plan(plan, Console(file=out, width=80))  # what rich takes where there is no terminal
    return out.getvalue()


def test_the_table_groups_roles_and_fits_80_columns() -> None:
    text = printed(plan_for("h200", qwen_7b(), precision={"first_layers_bf16": 1}))
    assert max(map(len, text.splitlines())) <= 80
    flat = " ".join(text.split())
    assert "model.layers.{1-27}.self_attn.q_proj" in flat
    assert "18944 x 3584" in flat and "lm_head" in flat
    assert "precision.first_layers_bf16=1" in flat
    assert "fp8 asked, fp8_current by te, the rest in bf16 given" in flat
    assert len(text.splitlines()) < 60


@pytest.mark.parametrize("hardware", ["a100", "v100"])
def test_the_table_warns_of_a_fallback_once(hardware: str) -> None:
    text = " ".join(printed(plan_for(hardware)).split())
    assert text.count("WARNING") == 1
    assert text.count("FP8 matmuls need 8.9 or newer") == 1


def test_a_length_over_the_models_positions_is_said() -> None:
    meta = replace(qwen_half_b(), max_position_embeddings=1024)
    said = "max_length=1025 is over the model's max_position_embeddings of 1024"
    assert any(said in note for note in plan_for("h200", meta, max_length=1025).notes)
    unknown = replace(meta, max_position_embeddings=0)
    for quiet in (plan_for("h200", meta, max_length=1024), plan_for("h200", unknown)):
        assert not any("max_position_embeddings" in note for note in quiet.notes)


def test_a_length_over_learned_positions_is_an_error() -> None:
    meta = replace(qwen_half_b(), max_position_embeddings=1024, learned_positions=True)
    plan_for("h200", meta, max_length=1024)
    with pytest.raises(SwiftFP8Error, match="embedding for each of 1024 positions") as caught:
        plan_for("h200", meta, max_length=1025)
    assert "set max_length=1024" in str(caught.value)


@pytest.mark.parametrize(
    ("hardware", "options", "masters"),
    [
        ("h200", {"tuner": "full"}, True),
        ("h200", {"tuner": "full", "dtype": "bf16"}, True),
        ("h200", {"tuner": "lora"}, False),
        ("h200", {"tuner": "full", "dtype": "fp32"}, False),
        ("v100", {"tuner": "full"}, False),  # FP16 trains FP32 weights
    ],
)
def test_bf16_weights_that_are_trained_get_masters(
    hardware: str, options: dict[str, str], masters: bool
) -> None:
    plan = plan_for(hardware, **options)
    assert plan.master_weights == masters
    assert ("exact FP32 masters" in " ".join(printed(plan).split())) == masters
    assert not any("masters" in note for note in plan.notes)


def test_masters_that_are_switched_off_are_noted() -> None:
    off = OptimConfig(master_weights=False)
    plan = plan_for("h200", tuner="full", optim=off)
    assert not plan.master_weights
    assert any("are lost (optim.master_weights=false)" in note for note in plan.notes)
    assert not any("masters" in note for note in plan_for("h200", optim=off).notes)


def test_moments_in_bf16_are_planned_or_have_no_effect() -> None:
    small = OptimConfig(state_dtype="bf16")
    plan = plan_for("h200", tuner="full", optim=small)
    assert plan.state_dtype == "bf16"
    assert "FP32 masters, Adam's moments in BF16" in " ".join(printed(plan).split())
    assert not any("state_dtype" in note for note in plan.notes)
    for hardware, options in (
        ("h200", {"optim": small}),
        ("v100", {"tuner": "full", "optim": small}),
        ("h200", {"tuner": "full", "optim": replace(small, master_weights=False)}),
    ):
        plan = plan_for(hardware, **options)
        assert plan.state_dtype == "fp32"
        assert any("optim.state_dtype=bf16 has no effect" in note for note in plan.notes)


def test_group_names() -> None:
    plan = plan_for("h200", precision={"exclude": ["layers.2.mlp.*", "layers.4.mlp.*"]})
    names = [name for name, _ in group_layers(plan.layers)]
    assert "model.layers.*.self_attn.q_proj" in names
    assert "model.layers.2.mlp.up_proj" in names
    assert "model.layers.{0-1,3,5-23}.mlp.up_proj" in names
    assert sum(len(group) for _, group in group_layers(plan.layers)) == len(plan.layers)


def test_json_names_every_linear_with_its_reason() -> None:
    plan = plan_for("a100")
    report = json.loads(json.dumps(precision_report(plan)))
    assert len(report["layers"]) == len(plan.layers)
    assert "FP8 matmuls need 8.9" in report["layers"]["model.layers.0.mlp.up_proj"]["reason"]
    assert report["fallbacks"][0]["given"] == "bf16"
    whole = json.loads(plan_to_json(plan))
    assert whole["memory"]["total"] == pytest.approx(plan.memory.total)
    assert whole["lora"]["rank"] == 8
